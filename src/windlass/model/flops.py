"""Parameters and floating-point operations per token, exact for the matrix products of this decoder. No torch.

A matrix of n weights costs 2 n per token forward and 4 n backward. Attention with full scores costs 4 L H K T forward
per token (scores and their product with the values, T keys each), twice that backward; the causal half is what the
maths needs. Not counted, as everywhere: the embedding lookup, norms, activations, rotary positions, softmax, the
optimizer. Grouped key/value heads make the projections smaller, not the scores. A tied head is counted once, as the
head.

Three conventions, because published figures mix them: `six_n` = 6 N over all parameters (Kaplan et al., arXiv
2001.08361); `palm` = 6 N + 12 L H K T over the multiplied weights, full attention (PaLM, arXiv 2204.02311, appendix B);
`causal` = the same with half the attention (Megatron-LM, MaxText), and no key outside a sliding window: only work that
the maths needs, so it is the headline.

Legend: L layers, H query heads, K channels per head, T sequence length, N parameters.
"""

import math
from dataclasses import dataclass

from windlass.model.architecture import Architecture, parameter_shapes


@dataclass(frozen=True)
class FlopsPerToken:
    """Forward and backward FLOPs per token of one step, in three conventions."""

    six_n: float
    palm: float
    causal: float


def count_parameters(arch: Architecture) -> int:
    """All parameters of the unpadded model; a tied head counts once."""
    return sum(math.prod(shape) for shape in parameter_shapes(arch).values())


def count_multiplied(arch: Architecture) -> int:
    """Weights that multiply every token: the matrices of blocks and head, without lookups, norms and biases."""
    head = arch.vocab_size * arch.hidden_size
    return head + sum(math.prod(s) for n, s in parameter_shapes(arch).items() if len(s) == 2 and ".layers." in n)


def flops_per_token(arch: Architecture, sequence_length: int) -> FlopsPerToken:
    """FLOPs of forward and backward, divided by the tokens, for sequences of `sequence_length` tokens."""
    products = 6.0 * count_multiplied(arch)
    per_key = 12.0 * arch.num_heads * arch.head_dim  # of one layer
    full = arch.num_layers * sequence_length
    window = min(arch.window or sequence_length, sequence_length)
    seen = window - window**2 / (2 * sequence_length)  # mean number of keys; T / 2 without a window
    causal = (arch.num_layers - len(arch.window_layers)) * sequence_length / 2 + len(arch.window_layers) * seen
    return FlopsPerToken(6.0 * count_parameters(arch), products + per_key * full, products + per_key * causal)
