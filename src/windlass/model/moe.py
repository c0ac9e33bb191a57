"""Mixtures of experts: a router sends each token to K of E MLPs and sums their outputs, weighted by its probabilities.

    p = softmax(W x);   e_1..e_K = the K largest of p;   y = sum_k p[e_k] expert_{e_k}(x)      (normed: p[e_k] / sum_j p[e_j])

No token is dropped: every expert takes all rows sent to it. Rows (a token once per expert) are sorted by expert, so each expert's
rows are neighbours, and one grouped product multiplies all experts' rows by their own matrices; its sizes stay on the device.
That product supports neither fp64 nor sizes that are not multiples of 16 bytes: there the experts run one by one, with one host
read of the sizes per layer and pass. Both directions of the sort are gathers, also in backward (a row has one position, and a
token's K gradients are summed in order), so results do not depend on the timing of atomic additions.

The router computes in promote_types(dtype, float32), as transformers does. The layer returns the sums per sequence that the
load-balancing loss needs (routing.py) and stores nothing, so a block may run again in backward. Selective recomputation keeps its
top-k; full recomputation computes the same top-k to the last bit, from the same numbers in the same kernels.

Source: Shazeer et al., arXiv 1701.06538; without dropping: Gale et al., arXiv 2211.15841; Qwen3's: arXiv 2505.09388.

Legend: B sequences, T positions, N = B T tokens, D hidden size, E experts, K experts per token, R = N K rows, F expert width.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from windlass.model.architecture import Architecture
from windlass.model.layers import activate

Routed = tuple[Tensor, Tensor]
"""counts_BE (int64): counted tokens of each sequence sent to each expert; mass_BE: their probabilities of it, summed."""


class Compute(Protocol):
    """Experts.compute."""

    def __call__(self, x_ND: Tensor, index_R: Tensor, back_R: Tensor, counts_E: Tensor, repeats: int = 1) -> Tensor: ...


class ExpertExchange(Protocol):
    """Rows to the ranks that hold their experts, and back (parallel/expert.py)."""

    def __call__(self, rows_RD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """`rows_RD` sorted by expert, `counts_E` of each; -> the experts' outputs for them, in the same order."""
        ...


class ExpertMatrix(nn.Module):
    """One matrix per expert: weight [E, out, in]; cut over ranks it is a DTensor, and `here` this rank's part."""

    def __init__(self, experts: int, out_size: int, in_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_size, in_size))

    def here(self) -> Tensor:
        return self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, index_R: Tensor, back_R: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(back_R)
        ctx.repeats = repeats
        return x_ND.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_RD,) = grads
        (back_R,) = ctx.saved_tensors
        grad = grad_RD.index_select(0, back_R)
        if ctx.repeats > 1:
            grad = grad.unflatten(0, (-1, ctx.repeats)).sum(1)
        return grad, None, None, None


def gather_rows(x_ND: Tensor, index_R: Tensor, back_R: Tensor, repeats: int = 1) -> Tensor:
    """x[index], whose backward is a gather too. `back`: where row n's `repeats` copies are in the result, n after n."""
    gathered: Tensor = _Gather.apply(x_ND, index_R, back_R, repeats)
    return gathered


def sort_rows(expert_R: Tensor) -> tuple[Tensor, Tensor]:
    """(order, inverse): row order[i] goes to position i, and row r is at position inverse[r]. Stable."""
    order_R = expert_R.argsort(stable=True)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
    return order_R, inverse_R


def count_rows(expert_R: Tensor, num_experts: int) -> Tensor:
    """Rows of each expert, int64; `expert_R` is sorted. By search: no atomic additions, no host read."""
    ends_E = torch.searchsorted(expert_R, torch.arange(num_experts, device=expert_R.device), right=True)
    return ends_E.diff(prepend=ends_E.new_zeros(1))


