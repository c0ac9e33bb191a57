"""Attention that stays inside documents, for rows that hold several of them (packing), or padding.

A batch holds where the documents of each row begin: `documents` [B, M] int64, position of each document's first token,
rising, the first 0, filled up with T. Positions restart at each of them. Padding is a document of its own: a left-padded
row with 3 tokens of padding has documents [0, 3]; padding at the end needs no entry, since nobody sees what comes later.
Targets of -100 discard what padding computes. A batch has borders and not an id per token, because kernels need borders:
M bounds the number of documents, which a GPU could find from ids only by a read that stalls it. The price: a document is
a run of neighbours.

Two kernels compute it, none with a [T, S] mask:
- CPU: one flash kernel per document, forward and backward, as one operator (a library operator, or a compiled block
  would break into a graph per document and be compiled again for each batch). The borders are read on the host.
- CUDA, 16 bits: torch's varlen_attn, FlashAttention-2 (arXiv 2307.08691) over the rows laid end to end, which takes the
  borders from the device; version 3 or 4 where a run has activated it (flash_versions.py). It launches thread blocks for
  B M sequences of T tokens, and backward keeps 128 more rows of fp32 per sequence: M should be near the number of documents,
  so T is no usable bound.
Where neither runs (fp32 and fp64 on CUDA, odd heads), attend.py takes unfused.py: exact, O(T^2) work, slow.

Legend: B rows, M documents (at most) of a row, T positions, H query heads, G key/value heads, K channels per head,
N = B T tokens, P queries of a piece, S keys of a piece.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from windlass.model.attention.causal import query_pieces, repeat_heads, sees

TAKES_GROUPS: Final = torch.__version__ >= "2.13"  # varlen_attn of torch 2.11 has no enable_gqa


@dataclass(frozen=True)
class Documents:
    """Where documents begin, in the forms that positions and kernels need; fixed shapes, all on the batch's device."""

    starts_BM: Tensor  # as the batch has them
    first_BT: Tensor  # each query's document's first position
    bounds_N: Tensor  # [B M + 1] int32: where documents begin in rows laid end to end; empty ones are those filled up
    key_bounds_N: Tensor  # the same in the rows of keys, which are longer where queries are the end of a row

    @property
    def positions_BT(self) -> Tensor:
        """Each token's position in its document, of whole rows."""
        return torch.arange(self.first_BT.shape[1], device=self.first_BT.device) - self.first_BT


def find_documents(starts_BM: Tensor, num_positions: int, offset: int = 0) -> Documents:
    """`documents` of a batch of rows of `num_positions` tokens, without a host read. Queries are the positions from `offset` on;
    they see nothing of documents before them, and nothing after them in rows that are longer."""
    rows, device, queries = starts_BM.shape[0], starts_BM.device, num_positions - offset
    positions_BT = torch.arange(offset, num_positions, device=device).repeat(rows, 1)
    index_BT = torch.searchsorted(starts_BM, positions_BT, right=True) - 1
    rows_B1 = torch.arange(rows, device=device)[:, None]
    seen_BM = starts_BM.clamp(max=num_positions)
    bounds_BM = seen_BM.clamp(min=offset) - offset + rows_B1 * queries
    bounds_N = functional.pad(bounds_BM.flatten(), (0, 1), value=rows * queries).to(torch.int32)
    key_bounds_N = bounds_N
    if offset:
        ends_BM = seen_BM + rows_B1 * num_positions
        key_bounds_N = functional.pad(ends_BM.flatten(), (0, 1), value=rows * num_positions).to(torch.int32)
    return Documents(seen_BM, starts_BM.gather(1, index_BT), bounds_N, key_bounds_N)


def attend_documents(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents: Documents, window: int | None
) -> Tensor:
    """Causal attention inside each document, over its last `window` tokens -> [B, H, T, K]. Keys may be more than queries:
    queries are the end of the row."""
    if q_BHTK.device.type == "cpu":
        return flash_by_document(q_BHTK, k_BGTK, v_BGTK, documents.starts_BM, window)[0]
    return attend_varlen(q_BHTK, k_BGTK, v_BGTK, documents, window)


def has_kernel(x_BHTK: Tensor) -> bool:
    """Whether documents have a kernel here: on a CPU always, on a GPU FlashAttention's."""
    return x_BHTK.device.type == "cpu" or fits_flash(x_BHTK.dtype, x_BHTK.shape[-1])


def fits_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """FlashAttention, of every version, takes 16 bits and heads of at most 256 channels that are a multiple of 8."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def attend_varlen(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, documents: Documents, window: int | None) -> Tensor:
    """The kernel lays a document's last query over its last key, so queries may be fewer."""
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, queries, _ = q_BHTK.shape
    length = k_BGTK.shape[2]
    q_NHK, k_NGK, v_NGK = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTK, k_BGTK, v_BGTK))
    sees_back = (-1 if window is None or window >= length else window - 1, 0)
    options: Any = {"window_size": sees_back}
    if TAKES_GROUPS:
        options["enable_gqa"] = heads != k_NGK.shape[1]
    else:
        k_NGK, v_NGK = repeat_heads(k_NGK, heads), repeat_heads(v_NGK, heads)
    bounds = (documents.bounds_N, documents.key_bounds_N)
    out_NHK = varlen_attn(q_NHK, k_NGK, v_NGK, *bounds, queries, length, **options)
    assert isinstance(out_NHK, Tensor)
    return out_NHK.unflatten(0, (rows, queries)).transpose(1, 2)


