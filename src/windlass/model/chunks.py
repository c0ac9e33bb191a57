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
    """Logits of the head on this rank: 512 MiB in fp32, 2,668 tokens at GPT-2's vocabulary, 883 at Qwen3's."""
    attention_weights: int = 1 << 21
    """Weights of one piece of unfused attention on a CPU, 8 MiB in fp32: fastest of 2^17 to 2^24 on cores with 1 MiB of L2."""
    attention_weights_gpu: int = 1 << 24
    """The same on a GPU, which wants few large kernels; not measured."""


USUAL: Final = Chunks()
