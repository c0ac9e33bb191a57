"""A rank's page: what is written is what is read, from any process, and only while it may be believed."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from windlass.supervise import heartbeat
from windlass.supervise.heartbeat import (
    Heartbeat,
    LastBeat,
    folder_of,
    forget_beats,
    leave_page,
    process_state,
    read_beats,
)
from windlass.supervise.rank_stacks import find_stacks


@pytest.fixture
def run(tmp_path, monkeypatch):
    yield tmp_path
    forget_beats(tmp_path)


def test_a_rank_writes_where_it_is_and_anybody_reads_it(run):
    before_s = time.monotonic()
    with Heartbeat(folder_of(run), 3) as first, Heartbeat(folder_of(run), 1) as second:
        first.beat("data", 7)
        first.beat("step", position=64)
        second.beat("checkpoint", 7)
        late, early = read_beats(run)[::-1]
        assert (
            late[:4] == (os.getpid(), 3, 7, 64) and late.phase == "step" and before_s <= late.time_s <= time.monotonic()
        )
        assert early[:4] == (os.getpid(), 1, 7, 0) and early.phase == "checkpoint" and early.is_alive
        assert late.progress > LastBeat(1, 1, 7, 0, 0.0, "data").progress > early.progress
        assert early.progress > LastBeat(1, 1, 6, 0, 0.0, "step").progress
    assert not read_beats(run) and not folder_of(run).exists(), "a run that ended well leaves nothing"


def test_a_rank_measures_the_longest_of_each_of_its_phases(run, monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: 1000.0)
    with Heartbeat(folder_of(run), 0) as rank:
        for phase, took_s in (("data", 0.25), ("step", 2.0), ("data", 0.125), ("step", 3.0), ("update", 9.0)):
            monkeypatch.setattr(heartbeat.time, "monotonic", lambda now_s=now_s: now_s)
            rank.beat(phase)
            now_s += took_s
        (found,) = read_beats(run)
    longest_s = dict(zip(heartbeat.PHASES, found.longest_s, strict=True))
    assert {phase: round(s, 6) for phase, s in longest_s.items() if s} == {"data": 0.25, "step": 3.0}, "ended ones"


def test_what_a_rank_that_failed_was_doing_stays_for_the_launcher(run):
    for is_watched in (False, True):
        assert not read_beats(run), "of one without a launcher nothing stays"
        with pytest.raises(ZeroDivisionError), Heartbeat(folder_of(run), 0, is_watched=is_watched) as beat:
            beat.beat("data", 2)
            raise ZeroDivisionError
    (left,) = read_beats(run)
    assert (left.step, left.phase, left.is_alive) == (2, "data", False), (
        "this process lives, and takes no signal for it"
    )
    forget_beats(run)
    assert not read_beats(run)


def test_of_a_process_that_ends_at_once_the_page_says_that_it_has_left(run):
    other = subprocess.Popen(["sleep", "600"])
    try:
        with Heartbeat(folder_of(run), 0), Heartbeat(folder_of(run), 1) as beat:
            pages = [folder_of(run) / f"rank-{rank:06d}.page" for rank in (0, 1)]
            pages[0].write_bytes(other.pid.to_bytes(8, "little") + pages[0].read_bytes()[8:])
            beat.beat("step", 4)
            leave_page(run)
            theirs, own = read_beats(run)
            assert (theirs.pid, theirs.is_alive) == (other.pid, True), "another rank is not spoken for"
            assert (own.pid, own.is_alive, own.step, own.phase) == (0, False, 4, "step")
    finally:
        other.kill()
        other.wait()


def test_a_rank_that_is_watched_can_be_asked_where_it_is_until_its_process_has_left(run):
    code = f"""
import sys, threading
from pathlib import Path
from windlass.supervise.heartbeat import Heartbeat, folder_of
with Heartbeat(folder_of(Path({str(run)!r})), 0, is_watched=True) as beat:
    beat.beat("data", 9)
print(flush=True), sys.stdin.read()
"""
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    rank.stdout.readline()
    (left,) = read_beats(run)
    assert (left.step, left.phase, left.pid, left.is_alive) == (9, "end", rank.pid, True)
    (stack,) = find_stacks(run, [left], wait_s=60)
    assert stack.frames == ("<string>:7 <module>",)
    rank.communicate()
    assert rank.returncode == 0 and not read_beats(run)[0].is_alive
    forget_beats(run)
    assert not read_beats(run)


def test_two_runs_have_two_folders_and_one_run_has_one_whatever_it_is_called(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    assert folder_of(tmp_path / "link") == folder_of(tmp_path / "a") == folder_of(tmp_path.__class__("a"))
    assert folder_of(tmp_path / "b") != folder_of(tmp_path / "a")


def test_a_rank_trains_on_where_its_page_cannot_be_made(run, monkeypatch, tmp_path):
    file = tmp_path / "no-folder"
    file.write_text("")
    with Heartbeat(file, 0) as beat:  # as on a host whose /dev/shm is full, or not there
        beat.beat("data", 1)
    monkeypatch.setattr(heartbeat.os, "getuid", lambda: 12345)  # the folder is another user's
    with Heartbeat(folder_of(run), 0) as beat:
        beat.beat("data", 1)
        assert not read_beats(run)
    folder_of(run).rmdir()


def test_a_page_of_another_version_is_passed_over(run):
    with Heartbeat(folder_of(run), 0):
        (folder_of(run) / "rank-000001.page").write_bytes(b"short")
        (folder_of(run) / "rank-000002.page").write_bytes(b"\x7f" * 56)  # no such phase
        assert [beat.rank for beat in read_beats(run)] == [0]
    shutil.rmtree(folder_of(run))


def test_a_process_that_has_ended_is_not_alive_though_nobody_has_waited_for_it():
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid) == "Z" and not LastBeat(child.pid, 0, 0, 0, 0.0, "step").is_alive
    child.wait()
    assert process_state(child.pid) == "" and not LastBeat(child.pid, 0, 0, 0, 0.0, "step").is_alive
    assert process_state(os.getpid()) == "R"


def test_signals_are_as_before_once_the_run_is_over(run):
    before = signal.getsignal(heartbeat.STACK_SIGNAL)
    with Heartbeat(folder_of(run), 0):
        pass
    assert signal.getsignal(heartbeat.STACK_SIGNAL) == before


def test_a_command_beside_a_run_that_lives_takes_nothing_from_it(run):
    """Another `windlass train` there is refused by the lock, `evaluate` is not; neither may make the run invisible."""
    code = (
        "import sys; from pathlib import Path; from windlass.supervise.heartbeat import *\n"
        "run = Path(sys.argv[1]); forget_beats(run)\n"
        "with Heartbeat(folder_of(run), 0) as beat: beat.beat('checkpoint', 99)"
    )
    with Heartbeat(folder_of(run), 0) as beat:
        beat.beat("data", 7)
        subprocess.run([sys.executable, "-c", code, str(run)], check=True)
        (found,) = read_beats(run)
        assert (found.pid, found.step, found.phase) == (os.getpid(), 7, "data")
        beat.beat("step", 8)
        assert read_beats(run)[0].step == 8


def test_the_page_of_a_dead_rank_is_taken_over(run):
    with pytest.raises(ZeroDivisionError), Heartbeat(folder_of(run), 0, is_watched=True):
        raise ZeroDivisionError
    with Heartbeat(folder_of(run), 0) as beat:
        beat.beat("data", 3)
        assert read_beats(run)[0].step == 3 and read_beats(run)[0].is_alive
