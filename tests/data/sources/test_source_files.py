"""Documents of local files: an exact slice of what was scanned, or an error that names the file."""

import json
import os

import pytest

from tests.data.sources.test_scan import refused
from windlass.data.config import SourceConfig
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import Source, file_at, is_remote, names_below
from windlass.errors import UserError


def test_rows_are_cut_before_empty_ones_are_left_out_and_documents_counted(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ["a", "", "b", "c", "", "d"])
    (tmp_path / "x.jsonl").write_text(lines)
    files = scan(SourceConfig(path=str(tmp_path)), print)
    assert not is_remote(files[0])
    assert list(Source(files, (1, 5)).documents()) == ["b", "c"]
    assert list(Source(files, (1, None), num_documents=2).documents()) == ["b", "c"]
    assert list(Source(files, num_documents=3, first_documents=1).documents()) == ["a"]
    assert list(Source([], stream=lambda: iter("xyz"), first_documents=2).documents()) == ["x", "y"]


def test_a_single_file_is_taken_as_a_scan_takes_it(tmp_path):
    for name, data in {"b/a.txt": b"x", "c.bin": b"\0", "d.csv": b"1,2", ".e": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert names_below(tmp_path) == ["b/a.txt", "c.bin", "d.csv"]
    assert [file_at(tmp_path / "b/a.txt", "a.txt", SourceConfig(path="b"))] == scan(
        SourceConfig(path=str(tmp_path / "b")), print
    )
    with pytest.raises(UserError, match="is a binary file"):
        file_at(tmp_path / "c.bin", "c.bin", SourceConfig(path="b"))


def test_a_file_that_changes_between_hash_and_reading_is_an_error(tmp_path):
    for name, before, after in (("x.txt", "before", "after!"), ("x.jsonl", '{"text": "a"}', '{"text": "b"}')):
        (tmp_path / name).write_text(before)
        files = scan(SourceConfig(path=str(tmp_path / name)), print)
        (tmp_path / name).write_text(after)
        with pytest.raises(UserError, match="changed while it was being prepared"):
            list(Source(files).documents())


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_read_permission_is_named(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "x.txt").chmod(0)
    assert f"{tmp_path}/x.txt cannot be read: Permission denied" in refused(path=str(tmp_path)).given


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    files = scan(SourceConfig(path=str(tmp_path)), print)
    (tmp_path / "x.txt").unlink()
    with pytest.raises(UserError, match=r"x\.txt cannot be read: No such file"):
        list(Source(files).documents())
