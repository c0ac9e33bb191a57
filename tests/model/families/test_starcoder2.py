"""StarCoder2."""

import pytest

from tests.model.families.test_family_table import architecture, refusal
from windlass.model.names import stored_tensor


def test_its_dropouts_have_its_own_names():
    arch = architecture("starcoder2", residual_dropout=0.1, embedding_dropout=0.2, attention_dropout=0.3)
    assert arch.dropout == {"residual_dropout": 0.1, "embedding_dropout": 0.2, "attention_dropout": 0.3}
    place = stored_tensor("model.layers.0.mlp.down_proj.bias", arch)
    assert place.name == "model.layers.0.mlp.c_proj.bias"


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type"),
    ],
)
def test_what_would_be_another_model_is_refused(family, fields, named):
    assert named in refusal(family, **fields)
