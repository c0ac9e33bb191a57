"""config.json read within bounds, and sizes that are believed only as far as the weights go."""

import json
import os
from pathlib import Path

import pytest

from tests.tiny import MODEL
from windlass.errors import UserError
from windlass.model.open_config import MAX_BYTES, StoredSizes, architecture_within, read_hf_config

FIELDS = {key: value for key, value in MODEL.items() if key != "family"} | {"model_type": "qwen3", "vocab_size": 300}
HELD = StoredSizes(24, 16184)  # of those fields


def test_a_model_as_large_as_its_weights_is_taken():
    assert architecture_within(FIELDS, HELD, Path("here")).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "stated"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000"),
        ({"hidden_size": 10**6}, "hidden_size 1000000"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000"),
        ({"num_attention_heads": 10**12}, "num_attention_heads 1000000000000"),
        ({"head_dim": 10**9}, "head_dim 1000000000"),
        ({"intermediate_size": 10**7}, "a model of 1440010424 parameters"),
        ({"vocab_size": 301}, "a model of 16208 parameters"),
        ({"num_hidden_layers": 3}, "a model of "),
    ],
)
def test_a_model_larger_than_its_weights_is_refused_before_it_has_a_shape(changes, stated):
    with pytest.raises(UserError) as caught:
        architecture_within({**FIELDS, **changes}, HELD, Path("here"))
    assert caught.value.given.startswith(f"here states {stated}")
    assert caught.value.given.endswith(", and its weights are 24 tensors of 16184 elements in all")
    assert "belong together" in caught.value.change


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(UserError) as caught:
        architecture_within({**FIELDS, "surprise": "x" * 10_000}, HELD, Path("here"))
    assert caught.value.given == f'model: surprise: "{"x" * 199}...'


def test_a_config_that_is_huge_deep_or_full_of_digits_is_refused(tmp_path):
    file = tmp_path / "config.json"

    def refusal():
        with pytest.raises(UserError) as caught:
            read_hf_config(tmp_path)
        return caught.value.given, caught.value.rule

    deep = (f"{file}: the model's config is nested too deeply", "a config.json has at most 16 levels")
    file.write_text("[" * 100_000)
    assert refusal() == deep
    file.write_text('{"rope_scaling": ' * 17 + "1" + "}" * 17)
    assert refusal() == deep
    with pytest.raises(UserError, match="nested too deeply"):
        architecture_within({**FIELDS, "rope_scaling": json.loads("[" * 900 + "]" * 900)}, HELD, file)
    file.write_text('{"rope_scaling": ' * 16 + "1" + "}" * 16)
    assert read_hf_config(tmp_path)
    file.write_text('{"vocab_size": ' + "9" * 10_000 + "}")
    assert refusal()[1] == "config.json is valid JSON" and "4300 digits" in refusal()[0]
    os.truncate(file, MAX_BYTES + 1)  # sparse: it takes no space
    assert refusal() == (f"{file} has 16.0 MiB", "a config.json has at most 16.0 MiB")
    file.write_text(json.dumps(FIELDS))
    assert read_hf_config(tmp_path) == FIELDS
