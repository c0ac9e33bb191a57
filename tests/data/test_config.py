"""What a recipe may and may not say about data."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from windlass.data.config import DataConfig, SourceConfig, TokenizerConfig
from windlass.data.held_out import HeldOutConfig

GOOD = {"sources": [{"path": "x"}], "tokenizer": {"train": 300}, "directory": "d", "sequence_length": 8}


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (SourceConfig, {"path": []}, "`path` is empty"),
        (SourceConfig, {"builtin": "wikipedia"}, "python-stdlib"),
        (DataConfig, {**GOOD, "packing": "padded"}, "best-fit"),
        (TokenizerConfig, {}, "neither is given"),
        (TokenizerConfig, {"train": 300, "from": "x"}, "both are given"),
        (TokenizerConfig, {"train": 256}, "greater than or equal to 257"),
        (DataConfig, {**GOOD, "sources": []}, "at least 1 item"),
        (DataConfig, {**GOOD, "directory": "s3://bucket"}, "read through a local cache: add `cache: {directory:"),
        (DataConfig, {**GOOD, "cache": {"directory": "c"}}, "`cache` has no effect on a local directory"),
        (DataConfig, {**GOOD, "directory": "https://me:pa55@host/x"}, "a URL with a user, password or query"),
        (DataConfig, {**GOOD, "directory": "https://host/x?sig=51gn"}, "a URL with a user, password or query"),
        (
            DataConfig,
            {**GOOD, "directory": "simplecache::s3://b/x", "cache": {"directory": "c"}},
            "a chain of file systems",
        ),
        (DataConfig, {**GOOD, "sequence_length": 1}, "greater than or equal to 2"),
        (DataConfig, {**GOOD, "validation": None}, "a share between 0 and 1, none, {bytes: ...},"),
        (DataConfig, {**GOOD, "validation": 1.0}, "less than 1"),
        (DataConfig, {**GOOD, "validation": 0}, "greater than 0"),
        (DataConfig, {**GOOD, "validation": {"pth": "v"}}, "pth"),
        (DataConfig, {**GOOD, "shuffle_window": 0}, "greater than or equal to 1"),
        (DataConfig, {**GOOD, "validation": {"bytes": 0}}, "greater than or equal to 1"),
        (
            DataConfig,
            {**GOOD, "validation": {"bytes": 1, "tokens": 1}},
            "exactly one of `bytes` and `tokens`; both are given",
        ),
        (
            DataConfig,
            {**GOOD, "validation": {"tokens": 9}, "tokenizer": {"train": 300}},
            "give `validation: {bytes: ...}`",
        ),
        (
            DataConfig,
            {**GOOD, "validation": {"bytes": 9}, "order": {"first_epoch": "written", "held_out_of": 5}},
            "has no effect with an amount in `validation`, only with a share",
        ),
    ],
)
def test_a_wrong_setting_is_refused_in_words(model, settings, says):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(settings)
    assert says in str(caught.value)


def test_validation_is_a_share_an_amount_a_source_or_none():
    assert DataConfig.model_validate({**GOOD, "validation": "none"}).evaluated({"news": SourceConfig(path="n")}) == (
        "news",
    )
    amount = DataConfig.model_validate({**GOOD, "validation": {"bytes": 10e6}})
    assert amount.validation == HeldOutConfig(bytes=10_000_000) and amount.evaluated({}) == ("validation",)
    assert DataConfig.model_validate({**GOOD, "validation": "0.1"}).validation == 0.1
    assert DataConfig.model_validate({**GOOD, "validation": {"path": "v"}}).validation == SourceConfig(path="v")


def test_a_mistake_inside_the_validation_source_is_not_reported_as_a_bad_number():
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate({**GOOD, "validation": {"pth": "v"}})
    assert next(error["loc"] for error in caught.value.errors()) == ("validation", "source", "pth")


def test_from_is_written_as_in_the_recipe():
    assert TokenizerConfig.model_validate({"from": "x"}).from_ == "x"
    assert TokenizerConfig(from_="x").model_dump(by_alias=True)["from"] == "x"


def test_config_is_torch_free():
    code = "import sys, windlass.data.config; print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
