"""Attention with dropout against the formula written out, with the same mask: values, gradients, pieces, windows, documents."""

import math
from unittest import mock

import pytest
import torch
from torch.nn import functional

from windlass.model.attention import unfused as attention_unfused
from windlass.model.attention.documents import find_documents
from windlass.model.attention.layout import AttentionLayout
from windlass.model.attention.unfused import attend_unfused
from windlass.model.chunks import Chunks
from windlass.model.dropout import ATTENTION, keep_mask, row_keys

B, H, G, T, K = 2, 6, 2, 23, 10
KEYS = torch.tensor([11, -5])
STARTS = torch.tensor([[0, 4, 9, 23], [0, 1, 2, 17]])


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    make = dict(dtype=dtype, generator=generator)
    return [torch.randn(B, heads, T, K, **make).requires_grad_() for heads in (H, G, G)]


def seen(window=None, starts=None):
    """[B, 1, T, T]: who sees whom, one pair at a time."""
    mask = torch.zeros(B, 1, T, T, dtype=torch.bool)
    for row in range(B):
        for query in range(T):
            begin = 0 if starts is None else max(start for start in starts[row].tolist() if start <= query)
            for key in range(begin, query + 1):
                mask[row, 0, query, key] = window is None or query - key < window
    return mask


def explicit(q_BHTK, k_BGTK, v_BGTK, probability, seen_B1TT):
    k_BHTK, v_BHTK = (x.repeat_interleave(H // G, 1) for x in (k_BGTK, v_BGTK))
    weights = (q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(K)).masked_fill(~seen_B1TT, -torch.inf).softmax(-1)
    heads, positions = torch.arange(H), torch.arange(T)
    kept = keep_mask(row_keys(KEYS, ATTENTION, heads, positions), positions.int(), probability)
    return (weights * kept / (1 - probability)) @ v_BHTK


def gradients(out, given):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(out.dtype)
    return torch.autograd.grad((out * weights).sum(), given)


@pytest.mark.parametrize("piece", [1, 5, 1000], ids=lambda rows: f"{rows}-queries")
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("probability", [0.1, 0.6])
def test_it_is_the_formula_with_the_same_mask(piece, window, isolated, probability):
    chunks = Chunks(attention_weights=piece * B * H * T)
    given = inputs()
    documents = find_documents(STARTS, T) if isolated else None
    ours = attend_unfused(*given, AttentionLayout(0, window, documents, chunks=chunks), probability, KEYS)
    theirs = explicit(*given, probability, seen(window, STARTS if isolated else None))
    assert (ours - theirs).abs().max() < 1e-13
    for one, two in zip(gradients(ours, given), gradients(theirs, given), strict=True):
        assert (one - two).abs().max() < 1e-12


def test_with_next_to_no_dropout_it_is_the_fused_kernel():
    q, k, v = inputs()
    fused = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert (attend_unfused(q, k, v, AttentionLayout(), 0.0, KEYS) - fused).abs().max() < 1e-13


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_near(dtype, tolerance):
    exact, given = inputs(), inputs(dtype)
    with torch.no_grad():
        for one, two in zip(exact, given, strict=True):
            one.copy_(two)
    ours, theirs = (
        attend_unfused(*given, AttentionLayout(), 0.3, KEYS),
        attend_unfused(*exact, AttentionLayout(), 0.3, KEYS),
    )
    assert ours.dtype == dtype
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    for one, two in zip(gradients(ours, given), gradients(theirs, exact), strict=True):
        assert one.dtype == dtype and (one - two).abs().max() <= 3 * tolerance * two.abs().max()


def test_a_rank_with_some_heads_computes_its_slice():
    q, k, v = inputs()
    whole = attend_unfused(q, k, v, AttentionLayout(), 0.3, KEYS)
    mine = torch.arange(3, 6, dtype=torch.int32)
    part = attend_unfused(q[:, 3:], k[:, 1:], v[:, 1:], AttentionLayout(heads_H=mine), 0.3, KEYS)
    assert torch.equal(part, whole[:, 3:])


def test_no_more_than_a_piece_of_weights_exists():
    """Forward keeps what flash attention keeps: nothing of the size of the weights."""
    layout = AttentionLayout(0, 4, chunks=Chunks(attention_weights=2 * B * H * T))
    sizes = []
    scores = attention_unfused._scores

    def spy(*args):
        sizes.append(tuple(scores(*args).shape))
        return scores(*args)

    kept = []
    pack = mock.Mock(side_effect=lambda tensor: kept.append(tensor.numel()) or tensor)
    with mock.patch.object(attention_unfused, "_scores", spy):
        given = inputs()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = attend_unfused(*given, layout, 0.3, KEYS)
        gradients(out, given)
    assert sizes[:2] == [(B, H, 2, 2), (B, H, 2, 4)] and len(sizes) == 24
    assert max(size[2] for size in sizes) == 2 and max(size[3] for size in sizes) == 5
    assert max(kept) == B * H * T * K


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("offset", [1, 5, T - 1])
def test_a_rank_with_the_end_of_a_row_computes_its_queries(window, isolated, offset):
    chunks = Chunks(attention_weights=2 * B * H * T)
    given, other = inputs(), inputs()
    starts = torch.tensor([[0, 3, 9, T], [0, T, T, T]])[:B]
    whole = AttentionLayout(0, window, find_documents(starts, T) if isolated else None, chunks=chunks)
    end = AttentionLayout(offset, window, find_documents(starts, T, offset) if isolated else None, chunks=chunks)
    expected = attend_unfused(*given, whole, 0.3, KEYS)[:, :, offset:]
    ours = attend_unfused(other[0][:, :, offset:], *other[1:], end, 0.3, KEYS)
    assert (ours - expected).abs().max() < 1e-13
    for mine, theirs in zip(gradients(ours, other), gradients(expected, given), strict=True):
        assert (mine - theirs).abs().max() < 1e-13
