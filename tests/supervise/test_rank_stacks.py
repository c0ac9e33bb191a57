"""Where ranks are, asked of real processes that hang in known places."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.supervise.hanging import ranks  # noqa: F401
from windlass.supervise.heartbeat import LastBeat, read_beats
from windlass.supervise.rank_stacks import Collective, RankStack, find_stacks, main_frames

COLLECTIVES = [["0", 12, "gloo:all_reduce", False], ["1", 3, "gloo:broadcast", True]]


def test_the_line_of_every_rank_is_found_twice_and_the_process_goes_on(ranks, tmp_path):  # noqa: F811
    pids = [ranks(json.dumps(COLLECTIVES)), ranks()]
    for _ in range(2):  # the second answer is not the first
        first, second = find_stacks(tmp_path, read_beats(tmp_path), wait_s=30)
        assert first.frames[:2] == ("<string>:7 deepest", "<string>:15 <module>") == second.frames[:2]
        assert first.collectives == tuple(Collective(*one) for one in COLLECTIVES) and second.collectives == ()
        assert [stack.beat.pid for stack in (first, second)] == pids and first.memory_gib > 0 and not first.state
    assert "at <string>:7 deepest\n  last collective: number 12 of group 0, gloo:all_reduce, not done" in first.text()
    assert first.text().startswith("rank 0: step 4, data for ")


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    while "T (stopped)" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)


def test_a_stopped_rank_is_said_to_be_stopped_and_a_dead_one_is_left_out(ranks, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    stopped, dead = ranks(), ranks()
    assert all(stack.frames for stack in find_stacks(tmp_path, read_beats(tmp_path), wait_s=30))
    stop(stopped)
    os.kill(dead, signal.SIGKILL)
    while read_beats(tmp_path)[1].is_alive:
        time.sleep(0.01)
    (stack,) = find_stacks(tmp_path, read_beats(tmp_path), wait_s=0.1)
    assert (stack.beat.pid, stack.state, stack.line, stack.frames) == (stopped, *["stopped (SIGSTOP)"] * 2, ())


def test_the_line_of_a_stopped_rank_is_read_from_outside(ranks, tmp_path):  # noqa: F811
    """By py-spy, which the lock has."""
    stop(ranks())
    (stack,) = find_stacks(tmp_path, read_beats(tmp_path), wait_s=0.1)
    assert stack.frames == ("<string>:7 deepest", "<string>:15 <module>")
    assert stack.line == "stopped (SIGSTOP); <string>:7 deepest"


@pytest.mark.parametrize("answer", ["exit 1", "echo no json", "echo []", "echo '[{}]'"])
def test_a_py_spy_that_may_not_read_changes_nothing(ranks, tmp_path, monkeypatch, answer):  # noqa: F811
    (program := tmp_path / "py-spy").write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: str(program))
    stop(ranks())
    (stack,) = find_stacks(tmp_path, read_beats(tmp_path), wait_s=0.1)
    assert (stack.line, stack.frames) == ("stopped (SIGSTOP)", ())


def test_the_main_thread_is_the_last_one_of_a_dump():
    dump = (
        'Thread 0x01 [loader] (most recent call first):\n  File "/x/y/queue.py", line 3 in get\n\n'
        'Current thread 0x02 [python] (most recent call first):\n  File "/a/b/torch/distributed/d.py", line 9 in all_reduce\n'
        '  File "/s/windlass/optim/clip.py", line 4 in clip_gradients\n  Garbage\n\n'
    )
    frames = main_frames(dump)
    assert frames == ("torch/distributed/d.py:9 all_reduce", "windlass/optim/clip.py:4 clip_gradients")
    beat = LastBeat(1, 0, 2, 0, 0.0, "step")
    assert RankStack(beat, 1.0, frames).line == " <- ".join(frames), "torch's line, and ours that led there"
    assert RankStack(beat, 1.0, frames[1:]).line == frames[1] and RankStack(beat, 1.0).line == "no answer"
    assert main_frames("") == ()
