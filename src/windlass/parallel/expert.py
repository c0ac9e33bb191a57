"""Expert parallelism: ranks that share parameters hold different experts whole, and tokens travel to them and back.

The picture, for X = 2 ranks of `expert` and 4 experts. Every rank has its own tokens; a row is a token for one of its K experts:

    rank 0   tokens -> router -> rows by expert  0 0 1 | 2 3 3                       0 0 1, 0 1 -> experts 0, 1
                                                               ALL-TO-ALL ->                                  ALL-TO-ALL back
    rank 1   tokens -> router -> rows by expert  0 1 | 2 2                           2 3 3, 2 2 -> experts 2, 3

    stream += sum of a token's rows, weighted by its router, on the token's own rank

`expert` divides shard x context and adds no ranks. It changes the layout of the experts only. Experts are on a mesh of their
own, (pp, replicate, expert_fsdp, expert, tp) with expert_fsdp = shard x context / X: cut by expert into X parts of E / X, and
each part over expert_fsdp by FSDP2, as a unit per block. Gathering a layer's experts takes 1/X of the bytes; the layer's rows
move instead.
Under `tp` each expert's channels are cut too (columns of gate and up, rows of down), every tensor rank routes all positions
alike, and the scatter that ends an MLP sums over channels (tensor.py).

    kept per rank    experts' parameters, gradients and states: 1/(shard x context x tp), as without; gathered, with zero 3, one
                     layer's E / X experts in place of E. Activations of the rows that arrive, which depend on the routing
    sent per rank    per sparse layer and micro-batch an all-to-all of E numbers of 8 bytes, and two of rows in forward, two in
                     backward: R D b bytes each, of which a share of (X-1)/X leaves the rank where loads are even; recompute
                     full: the first three again; selective: none. R = B T K rows: B sequences of T tokens each, K experts a
                     token; b bytes per element
    host             per pass and layer one read of 2 X numbers, the rows sent and received: the host sets message sizes. It
                     waits for the router, not for the experts

No row is dropped, and no size is fixed: uneven loads cost time, never tokens.

Why the gradient is right. All rows of an expert go to its one owner, so the owner's gradient already covers every expert rank's
tokens: it is summed over replicate and expert_fsdp and not over expert. Sums are plain, since the loss is divided by the global
count. The norm counts each expert once, since its DTensor knows its cut. The all-to-all that brought rows returns their
gradients.

Sources: GShard, arXiv 2006.16668; experts beside FSDP: torchtitan; the load-balancing loss: model/routing.py.

Legend: R rows here, Q rows that came, D hidden size, X ranks of `expert`, E experts, L = E / X of them here.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from windlass.model.moe import Compute, Experts, MoE, gather_rows, sort_rows
from windlass.model.transformer import Decoder
from windlass.parallel.cut import cut_parameter, scatter
from windlass.parallel.mesh import Mesh
from windlass.ranks.owned_part import local_tensor

EXPERTS, CHANNELS_OUT, CHANNELS_IN = Shard(0), Shard(1), Shard(2)  # of weights [E, out, in]


class _Exchange(torch.autograd.Function):
    """Sends rows in pieces, the p-th to rank p; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, sent_X: list[int], received_X: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes, ctx.group = (sent_X, received_X), group
        return _all_to_all(rows_RD, sent_X, received_X, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sent_X, received_X = ctx.sizes
        return _all_to_all(grads[0], received_X, sent_X, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent_X: list[int], received_X: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received_X), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received_X, sent_X, group=group)
    return out


class AllToAll:
    """The exchange of one process group: rank x holds the x-th of equal parts of the experts."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def __call__(self, rows_RD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """`rows_RD` sorted by expert, `counts_E` of each -> the experts' outputs for them, in the same order."""
        sent_XL = counts_E.view(self._group.size(), -1)
        received_XL = torch.empty_like(sent_XL)
        dist.all_to_all_single(received_XL, sent_XL, group=self._group)
        sent_X, received_X = torch.stack((sent_XL.sum(1), received_XL.sum(1))).tolist()  # the host reads
        came_QD = _Exchange.apply(rows_RD, sent_X, received_X, self._group)
        # they arrive sorted by sender, then by expert
        expert_XL = torch.arange(sent_XL.shape[1], device=rows_RD.device).expand_as(sent_XL)
        expert_Q = expert_XL.flatten().repeat_interleave(received_XL.flatten(), output_size=sum(received_X))
        order_Q, inverse_Q = sort_rows(expert_Q)
        made_QD = compute(came_QD, order_Q, inverse_Q, received_XL.sum(0))
        back_QD = gather_rows(made_QD, inverse_Q, order_Q)
        returned: Tensor = _Exchange.apply(back_QD, received_X, sent_X, self._group)
        return returned


def apply_expert(model: Decoder, mesh: Mesh) -> None:
    """Cuts the experts of `model`, on meta, over `expert` and `tp`, and gives its routers the ranks that share their work. Names
    stay. Does nothing for a model without experts."""
    if not model.routing.num_layers_here:
        return
    tensor_mesh = mesh.dense["tp"]
    model.routing.num_sharing = tensor_mesh.size()
    if mesh.context is not None:
        model.routing.sum_counts = _sum_over(mesh.context.get_group())
    for block in model.blocks:
        mlp = block.get_submodule("mlp")
        if not isinstance(mlp, MoE):
            continue
        if mesh.expert is not None:
            mlp.experts.exchange = AllToAll(mesh.expert["expert"].get_group())
        if tensor_mesh.size() > 1:
            mlp.experts.finish = lambda part_BTD: scatter(part_BTD, tensor_mesh)
        _cut_experts(mlp.experts, mesh)


def _cut_experts(experts: Experts, mesh: Mesh) -> None:
    by_tensor = mesh.layout.tp > 1
    for matrix, channels in (
        (experts.gate_proj, CHANNELS_OUT),
        (experts.up_proj, CHANNELS_OUT),
        (experts.down_proj, CHANNELS_IN),
    ):
        if mesh.expert is not None and by_tensor:
            matrix.weight = cut_parameter(matrix.weight, mesh.expert["expert", "tp"], EXPERTS, channels)
        elif mesh.expert is not None:
            matrix.weight = cut_parameter(matrix.weight, mesh.expert["expert"], EXPERTS)
        elif by_tensor:
            matrix.weight = cut_parameter(matrix.weight, mesh.dense["tp"], channels)


def _sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def summed(counts: Tensor) -> Tensor:
        total = counts.clone()
        dist.all_reduce(total, group=group)
        return total

    return summed


def cut_dim(parameter: nn.Parameter, num_ranks: int) -> Shard | None:
    """Along which dim FSDP2 cuts a parameter: as torch does (None: its rows), but experts by a dim that `num_ranks` divides,
    since a layer has few experts: 128 of them over 96 ranks would be 2 each, and a third of the ranks would hold none."""
    if parameter.ndim != 3:
        return None
    fitting = [dim for dim, size in enumerate(local_tensor(parameter).shape) if size % num_ranks == 0]
    return Shard(fitting[0]) if fitting else None
