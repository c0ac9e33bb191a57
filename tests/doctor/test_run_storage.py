"""The directory of a run."""

import fcntl
import os

import pytest

from windlass.doctor import run_storage
from windlass.doctor.run_storage import Directory, check_run_storage, probe
from windlass.units import GIB, MIB


def test_a_directory_that_is_not_there_is_probed_at_its_parent_and_left_empty(tmp_path):
    found = probe(tmp_path / "runs" / "mine", 2 * MIB)
    assert found.path == tmp_path and found.has_locks and found.bytes_per_s > 0 and abs(found.skew_s) < 1
    assert 0 < found.free < 1 << 60 and list(tmp_path.iterdir()) == []


def test_locks_that_fail_and_a_server_with_another_clock_are_seen(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(
        os, "utime", lambda file, set_time=os.utime: set_time(file, (0.0, run_storage.time.time() - 90))
    )
    found = probe(tmp_path, MIB)
    assert not found.has_locks and 89 < found.skew_s < 91


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({}, None, ""),
        ({"free": 30 * GIB - 1}, "disk-full-soon", "3 checkpoints of 10.0 GiB take 30.0 GiB"),
        ({"free": 30 * GIB}, None, ""),
        ({"bytes_per_s": 8 * MIB}, "disk-slow", "takes 21 minutes"),
        ({"has_locks": False}, "no-locks", "flock fails"),
        ({"skew_s": -2.5}, "clock-differs", "-2.5 s"),
        ({"skew_s": 0.9}, None, ""),
    ],
)
def test_what_is_bad(changes, name, said):
    from pathlib import Path

    good = Directory(Path("/runs"), 100 * GIB, 500 * MIB, True, 0.01)
    found = list(check_run_storage(good._replace(**changes), 10 * GIB, 3))
    assert [one.name for one in found] == [name] * (name is not None) and all(said in one.found for one in found)
