"""Initial weights as a function of (seed, parameter name, element): the same full tensor in every layout.

The logical tensor, flattened, is cut into blocks of 2^20 elements; block b of parameter `name` comes from a CPU
generator seeded by hash(seed, name, b). A rank draws the blocks that its part touches and keeps its part: memory is its
own slice and one block per thread, time its own elements (8 s per 1e9 and core). A whole block is drawn each time,
because a shorter draw is not a prefix of a longer one. Draws are fp32 on the CPU whatever the parameter's dtype and
device, so a bf16, an fp32 and an fp64 model start from the same numbers.

Rule, for every family (Radford et al. 2019): matrices N(0, initializer_range); the projections that write to the
residual stream, o_proj and down_proj, have it divided by sqrt(2 layers), so that the stream's variance does not grow
with depth; norms 1, or 0 where they add 1 themselves; biases 0; the padded rows of the vocabulary 0. Of an adapter's factors A is
N(0, 1 / (3 inputs)), the variance that PEFT's uniform draw has, and B is 0.
"""

import hashlib
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from windlass.model.architecture import Architecture
from windlass.model.lora.adapter import A, B
from windlass.ranks.owned_part import local_part, owned_ranges

BLOCK: Final = 1 << 20
EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"


@torch.no_grad()
def initialise(
    named_parameters: Iterable[tuple[str, Tensor]], arch: Architecture, seed: int, block: int = BLOCK
) -> None:
    """Fill parameters in place: plain tensors or DTensors, on any device, after `to_empty`. No communication.
    `block`: elements per block; another size draws other weights."""
    for name, parameter in named_parameters:
        local = local_part(parameter)
        if name.endswith(f".{B}"):  # an adapter's product begins at 0
            local.fill_(0.0)
            continue
        std = parameter.shape[1] ** -0.5 / 3**0.5 if name.endswith(f".{A}") else _std(name, arch)
        if std is None:
            local.fill_(0.0 if name.endswith(".bias") or arch.norm_adds_one else 1.0)
            continue
        source = EMBEDDING if name == HEAD and arch.tied else name  # a tied head apart from its embedding
        ranges = owned_ranges(parameter)
        row_elements = math.prod(parameter.shape[1:])
        if list(map(len, ranges[1:])) == list(parameter.shape[1:]) and local.is_contiguous():
            _fill_rows(local.view(-1), ranges[0].start * row_elements, f"{seed}/{source}", std, block)
        else:
            _fill_scattered(local, ranges, tuple(parameter.shape), f"{seed}/{source}", std, block)
        if name in (EMBEDDING, HEAD):
            local[max(0, arch.vocab_size - ranges[0].start) :] = 0.0


def _std(name: str, arch: Architecture) -> float | None:
    """Standard deviation of a matrix; None for norms and biases."""
    kind = name.split(".")[-2]
    if name.endswith(".bias") or kind.endswith("norm"):
        return None
    assert name.endswith(".weight"), f"no rule for {name}"
    residual = kind in ("o_proj", "down_proj")
    return arch.initializer_range / math.sqrt(2 * arch.num_layers) if residual else arch.initializer_range


def draw_block(key: str, index: int, block: int = BLOCK) -> Tensor:
    """Block `index` of the stream named `key`: `block` standard normal fp32 numbers."""
    digest = hashlib.blake2b(f"{key}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(block, generator=generator, dtype=torch.float32)


def _fill_rows(flat: Tensor, first: int, key: str, std: float, block: int) -> None:
    """`flat` holds the consecutive elements first, first + 1, ... of the logical tensor. Threads share the blocks."""
    end = first + flat.numel()

    def fill(index: int) -> None:
        start, stop = max(first, index * block), min(end, (index + 1) * block)
        drawn = draw_block(key, index, block)[start - index * block : stop - index * block]
        flat[start - first : stop - first] = drawn * std

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(first // block, -(-end // block))))


def _fill_scattered(
    local: Tensor, ranges: list[range], shape: tuple[int, ...], key: str, std: float, block: int
) -> None:
    """Any part with one range per dim: positions of as many rows as a block holds are computed, then picked."""
    columns = torch.zeros(1, dtype=torch.int64)  # flat positions inside a logical row
    for part, size in zip(ranges[1:], shape[1:], strict=True):
        columns = (columns[:, None] * size + torch.arange(part.start, part.stop)[None, :]).flatten()
    row_elements = math.prod(shape[1:])
    row = 0
    while row < len(ranges[0]):
        rows = min(len(ranges[0]) - row, max(1, block // row_elements))
        starts = (torch.arange(rows) + ranges[0].start + row) * row_elements
        positions = (starts[:, None] + columns[None, :]).flatten()
        values = torch.empty(len(positions), dtype=torch.float32)
        for index in range(int(positions[0]) // block, int(positions[-1]) // block + 1):
            inside = positions // block == index
            values[inside] = draw_block(key, index, block)[positions[inside] % block] * std
        local[row : row + rows] = values.view(rows, *local.shape[1:]).to(local.dtype)
        row += rows
