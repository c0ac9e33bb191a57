"""Attention behind one function: every kernel, one signature.

attend(q, k, v, layout): softmax(q k^T / sqrt(K)) v, causal, with H / G query heads per key/value head (arXiv
2305.13245). `AttentionLayout` holds who sees whom: where query positions are among the keys (a KV cache), how far back they see
(a window), where documents begin, and which ranks share a row. No [T, S] mask is built in training.

A row with one document runs causal scaled_dot_product_attention (causal.py). Rows with several documents or padding run
documents.py, or unfused.py where no kernel takes them, where weights are dropped and where scores are capped.
A row that ranks share first collects its
keys in context.py and then takes the same paths. A batch without document borders makes no extra call.

Legend: B sequences, T query positions, S key positions, H query heads, G key/value heads, K channels per head.
"""

import torch
from torch import Tensor

from windlass.model.attention.causal import attend_causal
from windlass.model.attention.context import gather_keys, to_heads, to_positions
from windlass.model.attention.documents import attend_documents, has_kernel
from windlass.model.attention.layout import AttentionLayout
from windlass.model.attention.unfused import attend_unfused


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    layout: AttentionLayout,
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
        whole = AttentionLayout(0, window, layout.documents, heads_H, chunks=layout.chunks, cap=layout.cap)
        out_BHTK = _attend(*shares, whole, probability, keys_B)
        return to_positions(out_BHTK, context)
    k_BGSK, v_BGSK = gather_keys(k_BGSK, v_BGSK, context)
    slices = context.zigzag.of(k_BGSK.shape[2])
    outs = []
    for q_BHCK, where, documents in zip(q_BHTK.chunk(2, 2), slices, layout.slice_documents, strict=True):
        k_BGCK, v_BGCK = k_BGSK[:, :, : where.stop], v_BGSK[:, :, : where.stop]
        part = AttentionLayout(where.start, window, documents, layout.heads_H, chunks=layout.chunks, cap=layout.cap)
        outs.append(_attend(q_BHCK, k_BGCK, v_BGCK, part, probability, keys_B))
    return torch.cat(outs, 2)


def _attend(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, layout: AttentionLayout, probability: float, keys_B: Tensor | None
) -> Tensor:
    """Attention whose keys are all on this rank."""
    if keys_B is not None and probability:
        return attend_unfused(q_BHTK, k_BGSK, v_BGSK, layout, probability, keys_B)
    is_capped = layout.cap is not None  # which no fused kernel of torch knows
    if layout.documents is None and not is_capped:
        return attend_causal(q_BHTK, k_BGSK, v_BGSK, layout.query_offset, layout.window)
    if layout.documents is not None and not is_capped and has_kernel(v_BGSK):
        return attend_documents(q_BHTK, k_BGSK, v_BGSK, layout.documents, layout.window)
    nothing_B = torch.zeros(q_BHTK.shape[0], dtype=torch.int64, device=q_BHTK.device)
    return attend_unfused(q_BHTK, k_BGSK, v_BGSK, layout, 0.0, nothing_B)
