"""Micro-batch and recomputation by what fits into a device: what is tried, in which order. No torch.

The global batch is fixed, so a larger micro-batch changes nothing but how often a step pays for its weights: each micro-batch
moves 12 bytes per parameter for the gradient (precision/masters.py) and gathers every unit. From ENOUGH_TOKENS on that is little.
So the order is, with tokens/s of one H200 (gpu-headline.json),

    1. nothing recomputed, or what is cheap (selective): the more tokens, up to ENOUGH_TOKENS, the better; of as many none first
       (Llama-3.1-8B: 2 x 4,096 selective 12,025, 1 x 4,096 none 11,777). With nothing recomputed, up to twice as many
       (Qwen2.5-1.5B: 8 x 4,096 none 51,491, 4 x 4,096 none 50,427; but SmolLM3-3B: 4 x 8,192 selective 24,450, 2 x 8,192
       none 24,464)
    2. all recomputed (full, a third more FLOPs), the more tokens the better: only where nothing above fits

What the count (memory.py) puts over the limit by more than SLACK is left out; the rest is tried for real, the best first
(training/sizing/probe.py). The last of the order is tried in any case: a count is no reason to refuse a run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from windlass.parallel.config import RECOMPUTES
from windlass.plan.memory import RankMemory

ENOUGH_TOKENS: Final = 16_384
"""Tokens of one rank's micro-batch from which on larger ones gain little: 12 bytes per parameter take 2.5 % of the time of its 6
FLOPs per token, by an H200's data sheet (4.8 TB/s, 989 TFLOP/s)."""
SLACK: Final = 0.1
"""By how much a count may be over the limit and is still tried."""


@dataclass(frozen=True)
class StepSize:
    """What is chosen: sequences per rank in one forward, and what every block recomputes."""

    micro_batch: int
    recompute: str

    def __str__(self) -> str:
        return f"run.micro_batch={self.micro_batch} with parallel.recompute={self.recompute}"


def most_tokens(recompute: str) -> int:
    """The most tokens of one rank's micro-batch that are tried."""
    return ENOUGH_TOKENS * (2 if recompute == "none" else 1)


def micro_batches(sequences: int, least: int, length: int, tokens: int = ENOUGH_TOKENS) -> list[int]:
    """Divisors of a rank's `sequences` per step that are multiples of `least`, up to the first with `tokens`."""
    found = [m for m in range(least, sequences + 1, least) if sequences % m == 0]
    enough = next((index for index, m in enumerate(found) if m * length >= tokens), len(found))
    return found[: enough + 1]


def best_first(sizes: Iterable[StepSize]) -> list[StepSize]:
    """The best first."""
    return sorted(
        sizes, key=lambda size: (size.recompute == "full", -size.micro_batch, RECOMPUTES.index(size.recompute))
    )


def worth_trying(sizes: Sequence[StepSize], memory: RankMemory, length: int, limit_bytes: int) -> list[StepSize]:
    """The sizes that the count does not rule out, and the last."""
    return [
        size
        for index, size in enumerate(sizes)
        if index == len(sizes) - 1 or total_bytes(memory, size, length) <= limit_bytes * (1 + SLACK)
    ]


def total_bytes(memory: RankMemory, size: StepSize, length: int) -> int:
    return memory.lasting_bytes().total + memory.step_bytes(size.micro_batch, length, size.recompute).total
