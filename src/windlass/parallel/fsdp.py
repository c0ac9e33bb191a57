"""FSDP2: parameters, gradients and optimizer states cut into equal shards along `shard`, gathered unit by unit when used.

A unit is `blocks_per_unit` decoder blocks. The E units of the ends hold the rest: one where head and embedding are tied (so that
they stay one tensor), else one of the embedding and one of final norm and head, whose gradient leaves at the start of
backward. With k = blocks_per_unit, U = ceil(blocks / k) + E units, P parameters, S = shard, A micro-batches per step, b bytes per
gathered element, r per reduced one:

                      ZeRO-3 (zero: 3)              ZeRO-2 (zero: 2)              ZeRO-1 (zero: 1)
    kept per rank     parameters 4P/S, gradients    the same, and b P of          the same as ZeRO-2, and r P of
                      4P/S, states 8P/S; the ends   gathered parameters           whole gradients from the first
                      and two units of blocks       through the step              backward to the last
                      gathered
    all-gathers       A (2 U - E): each unit in     U: gathered once, kept        U
                      forward and again in          over all micro-batches
                      backward; the ends are
                      kept in between
    reduce-scatters   A U                           A U                           U, on the last micro-batch
    all-reduces       U where replicate > 1 (HSDP), on the last micro-batch only; else none
    bytes sent        an all-gather of n elements: n b (S-1)/S per rank; a reduce-scatter: n r (S-1)/S;
                      an all-reduce of a shard over R replicas: 2 (n/S) r (R-1)/R

Experts that are dealt out over ranks (`expert`) are one more unit per sparse layer, over expert_fsdp; U counts them too.

ZeRO-1 sends what DDP sends, (b + r) P (S-1)/S however many micro-batches, and keeps r P bytes of whole gradients per rank for
it; with one micro-batch per step it is ZeRO-2 to the byte. k > 1 sends the same bytes in fewer, larger messages, k blocks
gathered at once.

`prefetch` n: while a unit computes, the gathers of the next n are under way. Without it torch issues the next forward gather when
the host reaches that unit, and in backward is one unit ahead. In forward torch keeps the message that a unit was copied out of
until the next has come, so ZeRO-3 holds 2 + n units of blocks: the one that computes, its message, and those under way.

`offload`: the shards (parameters 4P/S, gradients 4P/S, states 8P/S) are in host memory, pinned where there is a GPU, and the
optimizer steps there. The device keeps the gathered units and the activations. The bus carries 4 n/S bytes up per gather of n
elements and r n/S down per reduction. Tests prove parity on CPU, where host and device are one; the device memory that it
saves and the time that it costs are not measured.

Why the gradient is right: reductions are plain sums (`set_gradient_divide_factor(1)`, and the forced SUM, without which gloo
refuses fp32), the loss is divided by the global count before backward, and no world size appears. Over one rank no factor is set:
torch divides by the number of ranks, skips that for 1, and would divide by a factor of 1.0 in a pass of its own, 8 bytes per
parameter.

Sources: ZeRO, Rajbhandari et al., arXiv 1910.02054; ZeRO-Offload, Ren et al., arXiv 2101.06840; FSDP, Zhao et al.,
arXiv 2304.11277; torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from windlass.model.moe import Experts
from windlass.parallel.config import ParallelConfig
from windlass.parallel.expert import cut_dim
from windlass.parallel.mesh import Mesh
from windlass.precision.policy import Precision


def apply_fsdp(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    end: Sequence[nn.Module],
    mesh: Mesh,
    precision: Precision,
    config: ParallelConfig,
) -> None:
    """Shards `model` in place, a unit per `config.blocks_per_unit` blocks, one of what `end` has (Decoder.end), and one of the
    rest. Does nothing on one rank that computes in the dtype and on the device that it stores in, unless its matrices are cut
    over `tp` (tensor.py)."""
    if mesh.fsdp.size() == 1 and not precision.is_mixed and not config.offload and mesh.layout.tp == 1:
        return
    on_gpu = mesh.dense.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=on_gpu) if config.offload else OffloadPolicy()
    shard: Any = partial(fully_shard, mesh=mesh.fsdp, mp_policy=precision.fsdp(), offload_policy=offload)
    if mesh.expert_fsdp is not None:
        dealt = partial(
            shard, mesh=mesh.expert_fsdp, shard_placement_fn=partial(cut_dim, num_ranks=_ranks(mesh.expert_fsdp))
        )
        for experts in dealt_experts(model):
            dealt(experts, reshard_after_forward=config.zero_stage == 3)  # before their block, which would include them
    placement = partial(cut_dim, num_ranks=_ranks(mesh.fsdp))
    for start in range(0, len(blocks), config.blocks_per_unit):
        unit = list(blocks[start : start + config.blocks_per_unit])
        shard(unit, reshard_after_forward=config.zero_stage == 3, shard_placement_fn=placement)
    if end:  # backward needs it at once: never resharded in between
        shard(list(end), reshard_after_forward=False, shard_placement_fn=placement)
    # the root comes last, since it takes what no other unit has; backward would gather it again to read nothing: not resharded
    shard(model, reshard_after_forward=False)
    units = fsdp_units(model)
    dealt_units = dealt_experts(model)
    for one in units:
        ranks = mesh.expert_fsdp if one in dealt_units else mesh.fsdp
        if ranks is None or ranks.size() > 1:
            one.set_gradient_divide_factor(1.0)
        one.set_force_sum_reduction_for_comms(True)
    if config.prefetch:
        _prefetch(units, config.prefetch)


def _ranks(mesh: DeviceMesh) -> int:
    """The number of ranks on the mesh's last axis, along which parameters are cut."""
    return mesh.size(mesh.ndim - 1)