@torch.library.custom_op("windlass::flash_by_document", mutates_args=())
def flash_by_document(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, starts_BM: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """-> the attention [B, H, T, K], and the logarithms of the softmax's sums [B, H, T] for backward."""
    out_BHTK, sums_BHT = _results(q_BHTK)
    for rows, queries, keys, mask in _cut(q_BHTK, k_BGTK, starts_BM, window):
        q_1HPK = q_BHTK[rows, :, queries]
        k_1HSK, v_1HSK = (repeat_heads(x[rows, :, keys], q_BHTK.shape[1]) for x in (k_BGTK, v_BGTK))
        out_1HPK, sums_1HP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_1HPK, k_1HSK, v_1HSK, is_causal=mask is None, attn_mask=mask
        )
        out_BHTK[rows, :, queries] = out_1HPK
        sums_BHT[rows, :, queries] = sums_1HP
    return out_BHTK, sums_BHT


@torch.library.custom_op("windlass::flash_by_document_backward", mutates_args=())
def flash_by_document_backward(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    out_BHTK: Tensor,
    sums_BHT: Tensor,
    starts_BM: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> the gradients of queries, keys and values, in their shapes."""
    grad_q_BHTK, grad_k_BGTK, grad_v_BGTK = (_like(x) for x in (q_BHTK, k_BGTK, v_BGTK))
    heads, kv_heads = q_BHTK.shape[1], k_BGTK.shape[1]
    grad_k_BGTK.zero_()  # the pieces of a window share keys: sums
    grad_v_BGTK.zero_()
    for rows, queries, keys, mask in _cut(q_BHTK, k_BGTK, starts_BM, window):
        k_1HSK, v_1HSK = (repeat_heads(x[rows, :, keys], heads) for x in (k_BGTK, v_BGTK))
        part = (x[rows, :, queries] for x in (grad_BHTK, q_BHTK))
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *part,
            k_1HSK,
            v_1HSK,
            out_BHTK[rows, :, queries],
            sums_BHT[rows, :, queries],
            0.0,
            mask is None,
            attn_mask=mask,
        )
        grad_q_BHTK[rows, :, queries] = grad_q
        grad_k_BGTK[rows, :, keys] += grad_k.unflatten(1, (kv_heads, -1)).sum(2)
        grad_v_BGTK[rows, :, keys] += grad_v.unflatten(1, (kv_heads, -1)).sum(2)
    return grad_q_BHTK, grad_k_BGTK, grad_v_BGTK


def _cut(
    q_BHTK: Tensor, k_BGTK: Tensor, starts_BM: Tensor, window: int | None
) -> Iterator[tuple[slice, slice, slice, Tensor | None]]:
    """Every row, the queries and keys of a document or a piece of it, and the piece's mask [P, S]: 0 or -inf."""
    length = k_BGTK.shape[2]
    offset = length - q_BHTK.shape[2]
    for row, starts in enumerate(starts_BM.tolist()):
        assert starts[0] == 0 and starts == sorted(starts) and starts[-1] <= length, starts
        for start, stop in zip(starts, [*starts[1:], length]):
            first = max(start, offset)  # query of this document
            if stop <= first:  # filled up, or before the queries
                continue
            if first == start and (window is None or window >= stop - start):
                yield slice(row, row + 1), _moved(slice(start, stop), -offset), slice(start, stop), None
                continue
            before = first - start
            for queries, keys in query_pieces(stop - first, before, window):
                seen_PS = sees(queries, keys, before, window, q_BHTK.device)
                mask_PS = torch.zeros(seen_PS.shape, dtype=q_BHTK.dtype).masked_fill(~seen_PS, -torch.inf)
                yield slice(row, row + 1), _moved(queries, first - offset), _moved(keys, start), mask_PS


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _like(x_BHTK: Tensor) -> Tensor:
    """Memory for x with the heads of a token side by side, as the layers before and after have them, whatever x's own strides."""
    rows, heads, length, channels = x_BHTK.shape
    return x_BHTK.new_empty(rows, length, heads, channels).transpose(1, 2)


def _results(q_BHTK: Tensor) -> tuple[Tensor, Tensor]:
    sums_BHT = q_BHTK.new_empty(q_BHTK.shape[:3], dtype=torch.promote_types(q_BHTK.dtype, torch.float32))
    return _like(q_BHTK), sums_BHT


@flash_by_document.register_fake
def _(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, starts_BM: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    return _results(q_BHTK)


@flash_by_document_backward.register_fake
def _(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    out_BHTK: Tensor,
    sums_BHT: Tensor,
    starts_BM: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q_BHTK), _like(k_BGTK), _like(v_BGTK)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_BHTK: Tensor, _grad_sums: Tensor | None) -> tuple[Any, ...]:
    q_BHTK, k_BGTK, v_BGTK, starts_BM, out_BHTK, sums_BHT = ctx.saved_tensors
    arguments = (grad_BHTK, q_BHTK, k_BGTK, v_BGTK, out_BHTK, sums_BHT, starts_BM, ctx.window)
    return *flash_by_document_backward(*arguments), None, None


flash_by_document.register_autograd(_backward, setup_context=_keep)
