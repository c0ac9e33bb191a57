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
