"""The cut of a decoder into pipeline stages of equal cost.

Blocks are kept whole and in order, at least one per stage. A stage costs the FLOPs of its matrices: those of its blocks, and
of the head on the last stage. Attention's own products are left out, since they grow with the sequence and not with the
model; the embedding is a lookup and costs none. The slowest stage sets the pace of all, so

    the cut minimises the largest stage's FLOPs; among equals, the largest stage's parameters, which count the embedding too

Only the experts that a token meets count; where a model mixes dense and sparse layers, each block counts as their mean. With
equal blocks, all but the first and the last stage hold the same number of blocks, or one more: the later ones, which
keep activations of fewer micro-batches. A tied head is apart from its embedding (pipeline.py) and counts on its own stage.

GPT-2 (12 blocks, tied, 50,257 tokens) on 4 ranks: 1, 5, 5, 1 blocks, since embedding and head weigh as much as 5.5 blocks each.
"""

import math
from dataclasses import dataclass

from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.chunks import USUAL, Chunks
from windlass.model.flops import active
from windlass.model.lora.adapter import Adapter
from windlass.model.transformer import Decoder
from windlass.parallel.config import ParallelConfig, Schedule
from windlass.parallel.rules.schedules import in_flight, owners


@dataclass(frozen=True)
class Stages:
    """Stage -> its blocks, and the pipeline rank that holds it."""

    layers: tuple[range, ...]
    owners: tuple[int, ...]

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.owners) if owner == rank]

    def parts(
        self, arch: Architecture, rank: int, chunks: Chunks = USUAL, adapter: Adapter | None = None
    ) -> list[Decoder]:
        """The stages of one pipeline rank, in order. A tied head and its embedding are two parameters, on one rank too."""
        last = len(self.layers) - 1
        return [Decoder(arch, self.layers[s], s == 0, s == last, chunks, adapter) for s in self.of_rank(rank)]

    def __str__(self) -> str:
        """`0-3, 4-7 | 8-10, 11`: the blocks of each stage, by rank."""
        ranks = range(max(self.owners) + 1)
        return " | ".join(", ".join(_span(self.layers[stage]) for stage in self.of_rank(rank)) for rank in ranks)


def _span(layers: range) -> str:
    return f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"{layers.start}"


def cut_stages(arch: Architecture, num_ranks: int, schedule: Schedule) -> Stages:
    """Whole blocks for every stage, so that the slowest stage is as fast as can be."""
    held_by = owners(schedule, num_ranks)
    assert arch.num_layers >= len(held_by), "rules/pipeline refuses it"
    shapes = parameter_shapes(arch, padded=True)
    layers = [shape for name, shape in shapes.items() if ".layers." in name]
    counts = best_counts(
        arch.num_layers,
        len(held_by),
        block=(
            sum(active(arch, s) for s in layers if len(s) >= 2) // arch.num_layers,
            sum(map(math.prod, layers)) // arch.num_layers,
        ),
        embedding=sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("model.embed")),
        head=arch.padded_vocab_size * arch.hidden_size,
    )
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return Stages(tuple(range(end - count, end) for count, end in zip(counts, ends)), held_by)


def blocks_in_flight(arch: Architecture, config: ParallelConfig, num_micro: int) -> list[dict[int, int]]:
    """For each pipeline rank its blocks, and how many of a step's `num_micro` micro-batches it keeps of each at once."""
    if config.pp == 1:
        return [dict.fromkeys(range(arch.num_layers), 1)]
    stages = cut_stages(arch, config.pp, config.schedule)
    ranks: list[dict[int, int]] = [{} for _ in range(config.pp)]
    for stage, owner in enumerate(stages.owners):
        ranks[owner] |= dict.fromkeys(stages.layers[stage], in_flight(config.schedule, config.pp, stage, num_micro))
    return ranks


def best_counts(
    num_blocks: int, num_stages: int, *, block: tuple[int, int], embedding: int, head: int
) -> tuple[int, ...]:
    """Blocks per stage. `block`: multiplied weights and all parameters of one block; `embedding`, `head`: parameters."""

    def cost(counts: tuple[int, ...]) -> tuple[int, int]:
        flops = [count * block[0] for count in counts]
        parameters = [count * block[1] for count in counts]
        flops[-1] += head
        parameters[0] += embedding
        parameters[-1] += head
        return max(flops), max(parameters)

    middle = num_stages - 2
    candidates = []
    for first in range(1, num_blocks - num_stages + 2):
        for last in range(1, num_blocks - first - middle + 1):
            between = num_blocks - first - last
            if middle == 0 and between:
                continue
            least, more = divmod(between, middle) if middle else (0, 0)
            candidates.append((first, *(least + (stage >= middle - more) for stage in range(middle)), last))
    return min(candidates, key=lambda counts: (cost(counts), counts[0]))
