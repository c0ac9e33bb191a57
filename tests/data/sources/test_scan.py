"""From files to documents: exact text, a stable order, and a name for everything that is wrong."""

import gzip
import json
import os

import pytest
import zstandard

from windlass.data.config import SourceConfig
from windlass.data.sources.scan import check_kinds, scan
from windlass.data.sources.source_files import source_of_files
from windlass.errors import UserError


def read(lines=None, **source):
    config = SourceConfig(**source)
    return list(source_of_files(config, scan(config, (lines if lines is not None else []).append)).documents())


def refused(**source):
    with pytest.raises(UserError) as caught:
        read(**source)
    return caught.value


def test_a_directory_is_every_text_file_below_it_sorted_with_exact_bytes(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, data in {
        "b/z.md": b"last\r\n",
        "a.txt": "\ufefffirst \U0001fa9d".encode(),
        "b/empty.py": b"",
        "b/lines.jsonl": b'{"text": "one\\n"}\n\n{"text": ""}\n{"text": "two"}',
        ".hidden": b"no",
        ".git/config": b"no",
        "picture.png": b"\x89PNG\0\0",
    }.items():
        (tmp_path / name).write_bytes(data)
    said = []
    assert read(said, path=str(tmp_path)) == ["\ufefffirst \U0001fa9d", "one\n", "two", "last\r\n"]
    assert said == [f"left out 1 binary files of {tmp_path}: picture.png"]


def test_a_linked_folder_is_read_and_one_that_leads_back_is_not(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("there")
    (tmp_path / "here" / "in").mkdir(parents=True)
    (tmp_path / "here" / "a.txt").write_text("here")
    (tmp_path / "here" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "here" / "in" / "back").symlink_to(tmp_path / "here")
    found = scan(SourceConfig(path=str(tmp_path / "here")), print)
    assert [file.name for file in found] == ["a.txt", "more/b.txt"]


def test_globs_lists_and_files_are_read_once_each(tmp_path):
    for name in ("one.py", "sub/two.py", "sub/deep/three.py", "sub/four.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(path=f"{tmp_path}/**/*.py") == ["one.py", "sub/deep/three.py", "sub/two.py"]
    paths = [f"{tmp_path}/sub/four.txt", f"{tmp_path}/sub", f"{tmp_path}/*"]
    assert read(path=paths) == ["sub/four.txt", "sub/deep/three.py", "sub/two.py", "one.py"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("bracket")
    (tmp_path / "a1.txt").write_text("one")
    assert read(path=f"{tmp_path}/a[1].txt") == ["bracket"]


def test_the_embedded_corpus_is_the_standard_library_without_its_tests():
    files = scan(SourceConfig(builtin="python-stdlib"), print)
    names = [file.name for file in files]
    assert names == sorted(names) and {"json/decoder.py", "argparse.py"} <= set(names)
    assert not [
        name
        for name in names
        if name.startswith("test/") or "/tests/" in name or "site-packages" in name or "_sysconfigdata" in name
    ]
    assert 4_000_000 < sum(file.num_bytes for file in files) < 20_000_000


def test_no_match_names_the_nearest_folder_and_name(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text("x")
    error = refused(path=f"{tmp_path}/corpus/test.txt")
    assert "matches no file" in error.given
    assert (
        f"did you mean `{tmp_path}/corpus/text.txt`?" in error.change
        and f"{tmp_path}/corpus; it holds 1 entries" in error.change
    )
    error = refused(path=f"{tmp_path}/corpus/no/such/**/*.md")
    assert f"nearest existing folder is {tmp_path}/corpus;" in error.change
    (tmp_path / "empty").mkdir()
    assert "matches no file" in refused(path=str(tmp_path / "empty")).given


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json"])
def test_a_saved_dataset_is_named_and_not_read_as_texts(tmp_path, name):
    (tmp_path / name).write_text("{}")
    error = refused(path=str(tmp_path))
    assert (
        error.given == f"`path: {tmp_path}` holds a saved dataset"
        and error.change == f"write `hub: {tmp_path}` for `path`"
    )


def test_binary_files_are_refused_when_named_and_when_alone(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\x1f\x8b\0\0")
    assert "is a binary file" in refused(path=str(tmp_path / "x.bin")).given
    assert "holds only binary files" in refused(path=str(tmp_path)).given


@pytest.mark.parametrize("name", ["b.jsonl", "b.NDJSON", "b.jsonl.gz", "b.jsonl.zst", "b.json"])
@pytest.mark.parametrize("data", [b"\0" * 100, '{"text": "b"}'.encode("utf-16")], ids=["zeros", "utf-16"])
def test_a_file_of_rows_with_bytes_that_are_no_text_is_never_left_out(tmp_path, name, data):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "c.pyc").write_bytes(b"\0")
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get((tmp_path / name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(data))
    for path in (str(tmp_path), f"{tmp_path}/*", [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.*"]):
        error = refused(path=path)
        assert error.given == f"{tmp_path}/{name} is a binary file (it holds NUL bytes)"
        assert "convert it to UTF-8" in error.change
    (tmp_path / name).unlink()
    assert read(path=str(tmp_path)) == ["a"]


def test_of_binary_files_left_out_the_first_are_named_and_each_is_counted_once(tmp_path):
    (tmp_path / "text.txt").write_text("x")
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(b"\0")
    said = []
    assert read(said, path=[str(tmp_path), f"{tmp_path}/*.png"]) == ["x"]
    assert said == [f"left out 5 binary files of {tmp_path}, {tmp_path}/*.png: 0.png, 1.png, 2.png, ..."]


def test_a_file_is_read_once_however_it_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.jsonl").write_text('{"text": "x"}')
    (tmp_path / "link.jsonl").symlink_to("c/x.jsonl")
    (tmp_path / "folder").symlink_to("c")
    file = tmp_path / "c" / "x.jsonl"
    spellings = [
        "c/x.jsonl",
        str(file),
        "c/../c/*.jsonl",
        "link.jsonl",
        "folder",
        f"file://{file}",
        f"file://{tmp_path}/c",
    ]
    for turn in range(len(spellings)):
        turned = spellings[turn:] + spellings[:turn]
        files = scan(SourceConfig(path=turned), print)
        assert files == scan(SourceConfig(path=turned[0]), print), "known as it is by its first spelling alone"
    assert len(scan(SourceConfig(path=["c", "link.jsonl"]), print)) == 1
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "text.txt").write_text("x")
    assert len(scan(SourceConfig(path=["./*.[ct][sx][vt]", str(tmp_path / "rows.csv")]), print)) == 2, "named outright"


def test_a_link_of_another_kind_does_not_hide_the_rows(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "row"}')
    (tmp_path / "current").symlink_to("x.jsonl")
    assert read(path=str(tmp_path)) == ['{"text": "row"}', "row"]


def test_files_of_rows_among_texts_are_refused_wherever_they_were_not_named(tmp_path):
    for name in ("a.txt", "b.txt", "1.csv", "2.csv.gz", "sub/3.tsv", "4.json", "5.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        rows = b"text\nline\n" if "sv" in name else b'{"text": "line"}'
        (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith(".gz") else rows)
    for given in ({"path": str(tmp_path)}, {"path": f"{tmp_path}/**/*"}, {"path": str(tmp_path), "text": "text"}):
        error = refused(**given)
        names = ", ".join(f"{tmp_path}/{name}" for name in ("1.csv", "2.csv.gz", "4.json"))
        assert error.given == f"4 of 7 files ({names}, ...) hold rows, and others are plain texts"
        assert "by a glob (**/*.txt) to leave these files out" in error.change
    error = refused(path=[f"file://{tmp_path}/*.csv", f"{tmp_path}/a.txt"])
    assert error.given == f"1 of 2 files (file://{tmp_path}/1.csv) holds rows, and others are plain texts"
    text = '{"text": "line"}'
    assert read(path=[f"{tmp_path}/1.csv", f"{tmp_path}/*.txt"]) == ["line", text, text]
    assert len(scan(SourceConfig(path=[f"{tmp_path}/a.txt", f"file://{tmp_path}/4.json"]), print)) == 2
    assert read(path=[f"{tmp_path}/[1245].*", f"{tmp_path}/sub"]) == ["line"] * 5, "rows of every kind alone"


def test_a_pipe_is_named_as_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "pine.txt").write_text("x")
    error = refused(path=f"{tmp_path}/pipe.txt")
    assert (
        error.given == f"`path: {tmp_path}/pipe.txt` is neither a file nor a directory" and "to a file" in error.change
    )
    assert read(path=str(tmp_path)) == ["x"]


def test_not_utf8_names_file_byte_and_offset(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ole")
    assert refused(path=str(tmp_path)).given == f"{tmp_path}/latin.txt is not UTF-8: byte 0xe9 at offset 3"
    (tmp_path / "latin.txt").unlink()
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    assert refused(path=str(tmp_path)).given == f"{tmp_path}/x.jsonl:2 is not UTF-8: byte 0xe9 at offset 24"


@pytest.mark.parametrize(
    ("line", "given", "change"),
    [
        ('{"text": "a"', ":2 is not JSON", "fix or remove"),
        ('["a"]', ":2 is list, not an object", "fix or remove"),
        ('{"txt": "a", "id": 1}', ":2 has no key `text`", "did you mean `txt`? set `text` of the source to one"),
        ('{"text": 3}', ":2 has int under `text`", "holds text"),
        ('{"text": "\\ud800"}', ":2 holds half of a surrogate pair", "fix it"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, given, change):
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    error = refused(path=str(tmp_path / "x.jsonl"))
    assert f"{tmp_path}/x.jsonl{given}" in error.given and change in error.change


def test_text_names_the_key_and_is_refused_where_it_has_no_effect(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"transcript": "hello"}))
    assert read(path=str(tmp_path / "x.jsonl"), text="transcript") == ["hello"]
    (tmp_path / "y.txt").write_text("plain")
    assert "no such file" in refused(path=str(tmp_path / "y.txt"), text="transcript").rule


def refused_kinds(paths, outright=(), **source):
    with pytest.raises(UserError) as caught:
        check_kinds(SourceConfig(path="x", **source), paths, set(outright))
    return caught.value


def test_rows_in_other_ways_are_refused_unless_named_among_texts():
    assert refused_kinds(["a.txt", "s3://x/b.csv"]).given.startswith(
        "1 of 2 files (s3://x/b.csv) holds rows, and others"
    )
    check_kinds(SourceConfig(path="x"), ["b.csv", "c.json", "d.jsonl", "e.parquet"], set())
    check_kinds(SourceConfig(path="x"), ["a.txt", "b.csv"], {"b.csv"})


def test_settings_of_rows_need_files_of_rows():
    assert refused_kinds(["a.txt"], text="body").given == "`text: body` with x"
    assert refused_kinds(["a.jsonl", "a.txt"], format="chat").change == "name the files by a glob: chat/*.jsonl"
    check_kinds(SourceConfig(path="x", text="body"), ["a.jsonl", "a.txt"], set())


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*.txt"])
def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch, pattern):
    """os.walk and glob leave it out without a word: half of a corpus would be gone."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(name)
    scandir = os.scandir

    def refuse(path="."):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    error = refused(path=str(tmp_path / pattern))
    assert f"{tmp_path}/b cannot be listed: Permission denied" in error.given and "name the other files" in error.change
    assert read(path=str(tmp_path / "a*/*.txt")), "a folder that the pattern does not look into may be closed"