class Experts(nn.Module):
    """down(act(gate(x)) * up(x)) of each token's experts, weighted and summed."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.activation, self.num_experts = arch.activation, arch.num_experts
        self.gate_proj = ExpertMatrix(arch.num_experts, arch.expert_size, arch.hidden_size)
        self.up_proj = ExpertMatrix(arch.num_experts, arch.expert_size, arch.hidden_size)
        self.down_proj = ExpertMatrix(arch.num_experts, arch.hidden_size, arch.expert_size)
        self.exchange: ExpertExchange | None = None  # parallel/expert.py sets it
        self.finish: Callable[[Tensor], Tensor] | None = None  # of the sum; parallel/expert.py sets it

    def forward(self, hidden_BTD: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        num_chosen = chosen_NK.shape[1]
        expert_R = chosen_NK.flatten()
        order_R, inverse_R = sort_rows(expert_R)
        counts_E = count_rows(expert_R[order_R], self.num_experts)
        hidden_ND, token_R = hidden_BTD.flatten(0, 1), order_R // num_chosen
        if self.exchange is None:
            made_RD = self.compute(hidden_ND, token_R, inverse_R, counts_E, num_chosen)
        else:
            rows_RD = gather_rows(hidden_ND, token_R, inverse_R, num_chosen)
            made_RD = self.exchange(rows_RD, counts_E, self.compute)
        shape = (*hidden_BTD.shape[:-1], num_chosen)
        made_BTKD = gather_rows(made_RD, inverse_R, order_R).unflatten(0, shape)
        out_BTD = (made_BTKD * weights_NK.view(*shape, 1)).sum(-2)  # no view: FSDP2 warns of units that return one
        return out_BTD if self.finish is None else self.finish(out_BTD)

    def compute(self, x_ND: Tensor, index_R: Tensor, back_R: Tensor, counts_E: Tensor, repeats: int = 1) -> Tensor:
        """x[index], rows sorted by the experts that are here, `counts_E` of each -> [R, D]. `back`, `repeats`: gather_rows."""
        rows_RD = gather_rows(x_ND, index_R, back_R, repeats)
        gate_EFD, up_EFD, down_EDF = self.gate_proj.here(), self.up_proj.here(), self.down_proj.here()
        if not is_grouped(rows_RD.dtype, gate_EFD.shape[1:]):
            return self._one_by_one(rows_RD, counts_E, gate_EFD, up_EFD, down_EDF)
        ends_E = counts_E.cumsum(0).to(torch.int32)

        def product(x: Tensor, matrices: Tensor) -> Tensor:
            return functional.grouped_mm(x, matrices.transpose(1, 2), offs=ends_E)

        inner_RF = activate(product(rows_RD, gate_EFD), self.activation) * product(rows_RD, up_EFD)
        return product(inner_RF, down_EDF)

    def _one_by_one(self, rows_RD: Tensor, counts_E: Tensor, *matrices: Tensor) -> Tensor:
        """The plain form; tests compare the grouped one with it. An expert without rows multiplies none, and so has a
        gradient of zeros."""
        made = []
        pieces = rows_RD.split(counts_E.tolist())
        for rows, gate_FD, up_FD, down_DF in zip(pieces, *(matrix.unbind(0) for matrix in matrices), strict=True):
            inner = activate(functional.linear(rows, gate_FD), self.activation) * functional.linear(rows, up_FD)
            made.append(functional.linear(inner, down_DF))
        return torch.cat(made)


def is_grouped(dtype: torch.dtype, sizes: torch.Size) -> bool:
    """Whether torch's grouped product takes matrices of these sizes: not in fp64, and rows of whole 16 bytes."""
    return dtype != torch.float64 and all(size * dtype.itemsize % 16 == 0 for size in sizes)


class MoE(nn.Module):
    """The MLP of a sparse layer. `gate` is the router's matrix [E, D]."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.num_chosen, self.is_normed = arch.experts_per_token, arch.normed_weights
        self.gate = nn.Linear(arch.hidden_size, arch.num_experts, bias=False)
        self.experts = Experts(arch)

    def forward(self, hidden_BTD: Tensor, counted_BT: Tensor | None) -> tuple[Tensor, Routed]:
        """`counted_BT`: tokens that count for the load-balancing loss; None: all."""
        logits_BTE = self.gate(hidden_BTD)
        p_BTE = logits_BTE.to(torch.promote_types(logits_BTE.dtype, torch.float32)).softmax(-1)
        weights_BTK, chosen_BTK = p_BTE.topk(self.num_chosen, dim=-1)
        if self.is_normed:
            weights_BTK = weights_BTK / weights_BTK.sum(-1, keepdim=True)
        weights_NK = weights_BTK.to(logits_BTE.dtype).flatten(0, 1)
        out_BTD = self.experts(hidden_BTD, chosen_BTK.flatten(0, 1), weights_NK)
        is_chosen_BTE = torch.zeros_like(p_BTE, dtype=torch.bool).scatter_(-1, chosen_BTK, True)
        if counted_BT is not None:
            is_chosen_BTE = is_chosen_BTE & counted_BT[:, :, None]
            p_BTE = p_BTE.where(counted_BT[:, :, None], 0)
        return out_BTD, (is_chosen_BTE.sum(1), p_BTE.sum(1))
