"""Settings of `parallel` that contradict each other, or change nothing beside the others. No torch.

What changes nothing on some number of ranks (`shard: -1` on one) is not refused: one recipe runs on one rank and on many.
"""

from collections.abc import Iterator

from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.schedules import KINDS
from windlass.settings import as_yaml


def axis_errors(parallel: ParallelConfig) -> Iterator[UserError]:
    """Sizes of replicate and shard that no number of ranks fits."""
    for axis, size in (("replicate", parallel.replicate), ("shard", parallel.shard)):
        if size == 0:
            yield UserError(f"parallel.{axis}=0", "an axis has at least 1 rank", "use 1, or -1 for the remaining ranks")
    if parallel.replicate == -1 and parallel.shard == -1 and parallel.zero_stage != 0:
        yield UserError(
            "parallel.replicate=-1 and parallel.shard=-1",
            "only one axis can take the remaining ranks",
            "give one of them a number: shard = ranks per node is the usual choice (HSDP)",
        )
    if parallel.zero_stage == 0 and parallel.shard not in (-1, 0, 1):
        yield UserError(
            f"parallel.zero=0 with parallel.shard={parallel.shard}",
            "zero 0 is DDP: every rank keeps the whole model, nothing is sharded",
            f"use parallel.replicate={parallel.shard}, or {_cutting(parallel)}",
        )


def effect_errors(parallel: ParallelConfig) -> Iterator[UserError]:
    """Settings that would do nothing beside the others."""
    if parallel.zero_stage == 0:
        for name in ("offload", "blocks_per_unit", "prefetch"):
            if not _is_default(parallel, name):
                yield UserError(
                    f"parallel.{name}={as_yaml(getattr(parallel, name))} with parallel.zero=0",
                    f"zero 0 is DDP, which has no FSDP units; {name} is a property of those",
                    f"remove parallel.{name}, or use {_cutting(parallel)}",
                )
    elif not _is_default(parallel, "bucket_mib"):
        yield UserError(
            f"parallel.bucket_mib={parallel.bucket_mib:g} with parallel.zero={parallel.zero}",
            "buckets are DDP's (zero 0), "
            + ("and auto may choose another stage" if parallel.zero == "auto" else "FSDP sends one message per unit"),
            "remove parallel.bucket_mib"
            + (
                ", or use parallel.zero=0"
                if parallel.zero == "auto"
                else ", or use parallel.blocks_per_unit for larger messages"
            ),
        )
    if parallel.zero_stage != 0 and parallel.prefetch and parallel.shard == parallel.context == 1:
        yield UserError(
            f"parallel.prefetch={parallel.prefetch} with parallel.shard=1",
            "without sharding nothing is gathered",
            "remove parallel.prefetch, or use parallel.shard=-1",
        )
    if parallel.async_tp and parallel.tp == 1:
        yield UserError(
            "parallel.async_tp=true with parallel.tp=1",
            "it overlaps products with what tensor ranks exchange, and there are none",
            "remove parallel.async_tp, or use parallel.tp=2 or more",
        )
    if parallel.async_tp and parallel.compile is False:
        yield UserError(
            "parallel.async_tp=true with parallel.compile=false",
            "it is torch.compile that cuts a block's products into pieces",
            "remove parallel.async_tp, or use parallel.compile=true",
        )
    if parallel.activation_gib is not None and parallel.recompute != "selective":
        yield UserError(
            f"parallel.activation_gib={parallel.activation_gib} with parallel.recompute={parallel.recompute}",
            "activation_gib is the budget within which selective chooses; none and full leave nothing to choose",
            "use parallel.recompute=selective, or remove parallel.activation_gib",
        )


def _cutting(parallel: ParallelConfig) -> str:
    """Stages for a remedy to name: zero 3 is refused in a pipeline."""
    return f"parallel.zero={'1 or 2' if parallel.pp > 1 else '2 or 3'}"


def fp8_errors(parallel: ParallelConfig, policy: str) -> Iterator[UserError]:
    """Layouts in which products in fp8 would have other scales than on one process."""
    if policy != "fp8":
        return
    cut = [f"parallel.{axis}={getattr(parallel, axis)}" for axis in ("tp", "context") if getattr(parallel, axis) > 1]
    if cut:
        yield UserError(
            f"{' and '.join(cut)} with precision.policy=fp8",
            "fp8 takes a scale from a whole matrix, or from the whole rows of a micro-batch, and each of these ranks sees a part",
            f"use {' and '.join(one.partition('=')[0] + '=1' for one in cut)}, or precision.policy=bf16",
        )
    if parallel.pp > 1 and KINDS[parallel.schedule].splits:
        yield UserError(
            f"parallel.schedule={parallel.schedule} with precision.policy=fp8",
            "a product in fp8 computes both of its gradients at once; this schedule computes them apart",
            "use parallel.schedule=1f1b, or precision.policy=bf16",
        )


def gradient_errors(world: int, adds_in_bf16: bool) -> Iterator[UserError]:
    """Gradients that are added up in bf16 where ranks sum them."""
    if adds_in_bf16 and world > 1:
        yield UserError(
            f"precision.gradients=bf16 on {world} ranks",
            "one process may add its gradients up in bf16; beside fp32 weights, what ranks sum is kept in fp32",
            "remove precision.gradients (a run goes on without it by 'run.accept_drift=[precision.gradients]'); "
            "precision.reduce=bf16 halves what is sent",
        )


def unit_errors(parallel: ParallelConfig, num_blocks: int) -> Iterator[UserError]:
    """Units and prefetches that reach past a model of `num_blocks` blocks."""
    if parallel.blocks_per_unit > num_blocks:
        yield UserError(
            f"parallel.blocks_per_unit={parallel.blocks_per_unit} for a model of {num_blocks} blocks",
            "a unit is some of the model's blocks",
            f"use parallel.blocks_per_unit={num_blocks} or less",
        )
        return
    num_units = -(-num_blocks // parallel.blocks_per_unit)
    if parallel.prefetch > num_units:
        yield UserError(
            f"parallel.prefetch={parallel.prefetch} for {num_units} units of {parallel.blocks_per_unit} blocks",
            "no more units can be gathered ahead than there are",
            f"use parallel.prefetch={num_units} or less",
        )


def _is_default(parallel: ParallelConfig, name: str) -> bool:
    return bool(getattr(parallel, name) == type(parallel).model_fields[name].default)
