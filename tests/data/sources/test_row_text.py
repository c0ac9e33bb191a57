"""A row's text: under a key or a nested one, and the message where it is not there."""

import json

import pytest

from tests.data.sources.test_scan import read, refused


def test_lines_are_read_by_a_path(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"meta": {"text": "x"}}) + "\n" + json.dumps({"meta": {"text": "y"}}))
    assert read(path=str(tmp_path), text="meta.text") == ["x", "y"]
    error = refused(path=str(tmp_path), text="meta.txt")
    assert error.given == f"{tmp_path}/a.jsonl:1 has no key `meta.txt`"


@pytest.mark.parametrize(
    ("row", "shape"), [({"conversations": []}, "sharegpt"), ({"instruction": "a", "output": "b"}, "alpaca")]
)
def test_conversations_of_other_names_are_named(tmp_path, row, shape):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert (
        f"it holds {' and '.join(row)}: set `format: chat` and `rows: {shape}` of the source"
        in refused(path=str(tmp_path)).change
    )
