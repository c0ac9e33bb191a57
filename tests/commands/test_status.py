"""What became of a run: its status file, and whether somebody holds the lock on its directory."""

import fcntl
import os
import time

import pytest

from windlass.commands.status import status
from windlass.errors import UserError
from windlass.status import LOCK, is_locked, write_status
from windlass.training.run_directory import hold


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("state", "code", "line"),
    [
        ("finished", 0, "finished at step 6"),
        ("stopped", 75, "stopped at step 6; the same command goes on from step 4"),
        ("failed", 74, "stopped at step 6: data or storage failed (74); the same command goes on from step 4"),
        ("failed", 4, "failed at step 6 with exit code 4; its newest checkpoint: 4"),
        ("running", None, "dead: killed at step 6 or later; the same command goes on from step 4"),
    ],
)
def test_a_run_that_nobody_holds_is_what_its_status_says_or_dead(run, state, code, line):
    write_status(run, state, 6, code)
    found = status(run)
    assert found.line == line and (found.step, found.exit_code, found.checkpoint) == (6, code, 4)
    assert found.state == ("dead" if state == "running" else state)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    write_status(tmp_path, "running", 2, None)
    assert status(tmp_path).line == "dead: killed at step 2 or later; the same command goes on from its beginning"


def test_a_run_that_failed_before_its_first_checkpoint_has_none(tmp_path):
    write_status(tmp_path, "failed", 2, 4)
    assert status(tmp_path).line == "failed at step 2 with exit code 4; its newest checkpoint: none"


@pytest.mark.parametrize("earlier", [None, "stopped", "running"])
def test_a_run_whose_directory_is_held_is_running_whatever_an_earlier_one_left(run, earlier):
    if earlier:
        write_status(run, earlier, 6, None)
    lock = hold(run)
    try:
        found = status(run)
        assert (found.state, found.step) == ("running", 6 if earlier else 0)
        assert found.line.startswith(f"running: at step {found.step} ") and found.line.endswith(" ago")
    finally:
        lock.close()
    assert not is_locked(run)


def test_looking_does_not_keep_a_run_from_starting(run, monkeypatch):
    """Someone looks at the very moment in which a run takes the lock, and is done while that waits."""
    looker = (run / LOCK).open("wb")
    fcntl.flock(looker, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: looker.close())
    hold(run).close()
    with pytest.raises(BlockingIOError):
        _twice(run)


def _twice(run):
    first = hold(run)
    try:
        hold(run)
    finally:
        first.close()


@pytest.mark.parametrize("place", [".", "absent"])
def test_a_directory_without_a_run_is_refused(tmp_path, place):
    with pytest.raises(UserError) as caught:
        status(tmp_path / place)
    assert (
        caught.value.given == f"{tmp_path / place} holds no status of a run" and "run.directory" in caught.value.change
    )
    assert os.listdir(tmp_path) == []
