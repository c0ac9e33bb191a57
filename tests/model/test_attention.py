"""The attention seam against explicit softmax: offsets, grouped heads, windows; and which masks are built."""

import math
from unittest import mock

import pytest
import torch
from torch.nn import functional

from windlass.model.attention import Layout, attend


def explicit(q_BHTK, k_BGSK, v_BGSK, offset, window=None):
    groups = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = k_BGSK.repeat_interleave(groups, 1), v_BGSK.repeat_interleave(groups, 1)
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
    queries_T1 = torch.arange(q_BHTK.shape[2])[:, None] + offset
    future_TS = torch.arange(k_BGSK.shape[2])[None, :] > queries_T1
    if window is not None:
        future_TS = future_TS | (torch.arange(k_BGSK.shape[2])[None, :] <= queries_T1 - window)
    return scores_BHTS.masked_fill(future_TS, -torch.inf).softmax(-1) @ v_BHSK


@pytest.mark.parametrize(("queries", "offset"), [(1, 0), (7, 0), (1, 6), (3, 6), (6, 1)])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 7, 9, 100])
def test_attention_equals_explicit_softmax(queries, offset, kv_heads, window):
    torch.manual_seed(0)
    q = torch.randn(2, 6, queries, 10, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, offset + queries, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours, expected = attend(q, k, v, Layout(offset, window)), explicit(q, k, v, offset, window)
    assert (ours - expected).abs().max() < 1e-14
    weights = torch.randn_like(ours)
    given, wanted = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (ours, expected))
    for ours, theirs in zip(given, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-13


@pytest.mark.parametrize("window", [None, 7, 8])
def test_training_builds_no_mask_at_full_attention(window):
    q, k = torch.randn(2, 6, 7, 10), torch.randn(2, 3, 7, 10)
    with mock.patch.object(functional, "scaled_dot_product_attention", return_value=q) as kernel:
        attend(q, k, k, Layout(0, window))
    assert kernel.call_args.kwargs == {"is_causal": True, "enable_gqa": True}


def test_a_window_costs_masks_of_its_own_size_only():
    q, k = torch.randn(1, 4, 23, 10), torch.randn(1, 2, 23, 10)
    attention = functional.scaled_dot_product_attention
    with mock.patch.object(functional, "scaled_dot_product_attention", side_effect=attention) as kernel:
        attend(q, k, k, Layout(0, 5))
    shapes = [tuple(call.kwargs["attn_mask"].shape) for call in kernel.call_args_list]
    assert shapes == [(5, 5), (5, 9), (5, 9), (5, 9), (3, 7)]


def test_the_newest_token_needs_no_mask_in_a_window():
    q, k = torch.randn(1, 4, 1, 10), torch.randn(1, 2, 23, 10)
    with mock.patch.object(functional, "scaled_dot_product_attention", return_value=q) as kernel:
        attend(q, k, k, Layout(22, 5))
    assert kernel.call_args.kwargs == {"enable_gqa": True} and kernel.call_args.args[1].shape[2] == 5
