"""A signal before the first step. In whole commands: tests/cli/test_launch.py, test_signal_fuzz.py and test_signalled.py."""

import os
import signal
import subprocess
import sys

import pytest

from windlass.errors import Interrupted
from windlass.signals import catch_signals
from windlass.supervise.heartbeat import forget_beats, read_beats
from windlass.training import interruptible as page
from windlass.training.interruptible import interruptible


@pytest.mark.parametrize(("steps", "code"), [([], 130), ([3], 75)])
def test_a_signal_ends_it_with_what_the_checkpoints_say(tmp_path, monkeypatch, steps, code):
    asked = []
    monkeypatch.setattr(page, "committed_steps", lambda place: asked.append(place) or steps)
    with catch_signals(), pytest.raises(Interrupted) as caught, interruptible(tmp_path):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal ends it")
    assert caught.value.code == code and asked == [tmp_path / "checkpoints"]


def test_without_a_handler_of_ours_a_ctrl_c_is_the_same(tmp_path):
    with pytest.raises(Interrupted) as caught, interruptible(tmp_path):
        raise KeyboardInterrupt
    assert caught.value.code == 130


WAITS_IN_C = """
import ctypes, signal, sys, threading
from pathlib import Path
from windlass import signals
from windlass.supervise.heartbeat import Heartbeat, folder_of
from windlass.training.interruptible import interruptible

signals.GRACE_S = 0.1
run = Path(sys.argv[1])
with signals.catch_signals(), interruptible(run), Heartbeat(folder_of(run), 1, is_watched=True):
    threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGTERM)).start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second waits for ever, and no signal ends it
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_rank_that_waits_in_c_ends_a_while_after_a_signal_and_is_not_taken_for_dead(tmp_path):
    environ = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", WAITS_IN_C, str(tmp_path)], env=environ, timeout=600)
    (left,) = read_beats(tmp_path)
    assert (done.returncode, left.pid, left.phase) == (130, 0, "start")
    forget_beats(tmp_path)