def dealt_experts(model: nn.Module) -> list[Experts]:
    """The experts of each sparse layer, where they are dealt out over ranks: each is a unit of its own, over fewer ranks."""
    return [module for module in model.modules() if isinstance(module, Experts) and module.exchange is not None]


def _prefetch(units: Sequence[FSDPModule], ahead: int) -> None:
    """Both passes begin at the root, the first of `units`: forward continues with the first blocks, backward with the end."""
    forward, backward = list(units), [units[0], *reversed(units[1:])]
    for index in range(len(units)):
        forward[index].set_modules_to_forward_prefetch(forward[index + 1 :][:ahead])
        backward[index].set_modules_to_backward_prefetch(backward[index + 1 :][:ahead])


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """One module of each unit, the root's first. Blocks of one unit share their state."""
    units: dict[int, FSDPModule] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            units.setdefault(id(fully_shard.state(module)), module)  # type: ignore[attr-defined]
    return list(units.values())


class Backwards:
    """What each backward of a step communicates: see the table above. Torch's setters walk all modules of a model, thousands of
    calls per step; here each unit is set, and only where the next backward differs from the one before."""

    def __init__(self, model: nn.Module, zero: int):
        self._units, self._zero = fsdp_units(model), zero
        self._is_last: bool | None = True  # as torch begins; None: held

    def before(self, is_last: bool) -> None:
        """`is_last`: of the micro-batches of a step."""
        if not self._units or is_last == self._is_last:
            return
        was_held, self._is_last = self._is_last is None, is_last
        self._units[0].set_is_last_backward(is_last)
        for unit in self._units:
            if self._zero == 1 or was_held:
                unit.set_requires_gradient_sync(is_last or self._zero != 1, recurse=False)  # HSDP's all-reduce included
            if self._zero != 1:
                unit.set_requires_all_reduce(is_last, recurse=False)
            if self._zero in (1, 2):
                unit.set_reshard_after_backward(is_last, recurse=False)

    def hold(self) -> None:
        """Before gradients of weights are computed apart (the second half of a backward that a pipeline cuts in two): FSDP2's
        hooks see some of them and not others. After `before(False)`; nothing is sent until `after_weights`."""
        if self._is_last is not None:
            self._is_last = None
            for unit in self._units:
                unit.set_requires_gradient_sync(False, recurse=False)

    def after_weights(self, is_last: bool) -> None:
        """After gradients of weights were computed apart: adds them to the sums of the step, or sends those sums."""
        if not self._units:
            return
        after_backward = fully_shard.state(self._units[0])._root_post_backward_final_callback  # type: ignore[attr-defined]
        after_backward()  # adds, and so leaves all in one dtype, which a reduction takes
        if is_last or self._zero != 1:
            self.before(is_last)
            after_backward()

    def finish(self) -> None:
        """After the last backward: FSDP2 has waited for its sums."""


def after_evaluation(model: nn.Module) -> None:
    """Frees what a forward without a backward left gathered; otherwise the next optimizer step would leave it stale."""
    for unit in fsdp_units(model):
        unit.reshard()
