"""The one seam of attention, and the rotary positions.

attend(q, k, v, layout): softmax(q k^T / sqrt(K)) v, causal, with H / G query heads per key/value head (arXiv
2305.13245). The kernel is torch's scaled_dot_product_attention; no [T, S] mask is ever built in training. `Layout` says
how query positions lie among the keys; what else decides who sees whom belongs there too.

Rotary positions (arXiv 2104.09864): channel pairs (i, i + K/2) of a head turn by position * theta^(-2i/K). The tables
are computed from positions in each forward, so nothing is left to restore after `to_empty`. Angles are fp32, and fp64
where the model is: in bf16 position 2,000 and 2,001 would be the same.

Legend: B sequences, T query positions, S key positions, H query heads, G key/value heads, K channels per head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class Layout:
    """Query t stands at position query_offset + t among the keys 0..S-1 and sees the keys up to itself."""

    query_offset: int = 0


def attend(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, layout: Layout) -> Tensor:
    """Causal attention -> [B, H, T, K]. S is query_offset + T."""
    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    attention = functional.scaled_dot_product_attention
    if layout.query_offset == 0:
        return attention(q_BHTK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=grouped)
    assert num_keys == layout.query_offset + num_queries, (num_keys, layout, num_queries)
    if num_queries == 1:  # the newest token sees every key
        return attention(q_BHTK, k_BGSK, v_BGSK, enable_gqa=grouped)
    bias = causal_lower_right(
        num_queries, num_keys
    )  # its kernels know no grouped heads: repeat the few keys of generation
    repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = k_BGSK.repeat_interleave(repeats, 1), v_BGSK.repeat_interleave(repeats, 1)
    return attention(q_BHTK, k_BHSK, v_BHSK, attn_mask=bias)


def rope_tables(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, each [T, K], in `dtype`; computed in promote_types(dtype, float32)."""
    wide = torch.promote_types(dtype, torch.float32)
    channels = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=wide)
    frequencies = 1.0 / (theta ** (channels / head_dim))
    half_TK = positions_T.to(wide)[:, None] * frequencies
    angles_TK = torch.cat((half_TK, half_TK), dim=-1)
    return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)


def rotate(x_BHTK: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + K/2) by its position's angle."""
    cos_TK, sin_TK = rope
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK
