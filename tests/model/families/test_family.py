"""Which fields of config.json leave the maths alone, and which would change it, for every family."""

import json

import pytest

from tests.model.families.test_family_table import CONFIGS
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.families.family import INFERENCE, NEVER
from windlass.model.families.family_table import FAMILIES, to_hf

SIZES = {"hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 3, "num_attention_heads": 6}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6}


def config_of(family):
    sizes = GPT2 if family == "gpt2" else {**SIZES, "num_key_value_heads": 2}
    return {"model_type": family, "vocab_size": 211, "pad_token_id": None, **sizes}


def test_what_leaves_the_maths_alone_is_accepted():
    config = {
        **config_of("qwen3"),
        "sliding_window": 4096,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 3,
        "rope_scaling": None,
        "some_unset_field": None,
        "temperature": 0.6,
        "pretraining_tp": 1,
    }
    assert isinstance(architecture_from_hf(config), Architecture)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_json_that_transformers_writes_is_accepted(family):
    config = json.loads(json.dumps({**CONFIGS[family]().to_dict(), **config_of(family), "layer_types": None}))
    if family == "smollm3":
        config["no_rope_layers"] = None
    assert architecture_from_hf(config).num_layers == 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("field", sorted(NEVER))
def test_what_no_causal_model_has_is_refused_in_every_family(family, field):
    with pytest.raises(UserError, match=f"model: {field}"):
        architecture_from_hf({**config_of(family), field: {"a": 1}})


def test_no_harmless_field_is_a_field_of_a_model():
    for family in FAMILIES.values():
        assert not set(family.model_fields) & INFERENCE and not set(family.fixed) & family.harmless


def test_token_ids_survive_the_way_out_and_in():
    config = {**config_of("llama"), "bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    arch = architecture_from_hf(config)
    assert isinstance(arch, Architecture) and arch.eos_token_id == (4, 5)
    assert {name: to_hf(arch)[name] for name in config if name.endswith("_token_id")} == {
        name: value for name, value in config.items() if name.endswith("_token_id")
    }


# config.json as published, sizes aside: the fields that are there and in no class of transformers
PUBLISHED = [
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    ("llama", {"pretraining_tp": 1, "mlp_bias": False, "rope_scaling": None, "rope_theta": 500000.0}),
    ("qwen2", {"use_mrope": False, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}),
    ("qwen2", {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}}),
    ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2, "no_rope_layers": [1, 1, 0], "rope_theta": 5000000.0}),
    ("mistral", {"sliding_window": None, "rope_theta": 1000000.0, "torch_dtype": "bfloat16"}),
    ("mixtral", {"router_jitter_noise": 0.0, "output_router_logits": False, "sliding_window": None, "rope_theta": 1e6}),
    ("olmo2", {"attention_bias": False, "rope_scaling": None, "rope_theta": 500000}),
    ("granite", {"attention_multiplier": 0.015625, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
    (
        "phi3",
        {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False, "original_max_position_embeddings": 4096},
    ),
    ("phi3", {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}),
    ("gemma3_text", {"rope_local_base_freq": 10000.0, "rope_theta": 1000000, "cache_implementation": "hybrid"}),
    ("gemma3_text", {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 6}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}),
    ("starcoder2", {"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}),
    ("starcoder2", {"activation_function": "gelu", "attention_softmax_in_fp32": True}),
    ("glm4", {"partial_rotary_factor": 0.5, "attention_bias": True, "eos_token_id": [1, 2]}),
    ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 3, "sliding_window": 4096}),
    ("exaone4", {"sliding_window_pattern": None, "layer_types": ["full_attention"] * 3, "sliding_window": None}),
    ("cohere2", {"use_parallel_block": True, "rotary_pct": 1.0, "position_embedding_type": "rope_gptj"}),
    ("gpt2", {"n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {"text-generation": {}}}),
]


@pytest.mark.parametrize(("family", "fields"), PUBLISHED)
def test_published_configs_are_understood(family, fields):
    architecture_from_hf({**config_of(family), **fields})


def test_interleaved_rotary_channels_are_refused():
    with pytest.raises(UserError, match="rope_interleaved: true"):
        architecture_from_hf({**config_of("llama"), "rope_interleaved": True})
