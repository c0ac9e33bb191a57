"""Phi-3's fused files and its part of a rope."""

import pytest

from tests.model.families.test_family_table import architecture, refusal
from windlass.model.names import stored_tensor


def test_a_part_of_a_head_is_rotated():
    assert architecture("phi3").rotary_dim is None
    assert architecture("phi3", partial_rotary_factor=0.5).rotary_dim == 4
    inside = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert architecture("phi3", rope_parameters=inside, partial_rotary_factor=0.5).rotary_dim == 2


def test_query_key_and_value_are_in_one_tensor_and_so_do_gate_and_up():
    arch = architecture("phi3")
    places = {
        own: stored_tensor(f"model.layers.1.{own}.weight", arch)
        for own in ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    }
    assert [(place.name.split(".")[-2], place.first, place.rows) for place in places.values()] == [
        ("qkv_proj", 48, 80),
        ("qkv_proj", 64, 80),
        ("gate_up_proj", 76, 152),
    ]


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "longest row"),
        ("phi3", {"partial_rotary_factor": 0.4}, "even number of channels"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor is 0"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)
