"""What a rank sends per step under DDP, ZeRO-1 to 3 and HSDP, by the formulas of parallel/ddp and parallel/fsdp.

With P parameters of which P_end are outside of the blocks (all of them trained here), N replicas (with zero 0 also each of the
context ranks), S ranks that shard (shard x context), U units (in a pipeline, of the rank's stages) of which E are outside of the
blocks, A micro-batches, b bytes per gathered (1 where the run gathers in fp8) and r per reduced element, a ring moves per rank

                   all-gather                        reduce-scatter            all-reduce
    zero 0         -                                 -                         2 r P (N-1)/N, in the run's buckets
    zero 1, 2      b P (S-1)/S, U calls              r P (S-1)/S, U calls      2 r (P/S) (N-1)/N, U calls
                                                     (zero 2: A times both)
    zero 3         b A (2P - P_end) (S-1)/S,         as zero 2                 the same
                   A (2U - E) calls

The all-reduces of zero 1 to 3 are HSDP's: none where N is 1. Tensor and pipeline ranks divide P. Not in it: the sums of losses,
counts, norms and fp8's scales (two to four small calls), and what tensor, context, expert and pipeline ranks exchange among
themselves. benchmarks/layouts.py counts the same in real runs.
"""

from dataclasses import dataclass

from windlass.advice.facts import RunFacts


@dataclass(frozen=True)
class Sent:
    """The calls that one rank makes in one step, and the bytes that it sends with them."""

    calls: int
    bytes: float

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.calls + other.calls, self.bytes + other.bytes)


NOTHING = Sent(0, 0.0)


def traffic(facts: RunFacts, zero: int) -> Sent:
    """See the table above."""
    size = {axis: facts.layout.get(axis, 1) for axis in ("pp", "tp", "replicate", "shard", "context")}
    gradients = facts.trained_elements * facts.reduced_bytes / (size["pp"] * size["tp"])
    if zero == 0:
        return _part(facts.buckets, 2 * gradients, size["replicate"] * size["context"])
    ranks, backwards = size["shard"] * size["context"], 1 if zero == 1 else facts.accumulation
    return (
        _gathers(facts, zero, ranks, size["pp"] * size["tp"])
        + _part(backwards * facts.units, backwards * gradients, ranks)
        + _part(facts.units, 2 * gradients / ranks, size["replicate"])
    )


def _gathers(facts: RunFacts, zero: int, ranks: int, cuts: int) -> Sent:
    whole = facts.elements * facts.gathered_bytes - facts.fp8_elements * (facts.gathered_bytes - 1)
    if zero < 3:
        return _part(facts.units, whole / cuts, ranks)
    twice = 2 * whole - facts.end_elements * facts.gathered_bytes
    calls = facts.accumulation * (2 * facts.units - facts.end_units)
    return _part(calls, facts.accumulation * twice / cuts, ranks)


def _part(calls: int, payload: float, ranks: int) -> Sent:
    """The share of a payload that leaves a rank around a ring."""
    return NOTHING if ranks == 1 else Sent(calls, payload * (ranks - 1) / ranks)
