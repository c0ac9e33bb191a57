"""Cores: those of the affinity, or fewer where a cgroup has a quota."""

import os

import pytest

from windlass.data.tokenize.cores import usable_cores


@pytest.mark.parametrize(
    ("own", "quotas", "found"),
    [
        ("0::/job/step\n", {"job": "max 100000"}, 8),
        ("0::/job/step\n", {"job/step": "250000 100000"}, 3),
        ("0::/job/step\n", {"job": "400000 100000", "job/step": "max 100000"}, 4),
        ("0::/\n", {"": "50000 100000"}, 1),
        ("12:cpu:/job\n", {"job": "100000 100000"}, 8),
    ],
)
def test_the_least_of_affinity_and_quotas(tmp_path, monkeypatch, own, quotas, found):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(own)
    groups = tmp_path / "sys" / "fs" / "cgroup"
    (groups / "job" / "step").mkdir(parents=True)
    for name, text in quotas.items():
        (groups / name / "cpu.max").write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert usable_cores(tmp_path) == found
    assert usable_cores(tmp_path / "absent") == 8
