"""status.json: written whole, read back, and nothing where there is none."""

import errno
import json
import os
import time
from pathlib import Path

import pytest

from windlass.status import FILE, LOCK, note_failure, read_status, write_status
from windlass.training.run_directory import hold


def test_a_status_is_read_as_it_was_written_and_replaced_whole(tmp_path):
    before_s = time.time()
    write_status(tmp_path, "running", 3, None)
    first, inode = read_status(tmp_path), (tmp_path / FILE).stat().st_ino
    assert (first.state, first.step, first.exit_code) == ("running", 3, None)
    assert before_s <= first.time <= time.time()
    with open(tmp_path / FILE, "rb") as reader:
        write_status(tmp_path, "stopped", 4, 75)
        assert b'"running"' in reader.read(), "who reads the old one still reads all of it"
    second = read_status(tmp_path)
    assert (second.state, second.step, second.exit_code) == ("stopped", 4, 75)
    assert (tmp_path / FILE).stat().st_ino != inode and os.listdir(tmp_path) == [FILE]


WRONG = [{"state": "\x1b[2J"}, {"step": "\x1b[2J"}, {"exit_code": "0"}, {"time": "now"}, {"step": True}]
WHOLE = {"state": "running", "step": 1, "exit_code": None, "time": 1.5}


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "{}", '{"state": "running"}', "[" * 100_000, *(json.dumps(WHOLE | one) for one in WRONG)],
)
def test_without_a_status_of_ours_there_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / FILE).write_text(content)
    assert read_status(tmp_path) is None


def test_on_a_full_disk_the_new_status_is_written_over_the_old_one(tmp_path, monkeypatch):
    def full(self, _content):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_status(tmp_path, "finished", 123_456_789, 0)
    inode = (tmp_path / FILE).stat().st_ino
    monkeypatch.setattr(Path, "write_bytes", full)
    write_status(tmp_path, "failed", 5, 74)
    found = read_status(tmp_path)
    assert (found.state, found.step, found.exit_code) == ("failed", 5, 74)
    assert (tmp_path / FILE).stat().st_ino == inode and os.listdir(tmp_path) == [FILE]
    write_status(tmp_path / "deleted", "failed", 5, 74)
    assert not (tmp_path / "deleted").exists()


@pytest.mark.parametrize(("code", "is_noted"), [(1, True), (5, True), (74, True), (137, True), (2, False), (75, False)])
def test_a_start_that_failed_before_its_loop_is_noted_where_the_run_had_begun(tmp_path, code, is_noted):
    note_failure(tmp_path, code)
    assert os.listdir(tmp_path) == [], "a run that never began has no status"
    write_status(tmp_path, "finished", 4, 0)
    note_failure(tmp_path, code)
    found = read_status(tmp_path)
    assert (found.state, found.step, found.exit_code) == (("failed", 4, code) if is_noted else ("finished", 4, 0))


def test_the_status_of_a_run_that_another_process_holds_is_its_own(tmp_path):
    write_status(tmp_path, "running", 4, None)
    with hold(tmp_path):
        note_failure(tmp_path, 74)
    assert read_status(tmp_path).state == "running" and (tmp_path / LOCK).exists()
