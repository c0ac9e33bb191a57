"""What PEFT finds by a regular expression, as a list of last parts of names."""

import pytest

from windlass.other_names.target_names import listed_targets, named_by

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in range(3)
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        (r".*_proj", ["q_proj", "up_proj", "down_proj"]),
        (r".*\.mlp\.(up|down)_proj", ["up_proj", "down_proj"]),
        (r"mlp\..*", []),  # PEFT matches whole names
        (r".*\.[02]\..*up_proj", []),  # of some layers
        (r"(", []),
    ],
)
def test_the_list_is_what_the_expression_finds_in_every_layer(expression, found):
    assert named_by(expression, MODULES) == found


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ("q_proj, v_proj", "adapter.targets=[q_proj, v_proj]"),
        (["self_attn.q_proj"], "adapter.targets=[self_attn.q_proj]"),
        ("all", "adapter.targets=all-linear"),
        (r".*\.(k|o)_proj", "adapter.targets=[k_proj, o_proj] (what the expression finds in a Llama; "),
        (r".*\.7\..*", "adapter.targets=[q_proj, v_proj] (for example; "),
    ],
)
def test_targets_of_another_tool_are_a_setting(given, setting):
    assert listed_targets(given).startswith(setting)
