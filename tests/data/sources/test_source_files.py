"""Documents of local files: an exact slice of what was scanned, or an error that names the file."""

import gzip
import json
import os
import random

import pytest

from tests.data.sources.test_scan import refused
from windlass.data import verified_file
from windlass.data.config import SourceConfig
from windlass.data.sources import formats, source_files
from windlass.data.sources.bad_rows import BadRow
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import Source, all_source_rows, chunks_of, file_at, is_remote, names_below
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


@pytest.fixture
def small_chunks(monkeypatch):
    """Blocks of 64 bytes, chunks of 128."""
    for room in (verified_file, formats, source_files):
        monkeypatch.setattr(room, "BLOCK_BYTES", 64)
    monkeypatch.setattr(formats, "CHUNK_BLOCKS", 2)
    monkeypatch.setattr(formats, "MIB", 100)


def read_in_chunks(files):
    """The rows of every chunk."""
    return [list(all_source_rows(chunk)) for chunk in chunks_of(files)]


@pytest.mark.parametrize("last", ["\n", ""])
@pytest.mark.parametrize("seed", range(8))
def test_lines_in_chunks_are_the_lines_whatever_border_cuts_them(tmp_path, small_chunks, seed, last):
    """Long and short lines, blank ones, bad ones, and lines that end where a chunk does. Bad rows name the same line."""
    draw, lines, size = random.Random(seed), ["\ufeff" + json.dumps({"text": "first"})], 21
    for _ in range(120):
        kinds = [
            "{" * draw.randint(1, 40),
            "",
            '{"text": null}',
            json.dumps({"text": "x" * draw.choice([0, 3, 60, 300])}),
        ]
        line = draw.choice([*kinds, kinds[-1], kinds[-1]])
        room = 128 - (size + 13) % 128
        if draw.random() < 0.3:
            line = json.dumps(
                {"text": "e" * room}
            )  # its line end is the last byte of a chunk, or the first of the next
            line = line[:-2] + "e" * draw.randint(0, 1) + line[-2:]
        lines.append(line)
        size += len(line.encode()) + 1
    path = tmp_path / "x.jsonl"
    path.write_bytes(("\n".join(lines) + last).encode() + b'{"text": "\xff"}' * (seed % 2))
    files = scan(SourceConfig(path=str(path)), print)
    whole, chunks = list(all_source_rows(files)), read_in_chunks(files)
    assert len(chunks) == -(-path.stat().st_size // 128) > 20
    assert [row for chunk in chunks for row in chunk] == whole and any(isinstance(row, BadRow) for row in whole)


def test_row_groups_in_chunks_are_the_table(tmp_path, small_chunks):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    texts = [None if number % 7 == 0 else f"{number} " * 9 for number in range(50)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", row_group_size=4)
    files = scan(SourceConfig(path=str(tmp_path / "x.parquet")), print)
    chunks = read_in_chunks(files)
    assert len(chunks) > 3 and [row for chunk in chunks for row in chunk] == list(all_source_rows(files))
    assert [row.given.split(",")[1] for chunk in chunks for row in chunk if isinstance(row, BadRow)][:3] == [
        " row 1", " row 8", " row 15",
    ]  # fmt: skip


def test_what_cannot_be_cut_is_whole_and_small_files_come_together(tmp_path, small_chunks, monkeypatch):
    line = json.dumps({"text": "x" * 50}) + "\n"
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "b.jsonl").write_text(line * 9)
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(line * 99 + "".join(json.dumps({"text": f"{random.random()}"}) + "\n" for _ in range(99)))
    for name in ("d", "e", "f"):
        (tmp_path / f"{name}.jsonl").write_text(line)
    files = scan(SourceConfig(path=str(tmp_path)), print)
    names = [[(file.name, file.span is None) for file in chunk] for chunk in chunks_of(files)]
    cut = [[("b.jsonl", False)]] * -(-9 * len(line) // 128)
    small = [("d.jsonl", True), ("e.jsonl", True)], [("f.jsonl", True)]
    assert names == [[("a.jsonl", True)], *cut, [("c.jsonl.gz", True)], *map(list, small)]
    monkeypatch.setattr(formats, "CHUNK_BLOCKS", 4)
    assert [[file.name for file in chunk] for chunk in chunks_of(files)][-1] == ["d.jsonl", "e.jsonl", "f.jsonl"]
    assert [row for chunk in read_in_chunks(files) for row in chunk] == list(all_source_rows(files))


def test_a_chunk_of_a_file_that_changed_is_an_error_and_the_others_are_not(tmp_path, small_chunks):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number:040}"}) + "\n" for number in range(40)))
    files = scan(SourceConfig(path=str(path), max_row_mib=1), print)
    chunks = list(chunks_of([file._replace(max_row_bytes=100) for file in files]))
    data = path.read_bytes()
    path.write_bytes(data[:1000] + b"\n" + data[1001:])
    found = []
    for number, chunk in enumerate(chunks):
        try:
            list(all_source_rows(chunk))
        except UserError as error:
            assert "changed while it was being prepared" in error.given
            found.append(number)
    assert 1000 // 128 in found and len(found) < 3


def test_a_row_beyond_its_limit_is_named_by_its_line_in_any_chunk(tmp_path, small_chunks):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 30 + json.dumps({"text": "x" * 2000}) + '\n{"text": "b"}\n')
    files = [file._replace(max_row_bytes=1000) for file in scan(SourceConfig(path=str(path)), print)]
    with pytest.raises(UserError, match=r"x\.jsonl:31 is a row of more than"):
        read_in_chunks(files)
