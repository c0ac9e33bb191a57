"""Trackio's own reader finds what events.jsonl has, as one run over resumes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from windlass.report.events import EventLog

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="the extra trackio is not installed: pip install trackio"
)
READER = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps({name: SQLiteStorage.get_logs("windlass", name) for name in SQLiteStorage.get_runs("windlass")}))
"""


def make_run(directory, run_id):
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run_id": run_id}))
    return EventLog(directory / "events.jsonl")


def test_a_run_and_its_resume_are_one_curve_beside_another_of_its_name(tmp_path):
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "kept"), "HOME": str(tmp_path)}

    def sync(run):
        command = [sys.executable, "-m", "windlass", "sync", str(run), "--to", "trackio"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    log = make_run(tmp_path / "a" / "mine", "0123456789abcdef")
    log.write("step", 1, {"loss": 4.0, "mfu": None})
    log.write("step", 2, {"loss": 2.0})
    assert sync(tmp_path / "a" / "mine") == "trackio: 2 lines sent\n"
    log.write("step", 2, {"loss": 9.0})  # again, after a resume
    log.write("step", 3, {"loss": 1.0})
    assert sync(tmp_path / "a" / "mine") == "trackio: 1 lines sent\n"
    make_run(tmp_path / "b" / "mine", "fedcba9876543210").write("step", 1, {"loss": 5.0})
    sync(tmp_path / "b" / "mine")
    command = [sys.executable, "-c", READER]
    read = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    runs = json.loads(read.stdout)
    found = {name: [(line["step"], line["train/loss"]) for line in lines] for name, lines in runs.items()}
    assert found == {"mine-01234567": [(1, 4.0), (2, 2.0), (3, 1.0)], "mine-fedcba98": [(1, 5.0)]}
