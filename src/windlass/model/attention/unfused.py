"""Attention with dropout or capped scores: an explicit softmax over pieces of queries. Named unfused: no fused kernel knows our
masks, nor caps.

    O = (M * softmax(q k^T / sqrt(K))) v,   M = 0 with probability p, else 1 / (1 - p)

as GPT-2 trains it (Hugging Face's attn_pdrop): the weights are dropped after the softmax, so a row no longer sums to 1. M is
windlass.model.dropout's: a function of (sample, layer, head, query position, key position) in the whole model.

Weights [queries, keys] exist for one piece of queries at a time, in forward and in backward: forward keeps q, k, v, O and the
log of each row's softmax sum, and backward computes each piece's weights and mask again from those (the recipe of
FlashAttention, arXiv 2205.14135, without its kernel). With P the softmax, dO the incoming gradient:

    dv = (M P)^T dO      dP = M * (dO v^T)      dS = P * (dP - rowsum(dO * O))      dq = dS k / sqrt(K)      dk = dS^T q / sqrt(K)

Capped scores (Gemma 2, arXiv 2408.00118) are c tanh(s / c), s = q k^T / sqrt(K), and dS is multiplied by 1 - tanh^2(s / c).

A piece reads only keys that one of its queries sees: none after it, none before its window, and of those each query sees its
own document. Grouped heads share their key/value head without copies. Softmax and its gradient run in promote_types(dtype,
float32).

What it costs (measured: 12 heads of 64 channels, fp32, forward and backward, one thread of a 2-core Zen 4, CPU seconds, median
of 5; memory is the peak above the inputs):

    B x T                        2 x 256          2 x 1,024          1 x 2,048
    this                         0.07 s           0.67 s  265 MiB    1.06 s  273 MiB
    fused, no dropout            0.03 s           0.23 s   69 MiB    0.38 s   69 MiB
    whole weights, F.dropout     0.04 s           1.00 s  438 MiB    2.30 s  825 MiB

So 2.5 to 2.9 times the fused kernel's time, in memory that does not grow with T beyond q, k, v (24 MiB are kept for backward, as
by the fused kernel; whole weights keep 307 and 598 MiB).

Legend: B sequences, T query positions = key positions (but for a part of a row, which has more keys), H query heads, G key/value
heads, R = H / G, K channels per head, C queries of a piece, S keys that it reads. N = B G, M = R C: the shape of one batched
matrix product.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from windlass.model.attention.causal import sees
from windlass.model.attention.layout import AttentionLayout
from windlass.model.dropout import ATTENTION, keep_mask, row_keys


def attend_unfused(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    layout: AttentionLayout,
    probability: float,
    keys_B: Tensor,
) -> Tensor:
    """Causal attention with dropout on its weights, its scores capped where the layout says so -> [B, H, T, K]. Queries are the
    last T of the row's S positions.

    keys_B: of this layer. On a rank that holds some of the heads, `layout` has their numbers in the whole model.
    """
    offset, device = layout.query_offset, q_BHTK.device
    assert k_BGTK.shape[2] == offset + q_BHTK.shape[2], (k_BGTK.shape, offset, q_BHTK.shape)
    positions_S = torch.arange(k_BGTK.shape[2], device=device)
    heads_H = torch.arange(q_BHTK.shape[1], device=device) if layout.heads_H is None else layout.heads_H
    rows_BHT = row_keys(keys_B, ATTENTION, heads_H, positions_S[offset:])
    first_BT = None if layout.documents is None else layout.documents.first_BT
    chunks = layout.chunks
    most = chunks.attention_weights if device.type == "cpu" else chunks.attention_weights_gpu
    return _Unfused.apply(
        q_BHTK, k_BGTK, v_BGTK, rows_BHT, positions_S, first_BT, layout.window, layout.cap, probability, most
    )


def _pieces(q_BHTK: Tensor, offset: int, window: int | None, most: int) -> Iterator[tuple[slice, slice]]:
    """The queries of each piece and the keys that they read. `most`: weights of a piece."""
    batch, heads, length, _ = q_BHTK.shape
    rows = max(1, most // (batch * heads * (offset + length)))
    for start in range(0, length, rows):
        end = min(start + rows, length)
        yield slice(start, end), slice(0 if window is None else max(0, offset + start - window + 1), offset + end)


def _rows_of_groups(x_BHCX: Tensor, num_groups: int) -> Tensor:
    """[B, H, C, X] -> [N, M, X]: all rows of one key/value head as one matrix."""
    return x_BHCX.reshape(x_BHCX.shape[0] * num_groups, -1, x_BHCX.shape[-1])


def _against(x_BHCK: Tensor, y_BGSK: Tensor, scale: float = 1.0) -> Tensor:
    """scale x y^T -> [B, H, C, S]. A baddbmm that adds nothing: selective recomputation keeps what bmm returns, and
    must not keep this."""
    x_NMK, y_NSK = _rows_of_groups(x_BHCK, y_BGSK.shape[1]), y_BGSK.flatten(0, 1)
    product_NMS = torch.baddbmm(x_NMK.new_empty(1, 1, 1), x_NMK, y_NSK.transpose(1, 2), beta=0, alpha=scale)
    return product_NMS.reshape(*x_BHCK.shape[:3], -1)


def _mix(w_BHCS: Tensor, y_BGSK: Tensor) -> Tensor:
    """w y -> [B, H, C, K], in the dtype of y."""
    w_NMS = _rows_of_groups(w_BHCS.to(y_BGSK.dtype), y_BGSK.shape[1])
    return torch.bmm(w_NMS, y_BGSK.flatten(0, 1)).reshape(*w_BHCS.shape[:3], -1)


def _collect(w_BHCS: Tensor, x_BHCK: Tensor, num_groups: int) -> Tensor:
    """w^T x, summed over the heads of a group -> [B, G, S, K], in the dtype of x."""
    w_NMS, x_NMK = _rows_of_groups(w_BHCS.to(x_BHCK.dtype), num_groups), _rows_of_groups(x_BHCK, num_groups)
    return torch.bmm(w_NMS.transpose(1, 2), x_NMK).unflatten(0, (-1, num_groups))


def _scores(
    q_BHCK: Tensor,
    k_BGSK: Tensor,
    queries: slice,
    keys: slice,
    offset: int,
    window: int | None,
    first_BT: Tensor | None,
    cap: float | None,
) -> Tensor:
    """q k^T / sqrt(K), capped, -inf where a query does not see a key -> [B, H, C, S], at least fp32."""
    seen = sees(queries, keys, offset, window, q_BHCK.device)
    if first_BT is not None:
        keys_S = torch.arange(keys.start, keys.stop, device=q_BHCK.device)
        seen = seen & (keys_S >= first_BT[:, None, queries, None])
    scores_BHCS = _against(q_BHCK, k_BGSK, q_BHCK.shape[-1] ** -0.5)
    scores_BHCS = scores_BHCS.to(torch.promote_types(scores_BHCS.dtype, torch.float32))
    if cap is not None:
        scores_BHCS = cap * (scores_BHCS / cap).tanh()
    return scores_BHCS.masked_fill(~seen, -torch.inf)


class _Unfused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTK: Tensor,
        k_BGTK: Tensor,
        v_BGTK: Tensor,
        rows_BHT: Tensor,
        positions_S: Tensor,
        first_BT: Tensor | None,
        window: int | None,
        cap: float | None,
        probability: float,
        most: int,
    ) -> Tensor:
        outs, sums, offset = [], [], k_BGTK.shape[2] - q_BHTK.shape[2]
        for queries, keys in _pieces(q_BHTK, offset, window, most):
            masks = (queries, keys, offset, window, first_BT)
            scores_BHCS = _scores(q_BHTK[:, :, queries], k_BGTK[:, :, keys], *masks, cap)
            sums.append(scores_BHCS.logsumexp(-1))
            kept_BHCS = keep_mask(rows_BHT[:, :, queries], positions_S[keys], probability)
            weights_BHCS = (scores_BHCS - sums[-1][..., None]).exp() * (1 / (1 - probability))
            outs.append(_mix(torch.where(kept_BHCS, weights_BHCS, 0), v_BGTK[:, :, keys]))
        out_BHTK = torch.cat(outs, 2)
        ctx.save_for_backward(q_BHTK, k_BGTK, v_BGTK, rows_BHT, positions_S, first_BT, out_BHTK, torch.cat(sums, 2))
        ctx.window, ctx.cap, ctx.probability, ctx.most = window, cap, probability, most
        return out_BHTK

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_BHTK = grads[0]
        q_BHTK, k_BGTK, v_BGTK, rows_BHT, positions_S, first_BT, out_BHTK, sums_BHT = ctx.saved_tensors
        wide, num_groups, scale = sums_BHT.dtype, k_BGTK.shape[1], q_BHTK.shape[-1] ** -0.5
        factor, offset = 1 / (1 - ctx.probability), k_BGTK.shape[2] - q_BHTK.shape[2]
        grads_q, grad_k_BGTK, grad_v_BGTK = (
            [],
            torch.zeros_like(k_BGTK, dtype=wide),
            torch.zeros_like(v_BGTK, dtype=wide),
        )
        through_BHT = (grad_BHTK.to(wide) * out_BHTK.to(wide)).sum(-1)
        for queries, keys in _pieces(q_BHTK, offset, ctx.window, ctx.most):
            q_BHCK, grad_BHCK, k_BGSK = q_BHTK[:, :, queries], grad_BHTK[:, :, queries], k_BGTK[:, :, keys]
            scores_BHCS = _scores(q_BHCK, k_BGSK, queries, keys, offset, ctx.window, first_BT, ctx.cap)
            weights_BHCS = (scores_BHCS - sums_BHT[:, :, queries, None]).exp()
            kept_BHCS = keep_mask(rows_BHT[:, :, queries], positions_S[keys], ctx.probability)
            dropped_BHCS = torch.where(kept_BHCS, weights_BHCS * factor, 0)
            grad_v_BGTK[:, :, keys] += _collect(dropped_BHCS, grad_BHCK, num_groups)
            grad_dropped_BHCS = _against(grad_BHCK, v_BGTK[:, :, keys]).to(wide)
            grad_weights_BHCS = torch.where(kept_BHCS, grad_dropped_BHCS * factor, 0)
            grad_scores_BHCS = weights_BHCS * (grad_weights_BHCS - through_BHT[:, :, queries, None]) * scale
            if ctx.cap is not None:  # of keys that are not seen, at -inf, the weight is 0
                grad_scores_BHCS = grad_scores_BHCS * (1 - (scores_BHCS / ctx.cap).clamp(min=-1).square())
            grads_q.append(_mix(grad_scores_BHCS, k_BGSK))
            grad_k_BGTK[:, :, keys] += _collect(grad_scores_BHCS, q_BHCK, num_groups)
        grad_k, grad_v = grad_k_BGTK.to(k_BGTK.dtype), grad_v_BGTK.to(v_BGTK.dtype)
        return torch.cat(grads_q, 2), grad_k, grad_v, None, None, None, None, None, None, None
