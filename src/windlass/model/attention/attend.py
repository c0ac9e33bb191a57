"""The one seam of attention.

attend(q, k, v, layout): softmax(q k^T / sqrt(K)) v, causal, with H / G query heads per key/value head (arXiv
2305.13245). `Layout` says who sees whom: how query positions lie among the keys (a KV cache), how far back they see (a
window), where documents begin, and which ranks share a row. No [T, S] mask is ever built in training.

One document per row is causal scaled_dot_product_attention (attention_causal.py); several documents per row, and padding,
are attention_documents.py, or attention_unfused.py where no kernel takes them, and where weights are dropped. Rows that are cut
over ranks meet their keys in attention_context.py, and then go the same ways. Absent documents cost nothing: not one call.

Legend: B sequences, T query positions, S key positions, H query heads, G key/value heads, K channels per head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.model.attention.causal import attend_causal
from windlass.model.attention.context import Context, gather_keys, to_heads, to_positions
from windlass.model.attention.documents import Documents, attend_documents, has_kernel
from windlass.model.attention.unfused import attend_unfused


@dataclass(frozen=True)
class Layout:
    """Query t stands at position query_offset + t among the keys 0..S-1, and sees of its own document the last `window`
    keys up to itself. Without documents a row is one. Of ranks that share heads or positions, for the masks of dropout: which
    heads these are, and which positions the residual stream has here. `context`: the ranks that share the row; `parts`: the
    documents that this rank's slices of it meet, where it computes slices."""

    query_offset: int = 0
    window: int | None = None
    documents: Documents | None = None
    heads_H: Tensor | None = None
    stream_T: Tensor | None = None
    context: Context | None = None
    parts: tuple[Documents, ...] = ()


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    layout: Layout,
    probability: float = 0.0,
    keys_B: Tensor | None = None,
) -> Tensor:
    """Causal attention -> [B, H, T, K]. S is query_offset + T; under `context` both are this rank's positions. With keys_B, of
    this layer, attention weights are dropped with `probability`."""
    context, window = layout.context, layout.window
    if context is None:
        return _attend(q_BHTK, k_BGSK, v_BGSK, layout, probability, keys_B)
    if context.kind == "ulysses":
        heads_H = None if keys_B is None else context.heads(layout.heads_H, q_BHTK)
        shares = to_heads(q_BHTK, k_BGSK, v_BGSK, context)
        out_BHTK = _attend(*shares, Layout(0, window, layout.documents, heads_H), probability, keys_B)
        return to_positions(out_BHTK, context)
    k_BGSK, v_BGSK = gather_keys(k_BGSK, v_BGSK, context)
    places = context.zigzag.of(k_BGSK.shape[2])
    outs = []
    for q_BHCK, place, documents in zip(q_BHTK.chunk(2, 2), places, layout.parts, strict=True):
        k_BGCK, v_BGCK = k_BGSK[:, :, : place.stop], v_BGSK[:, :, : place.stop]
        part = Layout(place.start, window, documents, layout.heads_H)
        outs.append(_attend(q_BHCK, k_BGCK, v_BGCK, part, probability, keys_B))
    return torch.cat(outs, 2)


def _attend(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, layout: Layout, probability: float, keys_B: Tensor | None
) -> Tensor:
    """Of keys that are all here."""
    if keys_B is not None and probability:
        return attend_unfused(q_BHTK, k_BGSK, v_BGSK, layout, probability, keys_B)
    if layout.documents is None:
        return attend_causal(q_BHTK, k_BGSK, v_BGSK, layout.query_offset, layout.window)
    if has_kernel(v_BGSK):
        return attend_documents(q_BHTK, k_BGSK, v_BGSK, layout.documents, layout.window)
    nothing_B = torch.zeros(q_BHTK.shape[0], dtype=torch.int64, device=q_BHTK.device)
    return attend_unfused(q_BHTK, k_BGSK, v_BGSK, layout, 0.0, nothing_B)
