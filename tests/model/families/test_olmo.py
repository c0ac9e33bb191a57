"""OLMo 2 and 3: where their norms are, and which layers have which rope."""

import pytest

from tests.model.families.test_family_table import architecture, refusal
from windlass.model.architecture import parameter_shapes
from windlass.model.names import stored_tensor


def test_olmo2_norms_what_is_added_and_all_heads_at_once():
    shapes = parameter_shapes(architecture("olmo2"))
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (48,)
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (16,)
    assert "model.layers.0.input_layernorm.weight" not in shapes
    place = stored_tensor("model.layers.0.post_mlp_layernorm.weight", architecture("olmo2"))
    assert place.name == "model.layers.0.post_feedforward_layernorm.weight"


def test_olmo3s_scaling_and_base_are_about_the_layers_without_a_window():
    yarn = {"rope_type": "yarn", "factor": 8.0}
    arch = architecture("olmo3", rope_scaling=yarn, rope_theta=77.0)
    assert arch.window_layers == (0, 1, 2, 4, 5, 6)
    assert arch.rope_theta == 77.0 and arch.rope_scaling.kind == "yarn" and arch.window_rope == (500000.0, None)
    assert architecture("olmo3").window_rope is None


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("olmo3", {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "without rope_type"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)
