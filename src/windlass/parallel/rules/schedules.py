"""The orders in which a pipeline's ranks run their micro-batches: what each needs, and which rank holds which stage. No torch.

P ranks (parallel.pp), M micro-batches per step, F a forward and B a backward of one stage:

    gpipe                     all M forwards, then all M backwards; M micro-batches' activations are kept
    1f1b                      after a warm-up of at most P forwards, one backward per forward; at most P are kept
    interleaved-1f1b          two stages per rank, P apart: the warm-up passes in half the time, twice the messages
    interleaved-zero-bubble   the same, and B is cut in two: the gradient of the input at once, that of the weights later,
                              where the rank would wait
    zbv                       two stages per rank in a V (rank 0 has the first and the last), B cut in two as well

    idle share of a rank, where all stages take the same time and B = 2 F: gpipe and 1f1b (P-1)/(M+P-1), interleaved-1f1b
    (P-1)/(2M+P-1), the other two (P-1)/(6M+P-1) (tests/parallel/rules/test_schedules finds these in executed schedules)

Sources: GPipe, Huang et al., arXiv 1811.06965; 1F1B, Narayanan et al., arXiv 1806.03377; interleaved, arXiv 2104.04473;
zero bubble and ZB-V, Qi et al., arXiv 2401.10241. The schedules themselves are torch.distributed.pipelining's.
"""

from dataclasses import dataclass
from typing import Final

from windlass.parallel.config import Schedule


@dataclass(frozen=True)
class ScheduleKind:
    """`stages_per_rank`; `splits`: whether backward is cut in two; `torch`: the class in torch.distributed.pipelining."""

    stages_per_rank: int
    splits: bool
    torch: str


KINDS: Final[dict[Schedule, ScheduleKind]] = {
    "gpipe": ScheduleKind(1, False, "ScheduleGPipe"),
    "1f1b": ScheduleKind(1, False, "Schedule1F1B"),
    "interleaved-1f1b": ScheduleKind(2, False, "ScheduleInterleaved1F1B"),
    "interleaved-zero-bubble": ScheduleKind(2, True, "ScheduleInterleavedZeroBubble"),
    "zbv": ScheduleKind(2, True, "ScheduleZBVZeroBubble"),
}


def owners(schedule: Schedule, num_ranks: int) -> tuple[int, ...]:
    """Stage -> the pipeline rank that holds it."""
    down = tuple(range(num_ranks))
    if KINDS[schedule].stages_per_rank == 1:
        return down
    return down + down[::-1] if schedule == "zbv" else down + down


def in_flight(schedule: Schedule, num_ranks: int, stage: int, num_micro: int) -> int:
    """The most micro-batches whose activations the rank of `stage` keeps of that stage at once. For a schedule whose backward is
    one piece."""
    kind = KINDS[schedule]
    assert not kind.splits, "selective recomputation, and with it a budget, is refused there"
    if schedule == "gpipe":
        return num_micro
    if kind.stages_per_rank == 1:
        return min(num_micro, num_ranks - stage)
    # the order of torch's ScheduleInterleaved1F1B: rounds of micro-batches through one of the rank's stages after the other
    rank, own = stage % num_ranks, stage // num_ranks
    per_round = num_micro // max(1, num_micro // num_ranks)
    warm_up = min(2 * num_micro, per_round + 2 * (num_ranks - 1 - rank))
    held = most = 0
    for step in range(2 * num_micro):
        is_forward_here = step // per_round % 2 == own
        is_backward_here = step >= warm_up and 1 - (step - warm_up) // per_round % 2 == own
        held += int(is_forward_here)
        most = max(most, held)
        held -= int(is_backward_here)
    return most
