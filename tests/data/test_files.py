"""A file is whole under its name or not there."""

import os

import pytest

from windlass.data.files import write_durably


def test_a_write_that_fails_leaves_the_old_file_and_one_that_ends_replaces_it(tmp_path, monkeypatch):
    path, synced = tmp_path / "a", []
    write_durably(path, b"old")

    def fails(descriptor):
        assert path.read_bytes() == b"old", "nothing has its name before it is on disk"
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, "fsync", fails)
        write_durably(path, b"new")
    assert path.read_bytes() == b"old"
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), fsync(descriptor)))
    write_durably(path, b"new", memoryview(b"er"))
    assert path.read_bytes() == b"newer" and [found.name for found in tmp_path.iterdir()] == ["a"]
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino], "the file before its name, then the name"
