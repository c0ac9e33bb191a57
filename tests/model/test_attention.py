"""The attention seam against explicit softmax, and the rotary tables."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.model.tiny import hf_model
from windlass.model.attention import Layout, attend, rope_tables, rotate


def explicit(q_BHTK, k_BGSK, v_BGSK, offset):
    groups = q_BHTK.shape[1] // k_BGSK.shape[1]
    k_BHSK, v_BHSK = k_BGSK.repeat_interleave(groups, 1), v_BGSK.repeat_interleave(groups, 1)
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
    queries_T1 = torch.arange(q_BHTK.shape[2])[:, None] + offset
    future_TS = torch.arange(k_BGSK.shape[2])[None, :] > queries_T1
    return scores_BHTS.masked_fill(future_TS, -torch.inf).softmax(-1) @ v_BHSK


@pytest.mark.parametrize(("queries", "offset"), [(1, 0), (7, 0), (1, 6), (3, 6), (6, 1)])
@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_attention_equals_explicit_softmax(queries, offset, kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 6, queries, 10, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, offset + queries, 10, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours, expected = attend(q, k, v, Layout(offset)), explicit(q, k, v, offset)
    assert (ours - expected).abs().max() < 1e-14
    weights = torch.randn_like(ours)
    given, wanted = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (ours, expected))
    for ours, theirs in zip(given, wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-13


def test_training_builds_no_mask():
    q, k = torch.randn(2, 6, 7, 10), torch.randn(2, 3, 7, 10)
    with mock.patch.object(functional, "scaled_dot_product_attention", return_value=q) as kernel:
        attend(q, k, k, Layout())
    assert kernel.call_args.kwargs == {"is_causal": True, "enable_gqa": True}


def test_rope_tables_are_transformers_own_in_fp32_and_bf16():
    config = hf_model("qwen3", True).config
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.arange(3000)
    for dtype in (torch.float32, torch.bfloat16):
        expected = theirs(torch.empty(1, dtype=dtype), positions[None])
        for ours, other in zip(rope_tables(positions, 10, 500.0, dtype), expected, strict=True):
            assert ours.dtype == dtype and torch.equal(ours, other[0])


def test_rope_tables_are_accurate_in_fp64():
    cos, sin = rope_tables(torch.arange(3000), 10, 500.0, torch.float64)
    channels = np.arange(0, 10, 2, dtype=np.longdouble)
    angles = np.arange(3000, dtype=np.longdouble)[:, None] / np.longdouble(500) ** (channels / 10)
    assert abs(cos.numpy()[:, :5] - np.cos(angles)).max() < 3e-13
    assert abs(sin.numpy()[:, 5:] - np.sin(angles)).max() < 3e-13


def test_rotation_keeps_lengths_and_sees_only_distances():
    torch.manual_seed(0)
    q, k = torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    rope = rope_tables(torch.arange(50), 10, 500.0, torch.float64)
    turned_q, turned_k = (rotate(x.expand(1, 1, 50, 10), rope)[0, 0] for x in (q, k))
    assert torch.allclose(turned_q.norm(dim=-1), q.norm(), rtol=1e-14)
    scores = turned_q @ turned_k.T
    for distance in (-7, 0, 7):
        diagonal = scores.diagonal(distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-12
