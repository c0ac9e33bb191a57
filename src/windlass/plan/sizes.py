"""Micro-batch and recomputation by what fits into a device: what is tried, in which order. No torch.

The global batch is fixed, so a larger micro-batch changes nothing but how often a step pays for its weights: each micro-batch
moves 12 bytes per parameter for the gradient (precision/masters.py) and gathers every unit. From ENOUGH_TOKENS on that is noise,
and more tokens at once cost memory for nothing. So the order is

    1. nothing recomputed, or what is cheap (selective): the more tokens, up to ENOUGH_TOKENS, the better; of as many none first
       (Llama-3.1-8B on an H200, gpu-headline.json: 2 x 4,096 selective 12,025 tokens/s, 1 x 4,096 none 11,777)
    2. all recomputed (full, a third more FLOPs), the more tokens the better: only where nothing above fits

What the count (memory.py) puts over the limit by more than SLACK is left out; the rest is tried for real, the best first
(training/probe.py). The last of the order is tried in any case: a count is no reason to refuse a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from windlass.plan.memory import RankMemory

ENOUGH_TOKENS: Final = 16_384
"""Of one rank in a micro-batch: 12 bytes per parameter take 2.5 % of the time of its 6 FLOPs per token, by an H200's data sheet
(4.8 TB/s, 989 TFLOP/s)."""
SLACK: Final = 0.1
"""By how much a count may be over the limit and is still tried."""
KINDS: Final = ("none", "selective", "full")


@dataclass(frozen=True)
class StepSize:
    """What is chosen: sequences per rank in one forward, and what every block recomputes."""

    micro_batch: int
    recompute: str

    def __str__(self) -> str:
        return f"run.micro_batch={self.micro_batch} with parallel.recompute={self.recompute}"


def micro_batches(sequences: int, least: int, length: int) -> list[int]:
    """Divisors of a rank's `sequences` per step that are multiples of `least`, up to the first with ENOUGH_TOKENS."""
    found = [m for m in range(least, sequences + 1, least) if sequences % m == 0]
    enough = next((index for index, m in enumerate(found) if m * length >= ENOUGH_TOKENS), len(found))
    return found[: enough + 1]


def in_order(batches: Sequence[int], kinds: Sequence[str], length: int) -> list[StepSize]:
    """Every pair, the best first."""
    sizes = [StepSize(batch, kind) for batch in batches for kind in kinds]
    return sorted(
        sizes, key=lambda size: (size.recompute == "full", -size.micro_batch * length, KINDS.index(size.recompute))
    )


def worth_trying(sizes: Sequence[StepSize], memory: RankMemory, length: int, limit_bytes: int) -> list[StepSize]:
    """Those that the count does not rule out, and the last."""
    return [
        size
        for index, size in enumerate(sizes)
        if index == len(sizes) - 1 or total_bytes(memory, size, length) <= limit_bytes * (1 + SLACK)
    ]


def total_bytes(memory: RankMemory, size: StepSize, length: int) -> int:
    return memory.standing().total + memory.passing(size.micro_batch, length, size.recompute).total
