"""Stretched ropes: both spellings read as transformers 5 reads them, overrides, and every refusal."""

import copy
import json
import math

import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.model.tiny import SCALINGS
from windlass.errors import UserError
from windlass.model.config import ModelConfig, architecture_from_hf
from windlass.model.families.family_table import to_hf
from windlass.model.families.rope_scaling import merge_rope

SIZES = {"hidden_size": 48, "intermediate_size": 76, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 99}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def architecture(**fields):
    return architecture_from_hf({"model_type": "llama", **SIZES, **fields})


def refusal(**fields):
    with pytest.raises(UserError) as caught:
        architecture(**fields)
    return str(caught.value)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_older_spelling_means_the_same(scaling):
    new = architecture(rope_parameters={**SCALINGS[scaling], "rope_theta": 500.0})
    kind = {"type" if key == "rope_type" else key: value for key, value in SCALINGS[scaling].items()}
    assert architecture(rope_scaling=kind, rope_theta=500.0) == new
    assert new.rope_scaling.kind == SCALINGS[scaling]["rope_type"]
    assert architecture_from_hf(json.loads(json.dumps(to_hf(new)))) == new


@pytest.mark.parametrize("scaling", SCALINGS)
def test_cos_and_sin_are_scaled_as_in_transformers(scaling):
    config = LlamaConfig(**SIZES, rope_parameters={**SCALINGS[scaling], "rope_theta": 500.0})
    _, magnitude = ROPE_INIT_FUNCTIONS[SCALINGS[scaling]["rope_type"]](config)
    assert architecture_from_hf(config.to_dict()).rope_scaling.magnitude == magnitude


def test_precedence_is_that_of_transformers():
    """rope_scaling before rope_parameters, the base inside before the base beside."""
    cases = [
        {"rope_scaling": LINEAR, "rope_theta": 7.0},
        {"rope_scaling": {**LINEAR, "rope_theta": 5.0}, "rope_theta": 7.0},
        {"rope_parameters": {**LINEAR, "rope_theta": 5.0}, "rope_theta": 7.0},
        {"rope_scaling": LINEAR, "rope_theta": 7.0, "rope_parameters": {**LINEAR, "rope_theta": 5.0}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "default"}},
    ]
    for fields in cases:
        arch, theirs = architecture(**fields), LlamaConfig(**SIZES, **copy.deepcopy(fields)).rope_parameters
        assert arch.rope_theta == theirs["rope_theta"], fields
        assert ("default" if arch.rope_scaling is None else arch.rope_scaling.kind) == theirs["rope_type"], fields


def test_the_original_length_is_the_models_own_when_left_out():
    assert architecture(rope_scaling=LLAMA3, max_position_embeddings=77).rope_scaling.original_positions == 77


def test_a_recipe_replaces_the_other_spelling_and_keeps_the_base():
    base = {"rope_parameters": {**LLAMA3, "rope_theta": 5.0}}
    assert merge_rope(base, {"rope_scaling": LINEAR}) == {"rope_scaling": LINEAR, "rope_theta": 5.0}
    assert merge_rope(base, {"rope_scaling": None}) == {"rope_scaling": None, "rope_theta": 5.0}
    assert merge_rope(base, {"rope_theta": 9.0}) == {"rope_parameters": LLAMA3, "rope_theta": 9.0}
    assert merge_rope(base, {"hidden_size": 4}) == {**base, "hidden_size": 4}
    older = {"rope_scaling": LINEAR, "rope_theta": 5.0}
    assert merge_rope(older, {"rope_parameters": LLAMA3}) == {"rope_parameters": LLAMA3, "rope_theta": 5.0}
    unscaled = ModelConfig(preset="llama-3.1-8b", rope_parameters={"rope_type": "default"}).architecture()
    assert unscaled.rope_scaling is None and unscaled.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "model: rope_scaling.rope_type is 'dynamic'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "at most 2048 tokens set model.rope_scaling={rope_type: default}"),
        ({"type": "longrope", "factor": 2.0}, "rope_type is 'longrope'"),
        ({"type": "mrope", "mrope_section": [1, 2]}, "the kinds are default, linear, llama3, yarn"),
        ({"type": "yarm", "factor": 2.0}, "did you mean `yarn`?"),
        ({"type": "linear"}, "rope_scaling without factor"),
        ({**LLAMA3, "low_freq_factor": None}, "rope_scaling without low_freq_factor"),
        ({**LINEAR, "factor": 0.5}, "rope_scaling.factor is 0.5\n  rule:   it is a number of at least 1"),
        ({**LINEAR, "factor": "2"}, "rope_scaling.factor is '2'"),
        ({**LINEAR, "factor": True}, "rope_scaling.factor is True"),
        ({**LINEAR, "factor": math.inf}, "rope_scaling.factor is inf"),
        ({**LINEAR, "beta_fast": 32}, "rope_scaling.beta_fast is 32"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fats": 3}, "did you mean `beta_fast`?"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_slow": 0}, "rope_scaling.beta_slow is 0"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": None}, "rope_scaling.truncate is None"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "yarn divides by the base's logarithm"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor 4.0 and high_freq_factor 4.0"),
        ({**LLAMA3, "original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        ({"rope_type": "default", "factor": 2.0}, "rope_scaling.factor is 2.0"),
        ({**LINEAR, "partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling.full_attention is"),
        ({"rope_theta": "big"}, "rope_scaling.rope_theta is 'big'"),
        ({"rope_theta": None}, "rope_scaling.rope_theta is None"),
    ],
)
def test_what_would_be_another_model_is_refused(given, words):
    assert words in refusal(rope_scaling=given)
    assert words.replace("rope_scaling", "rope_parameters") in refusal(rope_parameters=given)


def test_two_spellings_that_differ_are_refused():
    assert "two spellings of one thing" in refusal(rope_scaling=LINEAR, rope_parameters={**LINEAR, "factor": 4.0})
