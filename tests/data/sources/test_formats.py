"""Every format gives the same texts, packed or not, and what is wrong in it has a name and a row."""

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.data.conftest import refusal
from tests.data.sources.test_scan import read, refused
from windlass.data.config import SourceConfig
from windlass.data.sources.fetch import fetch
from windlass.data.sources.formats import binary_file, few, read_rows
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import Source
from windlass.errors import UserError

TEXTS = ["first \U0001fa9d\r\n", "", "second", "third\n\n"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def pack(data, end):
    if end.lower() == ".gz":
        return gzip.compress(data[:20]) + gzip.compress(data[20:])  # members one behind the other, as `cat` makes them
    if end == ".zst":
        compressor = zstandard.ZstdCompressor()
        return compressor.compress(data[:20]) + compressor.compress(data[20:])
    if end in (".xz", ".bz2"):
        kind = {".xz": lzma, ".bz2": bz2}[end]
        return kind.compress(data[:20]) + kind.compress(data[20:])
    return data


@pytest.mark.parametrize("end", ["", ".gz", ".zst", ".xz", ".bz2"])
def test_compressed_lines_and_texts_are_what_they_were(tmp_path, end):
    (tmp_path / f"a.jsonl{end}").write_bytes(pack(LINES, end))
    assert read(path=str(tmp_path)) == [text for text in TEXTS if text]
    (tmp_path / f"b.txt{end}").write_bytes(pack("one whole\r\ndocument Ω".encode() * 3, end))
    assert read(path=f"{tmp_path}/b.txt{end}") == ["one whole\r\ndocument Ω" * 3]


@pytest.mark.parametrize(
    "name", ["dump", "dump.gz", "DUMP.XZ", "dump.txt", "dump.txt.zst", "shard.00001.xz", "dump.v1.gz", "shard.aa"]
)
def test_lines_of_json_under_a_name_of_no_format_are_not_one_text(tmp_path, name):
    end = "." + name.rpartition(".")[2].lower()
    (tmp_path / name).write_bytes(pack(LINES, end))
    error = refused(path=f"{tmp_path}/{name}")
    assert error.given == f"{tmp_path}/{name} would be read as one text, and its lines are JSON objects"
    assert "`file_format: jsonl`" in error.change
    assert read(path=f"{tmp_path}/{name}", file_format="jsonl") == [text for text in TEXTS if text]
    assert read(path=f"{tmp_path}/{name}", file_format="text") == [LINES.decode()]


@pytest.mark.parametrize(
    ("name", "text"),
    [("notes", '{"a": 1}\n'), ("notes", '{"a": 1}\nnot JSON\n'), ("notes", "{\n}\n"), ("a.log", '{"a": 1}\n{"b": 2}\n')]
    + [("notes", "[1]\n[2]\n"), ("notes", '\n{"a": 1}\n{"b": 2}')],
)
def test_a_text_that_begins_with_a_brace_stays_one(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read(path=f"{tmp_path}/{name}") == [text]


@pytest.mark.parametrize("name", ["a.ndjson", "A.JSONL", "a.ldjson", "a.geojsonl", "a.jsonl.GZ"])
def test_lines_are_lines_by_any_of_their_names(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(LINES) if name.endswith("GZ") else LINES)
    assert read(path=str(tmp_path)) == [text for text in TEXTS if text]


def test_a_byte_order_mark_before_lines_is_none_of_them(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert read(path=str(tmp_path)) == [text for text in TEXTS if text]


def test_every_compression_of_one_directory_is_read(tmp_path):
    for end in ("", ".gz", ".zst", ".xz", ".bz2"):
        (tmp_path / f"a.jsonl{end}").write_bytes(pack(json.dumps({"text": f"rows of {end}"}).encode() + b"\n", end))
    assert read(path=str(tmp_path)) == [f"rows of {end}" for end in ("", ".bz2", ".gz", ".xz", ".zst")]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("b.jsonl.lz4", ".lz4"),
        ("b.ndjson.zip", ".zip"),
        ("b.json.br", ".br"),
        ("b.csv.7z", ".7z"),
        ("B.JSONL.Z", ".z"),
        ("b.parquet.gz", ".gz"),
        ("b.jsonl.gzip", ".gzip"),
        ("b.jsonl.tar.gz", ".tar.gz"),
        ("b.jsonl.gz.gz", ".gz.gz"),
    ],
)
def test_rows_in_another_compression_are_refused_by_name_and_not_left_out(tmp_path, name, end):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / name).write_bytes(b"\x04\x22\x4d\x18\0\0")
    error = refused(path=str(tmp_path))
    assert error.given == f"{tmp_path}/{name} holds rows in the compression {end}"
    assert ".gz, .zst, .xz, .bz2" in error.rule and error.change == "unpack it, or compress it as one of these"


