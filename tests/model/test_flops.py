"""Counts against published figures, the meta model, and torch's own counter."""

import fnmatch
import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from windlass.adapters.config import AdapterConfig
from windlass.config import load_recipe
from windlass.model.config import ModelConfig
from windlass.model.flops import flops_per_token, recomputed_flops
from windlass.model.lora.adapter import adapter_of, frozen_base
from windlass.model.transformer import Decoder

ROOT = Path(__file__).parents[2]
TINY = {
    "llama": {
        "family": "llama",
        "hidden_size": 48,
        "intermediate_size": 76,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "gpt2": {"family": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40, "n_inner": 76}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
TINY["qwen3"] = {**TINY["llama"], "family": "qwen3", "head_dim": 10}
OTHERS = (
    "olmo2",
    "granite",
    "phi3",
    "gemma3_text",
    "gemma2",
    "olmo3",
    "starcoder2",
    "glm4",
    "exaone4",
    "ernie4_5",
    "cohere2",
)
TINY |= {family: {**TINY["llama"], "family": family, "pad_token_id": None} for family in OTHERS}
TINY["gemma2"]["attn_logit_softcapping"] = None  # capped scores are computed again in backward, which torch counts too


def meta(arch):
    with torch.device("meta"):
        return Decoder(arch)


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
    """SmolLM3-3B at 8,192 tokens: 18.45, 25.70 and 22.07 GFLOP per token."""
    flops = flops_per_token(ModelConfig(preset="smollm3-3b").architecture(), 8192)
    assert round(flops.six_n / 1e9, 2) == 18.45
    assert round(flops.palm / 1e9, 2) == 25.70
    assert round(flops.causal / 1e9, 2) == 22.07


@pytest.mark.parametrize("window", [1, 5, 24, 100])
def test_causal_counts_the_keys_that_a_window_leaves(window):
    """Two of three layers have it. Query t sees min(t + 1/2, W) keys, as the triangle of T keys counts T^2 / 2."""
    fields = {**TINY["llama"], "family": "qwen2", "vocab_size": 256, "use_sliding_window": True, "max_window_layers": 1}
    flops = flops_per_token(ModelConfig(**fields, sliding_window=window).architecture(), 24)
    left_out = sum(24 - min(t + 0.5, window) for t in range(24)) / 24
    assert flops.palm - flops.causal == 12 * 6 * 8 * (12 + 2 * left_out)


FROZEN = {
    "the embedding": ["model.embed_tokens.weight", "model.embed_positions.weight"],
    "the embedding and the first block": ["model.embed_*", "model.layers.0.*"],
    "a block in the middle": ["model.layers.1.*"],
    "all but the norms": ["*proj*", "*embed*", "lm_head*"],
    "all but the last norm": ["*embed*", "model.layers.*", "lm_head*"],
    "all but one block's values": [
        "*embed*",
        "lm_head*",
        "model.norm*",
        "*norm*",
        "model.layers.[02].*",
        "*[!v]_proj.*",
    ],
    "all but one block's keys": ["*embed*", "lm_head*", "model.norm*", "*norm*", "model.layers.[02].*", "*[!k]_proj.*"],
    "all but the biases": ["*.weight"],
    "the head": ["lm_head.weight"],
}


ADAPTERS = {
    "all matrices": {},
    "some, of one layer": {"targets": ["1.self_attn.v_proj", "1.mlp.down_proj"]},
    "and norms": {"targets": ["o_proj"], "also_train": ["*norm*"]},
    "and the embedding": {"targets": ["up_proj"], "also_train": ["*embed_tokens*"]},
}


@pytest.mark.parametrize("given", ADAPTERS)
@pytest.mark.parametrize(("family", "tied"), [("qwen3", False), ("gpt2", True), ("olmo2", False), ("qwen3", True)])
def test_beside_an_adapter_torch_counts_the_same(family, tied, given):
    """No weight gradient of the frozen base; four products of both factors, and A's input gradient where one is needed."""
    arch = ModelConfig(**TINY[family], vocab_size=256, tie_word_embeddings=tied).architecture()
    adapter = adapter_of(AdapterConfig(kind="lora", rank=3, **ADAPTERS[given]), arch)
    with torch.device("meta"):
        model = Decoder(arch, adapter=adapter)
    frozen = frozen_base(arch, adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(2, 24, dtype=torch.int64, device="meta")).sum().backward()
    assert counter.get_total_flops() == flops_per_token(arch, 24, adapter=adapter).palm * 48
    assert counter.get_total_flops() < flops_per_token(arch, 24).palm * 48


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen3", False), ("gpt2", True), ("gpt2", False), ("olmo2", False), ("glm4", False), ("cohere2", True)],
)
def test_what_is_frozen_is_not_counted_and_torch_counts_the_same(family, tied, frozen):
    arch = ModelConfig(**TINY[family], vocab_size=256, tie_word_embeddings=tied).architecture()
    model = meta(arch)
    names = [n for n, _ in model.named_parameters() if any(fnmatch.fnmatchcase(n, p) for p in FROZEN[frozen])]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        pytest.skip("nothing is left of this family")
    ids = torch.zeros(2, 24, dtype=torch.int64, device="meta")
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(ids).sum().backward()
    assert counter.get_total_flops() == flops_per_token(arch, 24, names).palm * 48


def test_full_recomputation_repeats_the_products_that_a_real_run_repeats():
    """benchmarks/results/layouts.json: products of a step of 256 tokens on one rank; attention is not among them."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "layouts.json").read_text())["rows"]
    config = load_recipe(str(ROOT / "docs" / "techniques" / "fsdp.yaml"))
    arch = config.model.architecture(512)
    attention = 2 * 8 * 128 * 64  # 8 blocks, 128 channels, half of 64 keys: scores and values
    again = 256 * (recomputed_flops(arch, 64) - attention)
    for layout in ("DDP", "ZeRO-2", "ZeRO-3", "HSDP"):
        counted = {kind: rows[f"{layout}, {kind}"]["flops"] for kind in ("none", "selective", "full")}
        assert counted["full"] - counted["none"] == again and counted["selective"] == counted["none"]
