"""How much of a large intermediate exists at a time: the head's logits and attention's weights where they are materialised.

A size here changes memory and speed, and results by rounding alone. build.py hands one `Chunks` to every part of the model;
`windlass verify` builds with small ones, so that a tiny model has several pieces and a rest.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Chunks:
    """Elements at a time."""

    head_logits: int = 1 << 27
    """Logits of the head on this rank: 512 MiB in fp32, 2,560 tokens at GPT-2's vocabulary, 768 at Qwen3's."""
    compiled_head_logits_gpu: int = 1 << 30
    """Logits of the head on a GPU where the loss is compiled: 2 GiB in bf16."""
    compiled_head_tokens: int = 8192
    """No more tokens than these at a time where the loss is compiled: larger products are not faster."""
    attention_weights: int = 1 << 21
    """Weights of one piece of unfused attention on a CPU, 8 MiB in fp32: fastest of 2^17 to 2^24 on cores with 1 MiB of L2."""
    attention_weights_gpu: int = 1 << 24
    """Weights of one piece on a GPU, which wants few large kernels; not measured."""


USUAL: Final = Chunks()
TILE: Final = 128  # rows that a kernel of products takes at a time


def head_tokens(logits: int, vocabulary: int) -> int:
    """Tokens whose logits are at most `logits` elements: whole tiles, where one fits."""
    tokens = max(1, logits // vocabulary)
    return tokens // TILE * TILE or tokens
