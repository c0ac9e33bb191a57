"""A start reads the files that look changed, and no others."""

import json
import os

import pytest

from tests.data.conftest import data_config, write_corpus
from tests.data.prepare.test_prepare import quietly
from windlass.data.sources import known_hashes
from windlass.errors import UserError


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """Names of the files that are hashed, by any preparation of the test; the corpus is an hour old."""
    write_corpus(tmp_path / "corpus", num_documents=12)
    for path in (tmp_path / "corpus").rglob("*.txt"):
        os.utime(path, ns=(1, path.stat().st_mtime_ns - 3600 * 10**9))
    names, hash_file = [], known_hashes.hash_file

    def counted(path, name, text_key):
        names.append(name)
        return hash_file(path, name, text_key)

    monkeypatch.setattr(known_hashes, "hash_file", counted)
    return names


def test_an_unchanged_start_hashes_nothing_and_finds_the_same(hashed, tmp_path):
    first = quietly(data_config(tmp_path))
    assert len(hashed) == 12
    hashed.clear()
    assert quietly(data_config(tmp_path)) == first and hashed == []
    assert quietly(data_config(tmp_path, rehash=True)) == first and len(hashed) == 12, "--rehash"


@pytest.mark.parametrize("how", ["size", "time", "inode"])
def test_a_file_that_looks_changed_is_hashed_alone(hashed, tmp_path, how):
    first = quietly(data_config(tmp_path))
    path = tmp_path / "corpus" / "a" / "001.txt"
    status, text = path.stat(), path.read_bytes()
    hashed.clear()
    if how == "size":
        path.write_bytes(text + b" more")
    elif how == "time":
        path.write_bytes(b"z" * len(text))
    else:
        path.with_name("new").write_bytes(b"z" * len(text))
        os.replace(path.with_name("new"), path)
    if how != "time":
        os.utime(path, ns=(1, status.st_mtime_ns))
    second = quietly(data_config(tmp_path))
    assert set(hashed) == {"a/001.txt"} and second.fingerprint != first.fingerprint
    assert second.corpus_hash != first.corpus_hash


def test_hashes_are_kept_on_this_host_where_the_data_is_at_a_url(hashed, tmp_path):
    cache = {"directory": str(tmp_path / "cache")}
    places = {"directory": f"file://{tmp_path}/store", "cache": cache}
    first = quietly(data_config(tmp_path, **places))
    assert len(hashed) == 12
    hashed.clear()
    assert quietly(data_config(tmp_path, **places)).fingerprint == first.fingerprint and hashed == []
    path = tmp_path / "corpus" / "a" / "001.txt"
    path.write_bytes(path.read_bytes() + b" more")
    assert quietly(data_config(tmp_path, **places)).fingerprint != first.fingerprint
    assert set(hashed) == {"a/001.txt"}
    hashed.clear()
    quietly(data_config(tmp_path, **places, rehash=True))
    assert len(hashed) == 12, "--rehash"


def test_a_file_that_only_looks_changed_is_no_other_data(hashed, tmp_path):
    first = quietly(data_config(tmp_path))
    hashed.clear()
    os.utime(tmp_path / "corpus" / "a" / "001.txt", ns=(1, 10**18))
    lines = []
    assert quietly(data_config(tmp_path), lines=lines) == first and hashed == ["a/001.txt"]
    assert "unchanged: skipped" in lines[-1]
    hashed.clear()
    quietly(data_config(tmp_path))
    assert hashed == [], "its new time is kept"


def test_a_file_that_has_just_changed_and_hashes_that_are_damaged_are_not_trusted(hashed, tmp_path):
    (tmp_path / "corpus" / "a" / "001.txt").write_text("just written")
    first = quietly(data_config(tmp_path))
    kept = tmp_path / "data" / "sources.json"
    assert len(json.loads(kept.read_bytes())) == 11, "all but the new one"
    for damage in (b"{", b"[]", b'{"x": 1}'):
        kept.write_bytes(damage)
        hashed.clear()
        assert quietly(data_config(tmp_path)) == first and len(hashed) == 12


def test_a_file_that_changes_unseen_is_found_when_it_is_read(hashed, tmp_path):
    """Same size, time and inode: the data stays as it was prepared; with --rehash, or when it is read again, it is found."""
    quietly(data_config(tmp_path))
    path = tmp_path / "corpus" / "a" / "001.txt"
    status = path.stat()
    path.write_bytes(b"z" * status.st_size)
    os.utime(path, ns=(1, status.st_mtime_ns))
    with pytest.raises(UserError, match="changed while it was being prepared"):
        quietly(data_config(tmp_path, sequence_length=34))
    lines = []
    quietly(data_config(tmp_path, rehash=True), lines=lines)
    assert any("have changed since it was prepared" in line for line in lines)


def test_what_a_begun_preparation_knows_is_read_and_kept(hashed, tmp_path):
    path = tmp_path / "corpus" / "a" / "001.txt"
    begun = known_hashes.KnownHashes(tmp_path / "begun.json")
    file = begun.file(path, "001.txt", "text")
    begun.save()
    later = known_hashes.KnownHashes(tmp_path / "later.json", begun=tmp_path / "begun.json")
    assert later.file(path, "001.txt", "text") == file and hashed == ["001.txt"]
    later.save()
    assert (tmp_path / "later.json").read_bytes() == (tmp_path / "begun.json").read_bytes()
