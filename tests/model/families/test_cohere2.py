"""Cohere 2's block, and its layers without positions."""

import pytest

from tests.model.families.test_family_table import architecture, refusal
from windlass.model.architecture import parameter_shapes


def test_one_norm_without_bias_serves_both_branches():
    arch = architecture("cohere2", sliding_window_pattern=2)
    names = [name for name in parameter_shapes(arch) if "norm" in name and ".layers.0." in name]
    assert names == ["model.layers.0.input_layernorm.weight"]
    assert arch.window_layers == (0, 2, 4, 6) and arch.unrotated_layers == (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere2", {"logit_scale": 0}, "logit_scale"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)
