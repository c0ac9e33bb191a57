"""The rotary tables against transformers and against exact arithmetic, and the turn."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.model.tiny import SCALINGS, hf_model
from windlass.model.config import architecture_from_hf
from windlass.model.rope import rope_tables, rotate


def test_rope_tables_are_transformers_own_in_fp32_and_bf16():
    config = hf_model("qwen3", True).config
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.arange(3000)
    for dtype in (torch.float32, torch.bfloat16):
        expected = theirs(torch.empty(1, dtype=dtype), positions[None])
        for ours, other in zip(rope_tables(positions, 10, 500.0, dtype), expected, strict=True):
            assert ours.dtype == dtype and torch.equal(ours, other[0])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_tables_are_transformers_own_in_fp32_and_bf16(scaling):
    model = hf_model("qwen3", True, rope_parameters={**SCALINGS[scaling], "rope_theta": 500.0})
    theirs, arch = LlamaRotaryEmbedding(model.config), architecture_from_hf(model.config.to_dict())
    positions = torch.arange(3000)
    for dtype in (torch.float32, torch.bfloat16):
        expected = theirs(torch.empty(1, dtype=dtype), positions[None])
        given = rope_tables(positions, 10, 500.0, dtype, arch.rope_scaling)
        for ours, other in zip(given, expected, strict=True):
            assert ours.dtype == dtype and torch.equal(ours, other[0])
    plain = rope_tables(positions, 10, 500.0, torch.float32)
    assert not torch.allclose(plain[0], rope_tables(positions, 10, 500.0, torch.float32, arch.rope_scaling)[0])


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_some_frequencies_are_kept_some_divided_and_some_between(scaling):
    """Or the tests here would show one branch only."""
    model = hf_model("qwen3", True, rope_parameters={**SCALINGS[scaling], "rope_theta": 500.0})
    factor = SCALINGS[scaling]["factor"]
    ratios = LlamaRotaryEmbedding(model.config).inv_freq * 500.0 ** (torch.arange(0, 10, 2) / 10)
    kept, divided = (ratios - 1).abs() < 1e-6, (ratios - 1 / factor).abs() < 1e-6
    assert kept.any() and divided.any() and not (kept | divided).all()


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
