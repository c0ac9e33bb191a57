"""The attention seam against explicit softmax: offsets, grouped heads, windows."""

import math

import pytest
import torch

from windlass.model.attention.attend import attend
from windlass.model.attention.layout import AttentionLayout


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
    ours, expected = attend(q, k, v, AttentionLayout(offset, window)), explicit(q, k, v, offset, window)
    assert (ours - expected).abs().max() < 1e-14
    weights = torch.randn_like(ours)
    given, wanted = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (ours, expected))
    for ours, theirs in zip(given, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-13
