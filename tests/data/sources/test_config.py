"""A source that cannot be is refused before a file is touched, with what to change."""

import pytest
from pydantic import ValidationError

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import source_of_files
from windlass.data.stream.config import EvaluateConfig


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({}, "exactly one of `path`, `hub` and `builtin`; none is given"),
        ({"path": "a", "hub": "b/c"}, "`path` and `hub` are given"),
        ({"path": ""}, "`path` is empty"),
        ({"hub": ""}, "`hub` is empty"),
        ({"path": "s3://me:secret@host/x"}, "a URL with a user or password, which an http server alone takes"),
        ({"builtin": "python-stdlib", "text": "x"}, "has no effect on `builtin`"),
        ({"path": "a", "split": "train"}, "`split` has no effect without `hub`"),
        ({"path": "a", "revision": "main"}, "`revision` has no effect without `hub`"),
        ({"hub": "hf://datasets/a/b"}, "give a URL as `path`"),
        ({"path": "a", "rows": "5:5"}, "not a slice of at least one row"),
        ({"path": "a", "rows": "10"}, "write first:end, as in 1000:50000"),
        ({"path": "a", "documents": 0}, "greater than or equal to 1"),
        ({"path": "a", "rows": "299:10000000000000000000000"}, f"counts to {10**18} or more"),
        ({"path": "a", "rows": "1" * 5000 + ":"}, f"counts to {10**18} or more"),
        ({"path": "a", "documents": 10**20}, f"less than or equal to {10**18}"),
        ({"path": "a", "tokens": 10**18 + 1}, f"less than or equal to {10**18}"),
        ({"path": "a", "weight": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_is_refused(source, said):
    with pytest.raises(ValidationError) as caught:
        SourceConfig(**source)
    assert said in str(caught.value) and "secret" not in str(caught.value.errors()[0]["msg"])


def test_a_slice_is_two_numbers():
    found = [SourceConfig(path="a", rows=rows).slice for rows in (None, "3:", ":9", "3:9")]
    assert found == [(0, None), (3, None), (0, 9), (3, 9)]


def test_the_largest_limits_are_no_more_than_reading_can_count(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = SourceConfig(path=str(tmp_path / "a.txt"), rows=f"0:{10**18 - 1}", documents=10**18, tokens=10**18)
    assert list(source_of_files(config, scan(config, print)).documents()) == ["text"]


def data(**settings):
    return DataConfig.model_validate(
        {"sources": [{"path": "a"}], "tokenizer": {"train": 300}, "directory": "d", "sequence_length": 8, **settings}
    )


def test_all_sources_have_a_weight_or_none_has():
    assert data(sources=[{"path": "a", "weight": 1}]).mixture == [], "one source alone is no mixture"
    assert data(sources=[{"path": "a", "weight": 3}, {"path": "b", "weight": 0.5}]).mixture == [(0, (3.0, 0.5))]
    assert data(sources=[{"path": "a"}, {"path": "b"}]).mixture == []
    with pytest.raises(ValidationError, match="1 of 2 sources have a `weight`; all have one"):
        data(sources=[{"path": "a", "weight": 3}, {"path": "b"}])


def test_a_weight_where_nothing_is_mixed_is_refused():
    with pytest.raises(ValidationError, match=r"validation\.weight` has no effect"):
        data(validation={"path": "v", "weight": 1})
    with pytest.raises(ValidationError, match=r"`news\.weight` has no effect"):
        EvaluateConfig(sets={"news": {"path": "v", "weight": 1}})
