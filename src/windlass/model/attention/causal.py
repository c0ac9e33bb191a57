"""Causal attention over rows of one document each: torch's scaled_dot_product_attention, which picks the kernel.

A sliding window (Mistral 7B, arXiv 2310.06825) longer than the keys changes nothing and takes the same path. A shorter
one is computed in pieces of W queries, each with the at most 2 W - 1 keys that they see: O(T W) work, and a mask of
[W, 2 W - 1], never [T, S].

Legend: B sequences, T query positions, S key positions, H query heads, G key/value heads, K channels per head, W window,
P queries of a piece.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

MASK_ELEMENTS: Final = 1 << 22  # of a piece: 16 MiB of fp32


def attend_causal(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, offset: int, window: int | None) -> Tensor:
    """-> [B, H, T, K]. Query t is position offset + t of S = offset + T, and sees the last `window` up to itself."""
    num_queries, num_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    assert num_keys == offset + num_queries, (num_keys, offset, num_queries)
    grouped = q_BHTK.shape[1] != k_BGSK.shape[1]
    attention = functional.scaled_dot_product_attention
    if num_queries == 1 and offset:  # the newest token sees every key of its window
        seen = slice(0 if window is None else max(0, num_keys - window), None)
        return attention(q_BHTK, k_BGSK[:, :, seen], v_BGSK[:, :, seen], enable_gqa=grouped)
    windowed = window is not None and window < num_keys
    if offset == 0 and not windowed:
        return attention(q_BHTK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=grouped)
    k_BHSK, v_BHSK = repeat_heads(k_BGSK, q_BHTK.shape[1]), repeat_heads(v_BGSK, q_BHTK.shape[1])
    outs = []
    for queries, keys in query_pieces(num_queries, offset, window if windowed else None):
        seen_PS = sees(queries, keys, offset, window, q_BHTK.device)
        outs.append(attention(q_BHTK[:, :, queries], k_BHSK[:, :, keys], v_BHSK[:, :, keys], attn_mask=seen_PS))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def repeat_heads(x_BGSK: Tensor, num_heads: int) -> Tensor:
    """Key or value heads repeated for their query heads, for kernels that know no groups -> [B, H, S, K]."""
    return x_BGSK.repeat_interleave(num_heads // x_BGSK.shape[1], 1)


def query_pieces(num_queries: int, offset: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries `window` at a time, each time with the keys that one of them sees; without a window as many as keep a mask of
    MASK_ELEMENTS."""
    size = max(1, MASK_ELEMENTS // (offset + num_queries)) if window is None else window
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        first = 0 if window is None else max(0, offset + start - window + 1)
        yield slice(start, stop), slice(first, offset + stop)


def sees(queries: slice, keys: slice, offset: int, window: int | None, device: torch.device) -> Tensor:
    """[P, S], bool: which keys of a piece each of its queries sees."""
    queries_P1 = torch.arange(offset + queries.start, offset + queries.stop, device=device)[:, None]
    keys_S = torch.arange(keys.start, keys.stop, device=device)
    seen_PS = keys_S <= queries_P1
    return seen_PS if window is None else seen_PS & (keys_S > queries_P1 - window)
