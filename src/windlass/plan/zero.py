"""`parallel.zero: auto`: the least that is cut with which a step fits. No torch.

What is cut has to be sent, and over gloo every message is copied on both sides. Per step of A micro-batches:

    0   nothing is cut: gradients are summed once
    1   optimizer states: weights are gathered and gradients reduced once
    2   gradients too: reduced A times
    3   weights too: a block's are gathered 2 A times, those outside of the blocks A times

All of them compute alike, to the rounding of sums, so a run may go on with another. The formulas of what is sent are in
advice/traffic.py and parallel/fsdp.py.
"""

from collections.abc import Mapping
from typing import Final

from windlass.parallel.config import Stage

STAGES: Final[tuple[Stage, ...]] = (0, 1, 2, 3)


def choose_stage(needed: Mapping[Stage, int], limit_bytes: int) -> Stage:
    """`needed`: bytes of a rank at the peak of a step, of the stages that may be. The least that fits; where none does, the one
    that needs the fewest bytes, which is not 3 where the ends are most of a model."""
    return next(
        (stage for stage in sorted(needed) if needed[stage] <= limit_bytes), min(needed, key=lambda one: needed[one])
    )
