"""The S3 server for tests ends with the process that started it, even where that is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STARTS = """
import sys, time
from pathlib import Path
from scripts.s3_server import s3_server
with s3_server(Path(sys.argv[1])) as (_, process):
    print(process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's death signal is Linux's")
def test_the_server_dies_with_a_killed_parent(tmp_path):
    pytest.importorskip("nanio")
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    end_s = time.monotonic() + 60
    while is_running(server) and time.monotonic() < end_s:
        time.sleep(0.05)
    running = is_running(server)
    if running:
        os.kill(server, signal.SIGKILL)
    assert not running


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
