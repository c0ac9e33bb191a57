"""What a recipe may and may not say about data."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from tests.data.conftest import refusal
from windlass.data.config import DataConfig, SourceConfig, TokenizerConfig
from windlass.data.held_out import HeldOutConfig

GOOD = {"sources": [{"path": "x"}], "tokenizer": {"train": 300}, "directory": "d", "sequence_length": 8}
NO_SECRET = (
    "checkpoints keep the URL to open it again, so it has no user, password or query; give the bare URL as directory, and "
    "credentials in the environment"
)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        (
            SourceConfig,
            {"path": []},
            "path=[]: `path` names the documents, and is empty; give a file, a directory, a glob or a name as path",
        ),
        (SourceConfig, {"builtin": "wikipedia"}, "python-stdlib"),
        (DataConfig, {**GOOD, "packing": "padded"}, "best-fit"),
        (
            TokenizerConfig,
            {"eos_token": "<e>"},
            "{eos_token: <e>} without train or from: a tokenizer has exactly one of train and from; give one of them: train or "
            "from",
        ),
        (
            TokenizerConfig,
            {"train": 300, "from": "x"},
            "train=300 with from=x: a tokenizer has exactly one of train and from;",
        ),
        (TokenizerConfig, {"train": 256}, "greater than or equal to 257"),
        (DataConfig, {**GOOD, "sources": []}, "at least 1 item"),
        (
            DataConfig,
            {**GOOD, "directory": "s3://bucket"},
            "directory=s3://bucket without cache: shards at a URL are read through a local cache; set cache={directory: "
            "/local/disk/cache, limit_mib: 10240}",
        ),
        (
            DataConfig,
            {**GOOD, "cache": {"directory": "c"}},
            "cache={directory: c} with directory=d: a local directory is read in place, and `cache` has no effect; remove cache",
        ),
        (DataConfig, {**GOOD, "directory": "https://me:pa55@host/x"}, f"directory=https://***@host/x: {NO_SECRET}"),
        (DataConfig, {**GOOD, "directory": "https://host/x?sig=51gn"}, f"directory=https://host/x?***: {NO_SECRET}"),
        (
            DataConfig,
            {**GOOD, "directory": "simplecache::s3://b/x", "cache": {"directory": "c"}},
            "directory=simplecache::s3://b/x: a chain of file systems is not opened; `cache` keeps the shards of one URL here; "
            "give one URL as directory",
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
            "bytes=1 with tokens=1: an amount to hold out has exactly one of bytes and tokens; give one of them: bytes or tokens",
        ),
        (
            DataConfig,
            {**GOOD, "validation": {"tokens": 9}, "tokenizer": {"train": 300}},
            "validation={tokens: 9} with tokenizer.train=300: the tokenizer is trained on what is not held out, so no token is "
            "known before; give an amount of bytes: validation={bytes: ...}",
        ),
        (
            DataConfig,
            {**GOOD, "validation": {"bytes": 9}, "order": {"first_epoch": "written", "held_out_of": 5}},
            "order.held_out_of=5 with validation={bytes: 9}: it says of how many documents a share for `validation` is, and "
            "has no effect without a share; remove order.held_out_of",
        ),
    ],
)
def test_a_wrong_setting_is_refused_in_words(model, settings, says):
    assert says in refusal(model, settings)


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
