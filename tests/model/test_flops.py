"""Counts against published figures, the meta model, and torch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from windlass.model.architecture import Architecture
from windlass.model.config import ModelConfig
from windlass.model.flops import count_parameters, flops_per_token
from windlass.model.presets import PRESETS
from windlass.model.transformer import Decoder

TINY = {
    "llama": {
        "family": "llama",
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "gpt2": {"family": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40, "n_inner": 76},
}
TINY["qwen3"] = {**TINY["llama"], "family": "qwen3", "head_dim": 10}


def meta(arch):
    with torch.device("meta"):
        return Decoder(arch)


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-1.3b", 1_315_723_264),
        ("gpt2-26b", 25_870_454_272),
        ("gpt2-65b", 64_861_528_064),
        ("llama-2-13b", 13_015_864_320),
        ("qwen3-4b", 4_022_468_096),
    ],
)
def test_presets_count_what_they_say(preset, count):
    assert count_parameters(ModelConfig(preset=preset).architecture()) == count


@pytest.mark.parametrize("preset", PRESETS)
def test_counts_are_the_meta_models_without_padding(preset):
    arch = ModelConfig(preset=preset).architecture()
    rows = arch.padded_vocab_size - arch.vocab_size
    padding = rows * arch.hidden_size * (1 if arch.tied else 2)
    assert count_parameters(arch) == sum(parameter.numel() for parameter in meta(arch).parameters()) - padding


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_palm_equals_torchs_counter_for_every_matrix_product(family, tied):
    """Forward and backward of the dense model on meta, attention as explicit products, so that its full scores count.

    The vocabulary is a multiple of 128 here: padded columns are work, but not the model's.
    """
    arch = ModelConfig(**TINY[family], vocab_size=256, tie_word_embeddings=tied).architecture()
    batch, length = 2, 24
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        meta(arch)(ids).sum().backward()
    assert counter.get_total_flops() == flops_per_token(arch, length).palm * batch * length


def test_the_chunked_head_does_the_work_of_the_dense_one():
    arch = ModelConfig(**TINY["llama"], vocab_size=256).architecture()
    decoder = Decoder(arch)
    decoder.lm_head.chunk_tokens = 11
    ids = torch.zeros(2, 24, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        decoder(ids, ids).backward()
    assert counter.get_total_flops() == flops_per_token(arch, 24).palm * 48


def test_a_published_figure_in_all_three_conventions():
    """SmolLM3-3B's shape at 8,192 tokens: 18.45, 25.70 and 22.07 GFLOP per token."""
    arch = Architecture(
        family="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        max_positions=65536,
        activation="silu",
        norm_eps=1e-6,
        initializer_range=0.02,
        tied=True,
        rope_theta=5e6,
    )
    flops = flops_per_token(arch, 8192)
    assert round(flops.six_n / 1e9, 2) == 18.45
    assert round(flops.palm / 1e9, 2) == 25.70
    assert round(flops.causal / 1e9, 2) == 22.07
