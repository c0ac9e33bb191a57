"""Sliding windows by name: which layers have them, as in transformers' own configs, and what is refused."""

import json

import pytest
from transformers import MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from windlass.errors import UserError
from windlass.model.config import architecture_from_hf
from windlass.model.families.family_table import to_hf

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "smollm3": SmolLM3Config}
ON = {"use_sliding_window": True, "sliding_window": 7}
MIXED = ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def architecture(family, **fields):
    return architecture_from_hf({"model_type": family, **SIZES, **fields})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 7},
        {"use_sliding_window": True, "sliding_window": None},
        {**ON, "max_window_layers": 2},
        {**ON, "max_window_layers": 9},
        {**ON, "max_window_layers": -1},
        {**ON, "layer_types": MIXED},
        {**ON, "layer_types": ["full_attention"] * 5},
        {"layer_types": ["full_attention"] * 5},
    ],
    ids=str,
)
def test_windows_are_where_transformers_has_them(family, fields):
    arch, theirs = architecture(family, **fields), CONFIGS[family](**SIZES, **fields)
    layers = tuple(layer for layer, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
    assert arch.window_layers == layers
    assert arch.window == (theirs.sliding_window if layers else None)
    again = architecture_from_hf(json.loads(json.dumps(to_hf(arch))))
    assert again == arch
    saved = CONFIGS[family](**to_hf(arch))
    assert saved.layer_types == theirs.layer_types and (not layers or saved.sliding_window == arch.window)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"sliding_window": 7}], ids=str)
def test_mistrals_window_is_in_every_layer(fields):
    arch, theirs = architecture("mistral", **fields), MistralConfig(**SIZES, **fields)
    assert arch.window == theirs.sliding_window
    assert arch.window_layers == (() if arch.window is None else (0, 1, 2, 3, 4))
    assert MistralConfig(**to_hf(arch)).sliding_window == theirs.sliding_window
    assert architecture_from_hf(json.loads(json.dumps(to_hf(arch)))) == arch


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("qwen2", {"layer_types": MIXED}, "layer_types names sliding layers, with use_sliding_window False"),
        ("smollm3", {"layer_types": MIXED, "sliding_window": 7}, "with use_sliding_window False and sliding_window 7"),
        ("qwen3", {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": None}, "sliding_window None"),
        ("qwen3", {**ON, "layer_types": MIXED[:3]}, "3 layer_types and num_hidden_layers 5"),
        ("qwen3", {**ON, "layer_types": MIXED[:3]}, "model.layer_types=null"),
        ("qwen2", {**ON, "sliding_window": 0}, "sliding_window: 0"),
        ("mistral", {"layer_types": MIXED}, "layer_types: ["),
        ("qwen2", {"use_mrope": True}, "use_mrope: true"),
    ],
)
def test_windows_that_mean_nothing_are_refused(family, fields, words):
    with pytest.raises(UserError) as caught:
        architecture(family, **fields)
    assert words in str(caught.value)


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(UserError, match="hidden_size 50 and 6 attention heads"):
        architecture("qwen2", hidden_size=50)
    assert architecture("qwen2", hidden_size=50, head_dim=10).head_dim == 10
