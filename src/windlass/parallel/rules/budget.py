"""The least that a budget of activations must hold. No torch."""

from collections.abc import Mapping, Sequence

from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.units import GIB, format_bytes


def check_least(
    full: Sequence[int], ranks: Sequence[Mapping[int, int]], config: ParallelConfig, shape_BT: tuple[int, int]
) -> None:
    """Raises UserError where a rank's blocks keep more than `activation_gib` with all of them recomputed in full. `full`: bytes
    that each block keeps then of one micro-batch of `shape_BT`. `ranks`: for each pipeline rank, how many micro-batches it keeps
    of each of its blocks at once."""
    assert config.activation_gib is not None
    budget, (micro_batch, length) = int(config.activation_gib * GIB), shape_BT
    least = max(sum(full[index] * number for index, number in blocks.items()) for blocks in ranks)
    if least <= budget:
        return
    needed = -(-least * 10_000 // GIB) / 10_000  # rounded up, so that it works
    fitting = budget * micro_batch // least
    remedy = f"use parallel.activation_gib={max(needed, 1e-4)}"
    if fitting and config.pp == 1:  # a pipeline has more of the smaller ones in flight
        remedy += f", or run.micro_batch={fitting}"
    raise UserError(
        f"parallel.activation_gib={config.activation_gib} with micro-batches of {micro_batch} x {length} tokens",
        f"with every block recomputed in full the blocks still keep their inputs: {format_bytes(least)}",
        remedy,
    )
