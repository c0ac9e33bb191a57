"""The one seam of attention.

attend(q, k, v, layout): softmax(q k^T / sqrt(K)) v, causal, with H / G query heads per key/value head (arXiv
2305.13245). The kernel is torch's scaled_dot_product_attention; no [T, S] mask is ever built in training. `Layout` says
how query positions lie among the keys and how far back they see; what else decides who sees whom belongs there too.

A sliding window (Mistral 7B, arXiv 2310.06825) longer than the keys changes nothing and takes the same path. A shorter
one is computed in pieces of W queries, each with the at most 2 W - 1 keys that they see: O(T W) work, and a mask of
[W, 2 W - 1], never [T, S].

Legend: B sequences, T query positions, S key positions, H query heads, G key/value heads, K channels per head, W window.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class Layout:
    """Query t stands at position query_offset + t among the keys 0..S-1 and sees the last `window` keys up to itself."""

    query_offset: int = 0
    window: int | None = None


def attend(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, layout: Layout) -> Tensor:
    """Causal attention -> [B, H, T, K]. S is query_offset + T."""
    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    assert num_keys == layout.query_offset + num_queries, (num_keys, layout, num_queries)
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    attention = functional.scaled_dot_product_attention
    if num_queries == 1 and layout.query_offset:  # the newest token sees every key of its window
        seen = slice(0 if layout.window is None else max(0, num_keys - layout.window), None)
        return attention(q_BHTK, k_BGSK[:, :, seen], v_BGSK[:, :, seen], enable_gqa=grouped)
    windowed = layout.window is not None and layout.window < num_keys
    if layout.query_offset == 0 and not windowed:
        return attention(q_BHTK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=grouped)
    # The kernels below know no grouped heads: repeat the keys.
    repeats = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = k_BGSK.repeat_interleave(repeats, 1), v_BGSK.repeat_interleave(repeats, 1)
    if windowed:
        return _attend_window(q_BHTK, k_BHSK, v_BHSK, layout)
    return attention(q_BHTK, k_BHSK, v_BHSK, attn_mask=causal_lower_right(num_queries, num_keys))


def _attend_window(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, layout: Layout) -> Tensor:
    """Pieces of W queries, each with the keys that one of them sees."""
    window, offset = layout.window, layout.query_offset
    assert window is not None
    pieces = []
    for start in range(0, q_BHTK.shape[2], window):
        q_BHWK = q_BHTK[:, :, start : start + window]
        end = offset + start + q_BHWK.shape[2]
        first = max(0, offset + start - window + 1)
        queries_W1 = torch.arange(offset + start, end, device=q_BHTK.device)[:, None]
        keys_S = torch.arange(first, end, device=q_BHTK.device)
        seen_WS = (keys_S <= queries_W1) & (keys_S > queries_W1 - window)
        keys_BHSK, values_BHSK = k_BHSK[:, :, first:end], v_BHSK[:, :, first:end]
        pieces.append(functional.scaled_dot_product_attention(q_BHWK, keys_BHSK, values_BHSK, attn_mask=seen_WS))
    return torch.cat(pieces, 2)