@pytest.mark.parametrize("name", ["b.jsonl_xz", "b.ndjson-xz", "b.jsonl (1)", "b.jsonlines#gz"])
def test_bytes_behind_json_lines_are_refused_without_a_dot_too(tmp_path, name):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / name).write_bytes(pack(LINES, ".xz") + b"\0")
    assert refused(path=str(tmp_path)).given == f"{tmp_path}/{name} is a binary file (it holds NUL bytes)"


@pytest.mark.parametrize("end", [".zz", ".tbz2", ".bz", ".gz.1", ".gz.part", ".deflate", ".gz.bak"])
def test_bytes_behind_a_name_of_rows_are_refused_whatever_it_ends_in(tmp_path, end):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    for name in (f"b.jsonl{end}", f"b.csv{end}", f"b.parquet{end}"):
        (tmp_path / name).write_bytes(b"\x1f\x8b\0\0packed")
        assert refused(path=str(tmp_path)).given == f"{tmp_path}/{name} is a binary file (it holds NUL bytes)"
        (tmp_path / name).unlink()
    (tmp_path / f"b{end}").write_bytes(b"\0")
    assert len(read(path=str(tmp_path))) == len([text for text in TEXTS if text]), "no rows: left out as binary"


@pytest.mark.parametrize("left", ["-20260101", ".2026-01-01", " (1)", "_copy", ".aa", ".v2", ".txt", " ", ".", ".gz.1"])
def test_json_lines_end_as_such_or_are_refused(tmp_path, left):
    """As logrotate, split, browsers and Windows name what they leave: 81 of 175 documents came of it, one of them all rows."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    for name, data in ((f"b.jsonl{left}", LINES), (f"b.ndjson{left}.gz", pack(LINES, ".gz"))):
        (tmp_path / name).write_bytes(data)
        error = refused(path=str(tmp_path))
        assert error.given == f"{tmp_path}/{name} ends in {left}, and would be read as one text"
        (tmp_path / name).unlink()


@pytest.mark.parametrize("left", [".1", ".bak", ".part", "~", ".old~", "-20260101", " (2)", " copy", " - copy"])
def test_rows_as_text_behind_a_name_that_goes_on_are_not_read_as_one_text(tmp_path, left):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    for name, data in ((f"b.jsonl{left}", LINES), (f"b.csv{left}.gz", pack(LINES, ".gz"))):
        (tmp_path / name).write_bytes(data)
        error = refused(path=str(tmp_path))
        assert error.given == f"{tmp_path}/{name} ends in {left}, and would be read as one text"
        assert error.change == "rename it, set `file_format` of the source, or leave the file out by a glob"
        (tmp_path / name).unlink()
    (tmp_path / f"b.jsonl{left}").write_bytes(LINES)
    assert read(path=str(tmp_path), file_format="jsonl") == 2 * [text for text in TEXTS if text], (
        "format overrules names"
    )
    assert len(read(path=str(tmp_path / "*.jsonl"))) == len([text for text in TEXTS if text])
    (tmp_path / "notes").mkdir()
    for name in (f"notes{left}", "a.json.tmpl", "release-1.2", "a.csv.md", "a.json5", "old.jsonl.d/a"):
        (tmp_path / "notes" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "notes" / name).write_text("a text")
    assert read(path=str(tmp_path / "notes")) == ["a text"] * 6


@pytest.mark.parametrize("name", ["a.jsonlines", "a.jl", "a.jsonlines.gz"])
def test_json_lines_have_other_names_too(tmp_path, name):
    (tmp_path / name).write_bytes(pack(LINES, ".gz" if name.endswith(".gz") else ""))
    assert read(path=str(tmp_path)) == [text for text in TEXTS if text]


@pytest.mark.parametrize("end", [".gz", ".zst", ".xz", ".bz2"])
def test_compressed_json_is_lines(tmp_path, end):
    """As C4 and Dolma name theirs."""
    (tmp_path / f"c4-train.00000.json{end}").write_bytes(pack(LINES, end))
    assert read(path=str(tmp_path)) == [text for text in TEXTS if text]
    (tmp_path / f"c4-train.00000.json{end}").write_bytes(pack(b"[" + LINES.strip().replace(b"\n", b",") + b"]", end))
    assert read(path=str(tmp_path)) == [text for text in TEXTS if text], "or an array"


@pytest.mark.parametrize(
    ("kind", "name"), [("jsonl", "a.json"), ("jsonl", "a.data"), ("jsonl", "a.txt.gz"), ("text", "a.jsonl")]
)
def test_file_format_overrules_the_name(tmp_path, kind, name):
    (tmp_path / name).write_bytes(pack(LINES, ".gz" if name.endswith(".gz") else ""))
    wanted = [text for text in TEXTS if text] if kind == "jsonl" else [LINES.decode()]
    assert read(path=str(tmp_path), file_format=kind) == wanted


def test_parquet_under_another_name_is_read(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "part-0000")
    assert read(path=str(tmp_path), file_format="parquet") == ["one", "two"]


def test_a_file_format_under_the_name_of_a_row_format_has_a_message_of_its_own():
    assert (
        "format=ndjson: `format` says what a row is, and this is what a file is; set file_format=jsonl in its place"
    ) in refusal(SourceConfig, {"path": "a", "format": "ndjson"})
    assert (
        "file_format=text without path: it says how files of `path` are read, and has no effect without them; remove file_format"
    ) in refusal(SourceConfig, {"builtin": "python-stdlib", "file_format": "text"})


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.zst"])
def test_a_row_that_is_too_large_is_refused_by_line(tmp_path, name):
    end = name[name.rindex(".") :] if name.endswith(("gz", "zst")) else ""
    large = "x" * ((1 << 20) + (1 if "txt" in name else -10))
    rows = (large if "txt" in name else LINES.decode() + json.dumps({"text": large}) + "\n").encode()
    (tmp_path / name).write_bytes(pack(rows, end))
    assert large in read(path=str(tmp_path)), "below the default"
    error = refused(path=str(tmp_path), max_row_mib=1)
    assert error.given == f"{tmp_path}/{name}{':5' if 'jsonl' in name else ''} is a row of more than 1 MiB"
    assert error.change.startswith("raise `max_row_mib` of the source")


@pytest.mark.parametrize("name", ["rows.json", "rows.csv", "rows.tsv.gz", "rows.csv.xz"])
def test_rows_among_texts_are_refused_unless_they_are_named(tmp_path, name):
    rows = b'{"text": "row"}' if "json" in name else b"text\nrow\n"
    (tmp_path / name).write_bytes(pack(rows, name[-3:]))
    assert read(path=str(tmp_path)) == ["row"]
    (tmp_path / "b.txt").write_text("text")
    assert refused(path=str(tmp_path)).given.startswith(f"1 of 2 files ({tmp_path}/{name}) holds rows, and others are")
    assert read(path=[str(tmp_path / "b.txt"), str(tmp_path / name)]) == ["text", "row"]


def test_lines_that_json_cannot_hold_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}")
    assert "a.jsonl:1 is not JSON: maximum recursion depth" in refused(path=str(tmp_path)).given


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert refused(path=str(tmp_path)).given.endswith("has several columns of one name: text, text")


def write_parquet(path, texts, column="text", **settings):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), column: texts}), path, **settings)


def test_parquet_is_read_row_by_row_over_row_groups(tmp_path):
    texts = [f"document {number}" for number in range(1000)]
    write_parquet(tmp_path / "a.parquet", texts, "body", row_group_size=300)
    assert read(path=str(tmp_path), text="body") == texts
    assert read(path=str(tmp_path), text="body", rows="290:310") == texts[290:310]


def test_a_column_that_is_not_there_is_named_with_the_nearest(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x"], "txt")
    error = refused(path=str(tmp_path / "a.parquet"))
    assert error.given == f"{tmp_path}/a.parquet has no column `text`"
    assert error.change == "did you mean `txt`? set `text` of the source to one of its columns: id, txt"


def test_a_row_without_text_is_named_by_its_number(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["x", None])
    assert refused(path=str(tmp_path)).given == f"{tmp_path}/a.parquet, row 2, has nothing under `text`"


def damaged_page(path):
    """A Parquet file with one byte of its first page wrong."""
    write_parquet(path, [f"document {number} " * 9 for number in range(200)], compression="zstd")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_damaged_page_of_parquet_is_named(tmp_path, scheme):
    damaged_page(tmp_path / "a.parquet")
    with pytest.raises(UserError) as caught:
        config = SourceConfig(path=f"{scheme}{tmp_path}")
        files = scan(config, print)
        list(Source(fetch(config, files, tmp_path / "here", print) if scheme else files).documents())
    assert caught.value.given.startswith(f"{scheme}{tmp_path}/a.parquet cannot be read as Parquet: ")
    assert caught.value.change == "bring the file again"


class Failing(io.BytesIO):
    """A file of a store that fails at its second read."""

    num_reads = 0

    def read(self, size=-1):
        self.num_reads += 1
        if self.num_reads > 1:
            raise OSError("403: Forbidden")
        return super().read(size)


def test_a_store_that_fails_is_no_damaged_parquet():
    stream = io.BytesIO()
    write_parquet(stream, [str(number) * 99 for number in range(9000)])
    with pytest.raises(OSError, match="403"):
        list(read_rows(Failing(stream.getvalue()), "a.parquet", "text"))


def test_the_longest_window_of_zstandard_is_read(tmp_path):
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, hash_log=10, chain_log=10)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # which says no size: the window stays
    (tmp_path / "a.jsonl.zst").write_bytes(frame.compress(LINES) + frame.flush())
    with pytest.raises(zstandard.ZstdError, match="too much memory"):
        zstandard.ZstdDecompressor().decompressobj().decompress((tmp_path / "a.jsonl.zst").read_bytes())
    assert read(path=str(tmp_path)) == [text for text in TEXTS if text]


def test_what_is_no_parquet_is_named(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 or so")
    assert f"{tmp_path}/a.parquet cannot be read as Parquet" in refused(path=str(tmp_path)).given


@pytest.mark.parametrize(("end", "name"), [(".gz", "gzip"), (".zst", "zstandard"), (".GZ", "gzip")])
def test_a_damaged_file_is_an_error_and_never_a_shorter_corpus(tmp_path, end, name):
    whole = pack(LINES * 2000, end)
    for data in (whole[: len(whole) * 2 // 3], b"no such thing" * 10):
        (tmp_path / f"a.jsonl{end}").write_bytes(data)
        error = refused(path=str(tmp_path))
        assert f"a.jsonl{end} cannot be unpacked as {name}: " in error.given and "bring the file again" in error.change


def test_rows_count_empty_ones_and_documents_count_texts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES + b"\n" + LINES)  # a blank line is no row
    assert read(path=str(tmp_path), rows="1:3") == ["second"]
    assert read(path=str(tmp_path), rows="3:") == [TEXTS[3], TEXTS[0], TEXTS[2], TEXTS[3]]
    assert read(path=str(tmp_path), documents=2) == [TEXTS[0], TEXTS[2]]
    assert read(path=str(tmp_path), rows="2:6", documents=3) == [TEXTS[2], TEXTS[3], TEXTS[0]]


def test_a_compressed_file_that_changes_is_an_error(tmp_path):
    def write(path, text):
        stream = io.BytesIO()
        write_parquet(stream, [text])
        line = json.dumps({"text": text}).encode()
        path.write_bytes(stream.getvalue() if path.suffix == ".parquet" else gzip.compress(line))

    for name in ("a.jsonl.gz", "b.parquet"):
        write(tmp_path / name, "before")
        files = scan(SourceConfig(path=str(tmp_path / name)), print)
        write(tmp_path / name, "after!")
        with pytest.raises(UserError, match="changed while it was being prepared"):
            list(Source(files).documents())


def test_the_first_names_are_reported():
    assert few([]) == "" and few("abc") == "a, b, c" and few("abcd") == "a, b, c, ..."


def test_a_binary_file_is_named():
    assert binary_file(Path("a.jsonl")).given == "a.jsonl is a binary file (it holds NUL bytes)"
