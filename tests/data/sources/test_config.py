"""A source that cannot be is refused before a file is touched, with what to change."""

import pytest

from tests.data.conftest import refusal
from windlass.data.config import DataConfig, SourceConfig
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import source_of_files
from windlass.data.stream.config import EvaluateConfig

ONE_OF_THREE = "a source has exactly one of path, hub and builtin; give one of them: path, hub or builtin"
SLICE = (
    "a slice is first:end, and has at least one row; write one, as in rows=1000:50000; or for chat one of messages, sharegpt, "
    "alpaca, prompt-completion"
)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({}, f"{{}} without path, hub or builtin: {ONE_OF_THREE}"),
        ({"path": "a", "hub": "b/c"}, f"path=a with hub=b/c: {ONE_OF_THREE}"),
        ({"path": "", "hub": "b/c"}, f'path="" with hub=b/c: {ONE_OF_THREE}'),
        (
            {"path": ""},
            'path="": `path` names the documents, and is empty; give a file, a directory, a glob or a name as path',
        ),
        ({"path": ["a", ""]}, "path=['a', '']: `path` names the documents, and is empty"),
        (
            {"hub": ""},
            'hub="": `hub` names the documents, and is empty; give a file, a directory, a glob or a name as hub',
        ),
        (
            {"path": ["a", "s3://me:secret@host/x"]},
            "path=s3://***@host/x: only an http server takes a user or password in a URL; give the bare URL as path, and "
            "credentials in the environment",
        ),
        ({"path": "1://me:secret@host/x"}, "path=1://***@host/x: only an http server"),
        (
            {"builtin": "python-stdlib", "text": "x"},
            "text=x with builtin=python-stdlib: it names a key or a column, and has no effect on `builtin`, which has none; "
            "remove text",
        ),
        *(
            (
                {"path": "a", key: "main"},
                f"{key}=main without hub: it is for a dataset of `hub`, and has no effect without one; remove {key}",
            )
            for key in ("subset", "split", "revision")
        ),
        (
            {"hub": "./local", "revision": "main"},
            "revision=main with hub=./local: only a name of the hub (org/name) has revisions; remove revision",
        ),
        (
            {"hub": "hf://datasets/a/b"},
            "hub=hf://datasets/a/b: `hub` is a dataset's name (org/name), and this is a URL; give it as path",
        ),
        ({"path": "a", "rows": "5:5"}, f"rows=5:5: {SLICE}"),
        ({"path": "a", "rows": "10"}, f'rows="10": {SLICE}'),
        ({"path": "a", "documents": 0}, "greater than or equal to 1"),
        (
            {"path": "a", "rows": "299:10000000000000000000000"},
            f"rows=299:10000000000000000000000: it counts to {10**18} or more, beyond the rows of any source; correct rows",
        ),
        ({"path": "a", "rows": "1" * 5000 + ":"}, f"rows={'1' * 200}...: it counts to {10**18} or more"),
        ({"path": "a", "documents": 10**20}, f"less than or equal to {10**18}"),
        ({"path": "a", "tokens": 10**18 + 1}, f"less than or equal to {10**18}"),
        ({"path": "a", "weight": 0}, "greater than 0"),
    ],
)
def test_what_cannot_be_is_refused(source, said):
    found = refusal(SourceConfig, source)
    assert said in found and "secret" not in found


def test_a_slice_is_two_numbers():
    found = [SourceConfig(path="a", rows=rows).slice for rows in (None, "3:", ":9", "3:9")]
    assert found == [(0, None), (3, None), (0, 9), (3, 9)]


def test_the_largest_limits_are_no_more_than_reading_can_count(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = SourceConfig(path=str(tmp_path / "a.txt"), rows=f"0:{10**18 - 1}", documents=10**18, tokens=10**18)
    assert list(source_of_files(config, scan(config, print)).documents()) == ["text"]


DATA = {"sources": [{"path": "a"}], "tokenizer": {"train": 300}, "directory": "d", "sequence_length": 8}


def data(**settings):
    return DataConfig.model_validate({**DATA, **settings})


def test_all_sources_have_a_weight_or_none_has():
    assert data(sources=[{"path": "a", "weight": 1}]).mixture == [], "one source alone is no mixture"
    assert data(sources=[{"path": "a", "weight": 3}, {"path": "b", "weight": 0.5}]).mixture == [(0, (3.0, 0.5))]
    assert data(sources=[{"path": "a"}, {"path": "b"}]).mixture == []
    assert (
        "sources[1].weight=3.0 without sources[0].weight: weights mix the sources, so all have one or none has; here 1 of 2 have "
        "one; give each of sources a weight, or none of them"
    ) in refusal(DataConfig, {**DATA, "sources": [{"path": "a"}, {"path": "b", "weight": 3}]})


def test_a_weight_where_nothing_is_mixed_is_refused():
    assert (
        "validation.weight=1.0: it is for training sources, and has no effect on validation; remove validation.weight"
    ) in refusal(DataConfig, {**DATA, "validation": {"path": "v", "weight": 1}})
    assert (
        "sets.news.weight=1.0: weights are shares of the training stream, and have no effect on a set; remove sets.news.weight"
    ) in refusal(EvaluateConfig, {"sets": {"news": {"path": "v", "weight": 1}}})
