"""Processes that hang in a known line, as ranks of a run in tmp_path."""

import subprocess
import sys

import pytest

from windlass.supervise.heartbeat import forget_beats

RANK = """
import sys, threading, time
from pathlib import Path
from windlass.supervise.heartbeat import Heartbeat, folder_of

def deepest(seconds):
    print(flush=True), time.sleep(seconds)  # one line, so that it is this one from the first word on

def another_thread():
    time.sleep(600)

threading.Thread(target=another_thread, daemon=True).start()
with Heartbeat(folder_of(Path(sys.argv[1])), int(sys.argv[2]), lambda: sys.argv[3]) as beat:
    beat.beat("data", 4)
    deepest(600)
"""


@pytest.fixture
def ranks(tmp_path):
    """start(collectives): a process that is rank 0, 1, ... of a run in tmp_path, or `rank`, and hangs in `deepest`."""
    started = []

    def start(collectives="[]", rank=None):
        number = len(started) if rank is None else rank
        command = [sys.executable, "-c", RANK, str(tmp_path), str(number), collectives]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1].pid

    yield start
    for process in started:
        process.kill()
        process.communicate()
    forget_beats(tmp_path)
