"""status.json: written whole, read back, and nothing where there is none."""

import json
import os
import time

import pytest

from windlass.status import FILE, read_status, write_status


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
