"""Columns: Parquet and Arrow give the same rows, whole or nested, and what is wrong has a name."""

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from tests.data.sources.test_scan import read, refused
from tests.data.sources.test_text_rows import judged

TEXTS = [f"document {number}" if number % 9 else "" for number in range(1000)]
GOOD = [text for text in TEXTS if text]


def write(path, table):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=300)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path, chunksize=300)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)


@pytest.mark.parametrize("end", ["arrow", "feather", "parquet"])
def test_a_column_and_a_nested_one_of_each(tmp_path, end):
    held = [{"lang": "en", "more": {"text": text}} for text in TEXTS]
    write(tmp_path / f"a.{end}", pyarrow.table({"id": range(1000), "text": TEXTS, "meta": held, "a.b": TEXTS}))
    for key in ("text", "meta.more.text", "a.b"):
        assert read(path=str(tmp_path), text=key) == GOOD, key
    assert read(path=str(tmp_path), rows="290:310") == [text for text in TEXTS[290:310] if text]
    error = refused(path=str(tmp_path), text="meta.more.txt")
    assert error.given == f"{tmp_path}/a.{end} has no column `meta.more.txt`" and "id, text, meta, a.b" in error.change


@pytest.mark.parametrize("end", ["arrow", "parquet"])
def test_a_null_on_the_way_is_a_null(tmp_path, end):
    table = pyarrow.table({"meta": pyarrow.array([{"text": "a"}, None, {"text": None}, {"text": "b"}])})
    write(tmp_path / f"a.{end}", table)
    texts, bad = judged(tmp_path / f"a.{end}", text="meta.text")
    assert texts == ["a", "b"]
    assert bad == [("null", f", row {number}, has nothing under `meta.text`") for number in (2, 3)]


def test_what_datasets_wrote_is_read_by_its_file(tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    assert read(path=str(tmp_path / "saved" / "*.arrow")) == GOOD


@pytest.mark.parametrize("end", ["arrow", "feather"])
def test_a_damaged_or_cut_file_of_arrow_is_named(tmp_path, end):
    write(tmp_path / f"a.{end}", pyarrow.table({"text": TEXTS}))
    whole = (tmp_path / f"a.{end}").read_bytes()
    for data in (whole[: len(whole) // 2], b"no such thing"):
        (tmp_path / f"a.{end}").write_bytes(data)
        assert f"a.{end} cannot be read as Arrow: " in refused(path=str(tmp_path)).given
