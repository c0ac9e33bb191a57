"""From files to documents: exact text, a stable order, and a name for everything that is wrong."""

import json
import os

import pytest

from windlass.data.config import SourceConfig
from windlass.data.sources import documents, scan
from windlass.errors import UserError


def read(lines=None, **source):
    return list(documents(scan(SourceConfig(**source), (lines if lines is not None else []).append)))


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
    assert said == [f"left out 1 binary files of {tmp_path}"]


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
    assert "did you mean `text.txt`?" in error.change and f"{tmp_path}/corpus; it holds 1 entries" in error.change
    error = refused(path=f"{tmp_path}/corpus/no/such/**/*.md")
    assert f"nearest existing folder is {tmp_path}/corpus;" in error.change
    (tmp_path / "empty").mkdir()
    assert "matches no file" in refused(path=str(tmp_path / "empty")).given


def test_binary_files_are_refused_when_named_and_when_alone(tmp_path):
    (tmp_path / "x.gz").write_bytes(b"\x1f\x8b\0\0")
    assert "is a binary file" in refused(path=str(tmp_path / "x.gz")).given
    assert "holds only binary files" in refused(path=str(tmp_path)).given


def test_not_utf8_names_file_byte_and_offset(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ole")
    assert refused(path=str(tmp_path)).given == f"{tmp_path}/latin.txt is not UTF-8: byte 0xe9 at offset 3"
    (tmp_path / "latin.txt").unlink()
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    assert refused(path=str(tmp_path)).given == f"{tmp_path}/x.jsonl:2 is not UTF-8: byte 0xe9 at offset 24"


@pytest.mark.parametrize(
    ("line", "given", "change"),
    [
        ('{"text": "a"', ":2 is not JSON", "mend or remove"),
        ('["a"]', ":2 is list, not an object", "mend or remove"),
        ('{"txt": "a", "id": 1}', ":2 has no key `text`", "did you mean `txt`? set `text` of the source to one"),
        ('{"text": 3}', ":2 has int under `text`", "holds text"),
        ('{"text": "\\ud800"}', ":2 holds half of a surrogate pair", "mend it"),
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


def test_a_file_that_changes_between_hash_and_reading_is_an_error(tmp_path):
    for name, before, after in (("x.txt", "before", "after!"), ("x.jsonl", '{"text": "a"}', '{"text": "b"}')):
        (tmp_path / name).write_text(before)
        files = scan(SourceConfig(path=str(tmp_path / name)), print)
        (tmp_path / name).write_text(after)
        with pytest.raises(UserError, match="changed while it was being prepared"):
            list(documents(files))


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
        list(documents(files))
