"""ERNIE 4.5."""

import pytest

from tests.model.families.test_family_table import architecture, refusal


def test_neighbouring_channels_rotate_and_null_is_no_bias():
    arch = architecture("ernie4_5", use_bias=None)
    assert arch.rope_interleaved and not (arch.qkv_bias or arch.out_bias or arch.mlp_bias)
    assert architecture("ernie4_5", use_bias=True).mlp_bias and arch.rope_theta == 500000.0


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("ernie4_5", {"attention_dropout": 0.1}, "attention_dropout"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)
