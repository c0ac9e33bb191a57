"""FSDP2: parameters, gradients and optimizer states cut into equal shards along `shard`, gathered unit by unit when used.

Each decoder block is a unit; the root unit holds embedding, final norm and head (so a tied head keeps its identity). With
U = blocks + 1 units, P parameters, S = shard, A micro-batches per step, b bytes per gathered element, r per reduced one:

                      ZeRO-3 (zero: 3)                          ZeRO-2 (zero: 2)
    kept per rank     parameters 4P/S, gradients 4P/S,          the same, and b P of gathered parameters between the
                      states 8P/S; two units gathered           first forward and the last backward of a step
    all-gathers       A (U + blocks): each block in forward     U: gathered once, kept over all micro-batches
                      and again in backward; the root unit
                      is kept from forward to backward
    reduce-scatters   A U                                       A U
    all-reduces       U where replicate > 1 (HSDP), on the last micro-batch only; else none
    bytes sent        an all-gather of n elements: n b (S-1)/S per rank; a reduce-scatter: n r (S-1)/S;
                      an all-reduce of a shard over R replicas: 2 (n/S) r (R-1)/R

Gradients are reduced on every micro-batch: keeping them whole instead would save (A-1) U reduce-scatters and cost the
4P bytes per rank that sharding is there to avoid. The all-reduce of HSDP acts on shards and can wait for the last one.

Why the gradient is right: reductions are plain sums (`set_gradient_divide_factor(1)`, and the forced SUM, without which gloo
refuses fp32), the loss is divided by the global count before backward, and no world size appears.

Sources: ZeRO, Rajbhandari et al., arXiv 1910.02054; FSDP, Zhao et al., arXiv 2304.11277; torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from windlass.parallel.mesh import Mesh
from windlass.parallel.precision import Precision


def apply_fsdp(model: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, precision: Precision, zero: int) -> None:
    """Shards `model` in place, a unit per block and one for the rest. Does nothing on one rank that computes as it stores."""
    if mesh.fsdp.size() == 1 and not precision.is_mixed:
        return
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp, reshard_after_forward=zero == 3, mp_policy=precision.fsdp())
    # the root comes last (it takes what no block has) and is needed again at once by backward: never resharded in between
    fully_shard(model, mesh=mesh.fsdp, reshard_after_forward=False, mp_policy=precision.fsdp())
    for unit in fsdp_units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def before_micro_batch(model: nn.Module, is_last: bool, zero: int) -> None:
    """What the communication of this micro-batch's backward must do: see the table above."""
    if not isinstance(model, FSDPModule):
        return
    model.set_is_last_backward(is_last)
    model.set_requires_all_reduce(is_last)
    if zero == 2:
        model.set_reshard_after_backward(is_last)


def after_evaluation(model: nn.Module) -> None:
    """Frees what a forward without a backward left gathered; otherwise the next optimizer step would leave it stale."""
    for unit in fsdp_units(model):
        unit.reshard()
