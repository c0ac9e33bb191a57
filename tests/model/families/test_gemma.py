"""Gemma 2 and 3: caps, factors, two ropes."""

import pytest

from tests.model.families.test_family_table import SIZES, architecture, refusal
from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.model.families.rope_scaling import merge_rope


def test_gemma3s_bases_are_beside_each_other_or_inside():
    arch = architecture("gemma3_text", sliding_window_pattern=3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert arch.window_layers == (0, 1, 3, 4, 6, 7)
    assert arch.rope_theta == 1e6 and arch.rope_scaling.factor == 8.0 and arch.window_rope == (10000.0, None)
    assert architecture("gemma3_text", rope_local_base_freq=5.0).window_rope == (5.0, None)
    inside = {"sliding_attention": {"rope_theta": 3.0}, "full_attention": {"rope_theta": 4.0}}
    nested = architecture("gemma3_text", rope_parameters=inside, rope_local_base_freq=5.0)
    assert (nested.rope_theta, nested.window_rope) == (4.0, (3.0, None))


def test_gemma2_caps_scores_and_logits():
    arch = architecture("gemma2")
    assert (arch.score_cap, arch.logit_cap, arch.score_scale) == (50.0, 30.0, 1 / 16)
    assert arch.embedding_scale == 48**0.5 and arch.window_layers == (0, 2, 4, 6)
    bare = architecture("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (bare.score_cap, bare.logit_cap) == (None, None)


def test_a_recipe_replaces_one_base_inside_a_file():
    inside = {"sliding_attention": {"rope_theta": 3.0}, "full_attention": {"rope_theta": 4.0, "rope_type": "default"}}
    given = {"rope_parameters": inside}
    assert merge_rope(given, {"rope_theta": 9.0})["rope_parameters"]["full_attention"] == {"rope_type": "default"}
    assert merge_rope(given, {"rope_local_base_freq": 9.0})["rope_parameters"]["sliding_attention"] == {}
    scaled = merge_rope(given, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert scaled["rope_parameters"] == {
        "full_attention": {"rope_theta": 4.0},
        "sliding_attention": {"rope_theta": 3.0},
    }
    assert inside["full_attention"]["rope_theta"] == 4.0, "what was given stays"


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters has rope_type"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)


def test_the_hidden_size_is_a_multiple_of_the_heads_as_transformers_asks():
    with pytest.raises(UserError, match="hidden_size 50 and 6 attention heads"):
        ModelConfig(family="gemma2", **{**SIZES, "hidden_size": 50}).architecture(211)
