"""Each family's fields against transformers' own config class, and what each refuses."""

import json

import pytest
from transformers import SmolLM3Config

from tests.model.tiny import FAMILIES as TINY
from windlass.errors import UserError
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.families.family_table import FAMILIES, NEAREST, add_family, to_hf

CONFIGS = {family: config for family, (config, _) in TINY.items()}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
DERIVED = (
    *("vocab_size", "rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"),
    *("layer_types", "sliding_window_pattern", "no_rope_layers"),
)


def architecture(family, **fields):
    return ModelConfig(family=family, **SIZES, **fields).architecture(211)


def refusal(family, **fields):
    with pytest.raises(UserError) as caught:
        architecture(family, **fields)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    ours, theirs = FAMILIES[family], CONFIGS[family]()
    for name, field in ours.model_fields.items():
        if name in (*ours.required, *ours.fixed, *DERIVED):
            continue
        if name in ("num_key_value_heads", "head_dim") and field.default is None:
            continue  # derived there as here
        if name in ("bos_token_id", "eos_token_id"):
            continue  # those of the family's own tokenizer there; a recipe may have another one
        if name == "sliding_window" and not ours.model_fields.get("use_sliding_window", field).default:
            continue  # set to null there where use_sliding_window is false
        assert field.default == getattr(theirs, name), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_default_window_is_that_of_transformers(family):
    default = FAMILIES[family].model_fields["sliding_window"].default
    assert default == CONFIGS[family](use_sliding_window=True).sliding_window


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_the_default_base_is_that_of_transformers(family):
    theirs = CONFIGS[family]().rope_parameters
    ours = architecture(family)
    assert ours.rope_theta == theirs.get("full_attention", theirs)["rope_theta"]
    if "sliding_attention" in theirs:
        theta, _ = ours.window_rope or (ours.rope_theta, None)
        assert theta == theirs["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_is_known_harmless_or_fixed(family):
    ours = FAMILIES[family]
    for name in CONFIGS[family]().to_dict():
        known = name in ours.model_fields or name in ours.aliases
        assert known or name in ours.harmless or name in ours.fixed, name


@pytest.mark.parametrize(
    ("family", "fields", "layers"),
    [
        ("smollm3", {}, (3, 7)),
        ("smollm3", {"no_rope_layer_interval": 3}, (2, 5)),
        ("smollm3", {"no_rope_layer_interval": 1}, tuple(range(8))),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 1, 1, 0, 1, 0, 0]}, (0, 6)),
        ("llama", {}, ()),
    ],
)
def test_layers_without_positions(family, fields, layers):
    assert architecture(family, **fields).unrotated_layers == layers
    if family == "smollm3":
        theirs = SmolLM3Config(**SIZES, **fields).no_rope_layers
        assert tuple(layer for layer in range(8) if not theirs[layer]) == layers


def test_too_few_no_rope_layers_are_named_with_their_number():
    assert "7 no_rope_layers and num_hidden_layers 8" in refusal("smollm3", no_rope_layers=[1] * 7)
    assert "no_rope_layers.0: 2" in refusal("smollm3", no_rope_layers=[2] * 8)


def test_smollm3s_padding_token_must_be_in_the_vocabulary():
    fields = {**SIZES, "family": "smollm3"}
    del fields["pad_token_id"]
    with pytest.raises(UserError, match=r"pad_token_id 128004 and vocab_size 211(.|\n)*or to null"):
        ModelConfig(**fields).architecture(211)


def test_biases_are_those_of_the_family():
    biases = {family: (a.qkv_bias, a.out_bias, a.mlp_bias) for family in SIZED for a in [architecture(family)]}
    own = {"qwen2": (True, False, False), "glm4": (True, False, False), "starcoder2": (True, True, True)}
    assert biases == dict.fromkeys(SIZED, (False, False, False)) | own
    assert "attention_bias" in refusal("qwen2", attention_bias=True)
    assert "attention_bias" in refusal("mistral", attention_bias=True)


SIZED = [family for family in FAMILIES if family != "gpt2"]


@pytest.mark.parametrize(
    ("family", "near", "difference"),
    [
        ("gemma", "gemma2", "no norms after"),
        ("gemma3", "gemma3_text", "images"),
        ("deepseek_v2", "qwen3_moe", "latent attention"),
        ("deepseek_v3", "qwen3_moe", "biased scores"),
        ("gpt_oss", "qwen3_moe", "attention sinks"),
        ("qwen3_next", "qwen3_moe", "gated delta networks"),
        ("llama4", "mixtral", "attention in pieces"),
        ("llama4_text", "mixtral", "attention in pieces"),
        ("phi", "gpt2", "side by side"),
        ("qwen2_moe", "qwen3_moe", "shared expert"),
        ("gpt_neox", "gpt2", "rotary positions"),
    ],
)
def test_a_family_that_is_not_here_is_refused_with_the_nearest(family, near, difference):
    for give in (
        lambda: ModelConfig(family=family, **SIZES),
        lambda: architecture_from_hf({"model_type": family, "vocab_size": 211, **SIZES}),
    ):
        with pytest.raises(UserError) as caught:
            give()
        assert f"model.family: {family}" in str(caught.value)
        assert f"the nearest is {near}" in str(caught.value) and difference in str(caught.value)


def test_the_nearest_of_every_stranger_is_a_family_and_no_family_is_a_stranger():
    assert {near for near, _ in NEAREST.values()} <= set(FAMILIES)
    assert not [name for name in NEAREST if name in FAMILIES]


@pytest.mark.parametrize("family", SIZED)
@pytest.mark.parametrize("fields", [{}, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}])
def test_an_architecture_survives_its_own_config_json(family, fields):
    arch = architecture(family, **({} if family == "phi3" else fields))  # which knows no yarn
    assert architecture_from_hf(json.loads(json.dumps(to_hf(arch)))) == arch


class House(FAMILIES["llama"]):
    family = "house"


def test_a_family_of_ones_own_is_added_once_and_takes_no_other_name():
    add_family(House)
    add_family(House)
    try:
        assert FAMILIES["house"] is House
        with pytest.raises(UserError, match="house is a family already"):
            add_family(type("Other", (House,), {}))
        with pytest.raises(UserError, match="llama is a family already"):
            add_family(type("Mine", (House,), {"family": "llama"}))
        for no_family in (dict, "house", House(**SIZES)):
            with pytest.raises(UserError, match="a family is a class"):
                add_family(no_family)
    finally:
        del FAMILIES["house"]


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("layers", ["full_attention", "sliding_attention"])
def test_an_unrounded_yarn_of_one_kind_of_layers_is_refused(family, layers):
    """transformers builds it rounded all the same: it would be another model here."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    assert architecture(family, rope_parameters={layers: {**yarn, "truncate": True}})
    words = "truncate is False in the rope of one kind of layers"
    assert words in refusal(family, rope_parameters={layers: {**yarn, "truncate": False}})
    if layers == "full_attention":
        assert words in refusal(family, rope_scaling={**yarn, "truncate": False})


@pytest.mark.parametrize("given", [{}, {"eos_token_id": None}, {"eos_token_id": [7, 8]}])
def test_glm4_stops_where_transformers_has_it_stop(given):
    assert architecture("glm4", **given).eos_token_id == tuple(CONFIGS["glm4"](**given).eos_token_id)
