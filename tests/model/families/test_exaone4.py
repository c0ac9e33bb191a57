"""EXAONE 4's layers without positions."""

import pytest

from tests.model.families.test_family_table import architecture, refusal
from windlass.model.config import architecture_from_hf
from windlass.model.families.family_table import to_hf


def test_layers_without_a_window_have_no_positions_where_others_have_a_window():
    arch = architecture("exaone4")
    assert arch.window_layers == (0, 1, 2, 4, 5, 6) and arch.unrotated_layers == (3, 7)
    plain = architecture("exaone4", sliding_window=None, layer_types=["full_attention"] * 8)
    assert plain.window is None and plain.unrotated_layers == ()
    still = architecture("exaone4", layer_types=["full_attention"] * 8)
    assert still.window is None and still.unrotated_layers == tuple(range(8))
    assert architecture_from_hf(to_hf(still)) == still


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "no layer_types"),
        ("exaone4", {"sliding_window": None}, "no layer_types"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 8},
            "a sliding layer has a window",
        ),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)
