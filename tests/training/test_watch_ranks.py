"""Who may be asked for its stack, and which rank starts the process that looks after its host's."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests import tiny
from windlass.supervise.beside import Hosts, Watch
from windlass.supervise.heartbeat import LastBeat, read_beats
from windlass.training import watch_ranks
from windlass.training.watch_ranks import open_heartbeat, watched

HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_rank_is_seen_only_where_it_may_be_signalled(tmp_path, is_seen):
    with open_heartbeat(tmp_path, is_seen) as beat:
        beat.beat("data", 1)
        assert len(read_beats(tmp_path)) == is_seen


@pytest.fixture
def started(tmp_path, monkeypatch):
    """started(...): what the process beside a rank is given, None where there is none."""
    found = []
    monkeypatch.setattr(watch_ranks, "watched_beside", lambda watch: found.append(watch) or nullcontext())
    for name in ("WINDLASS_AGENT_PID", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(rank=0, hosts=("a", "a"), store="store", is_seen=True, stall_s=5.0, **data):
        """`hosts`: the memory in which each rank has its page."""
        pages = [
            LastBeat(os.getpid(), one, 0, 0, 0.0, "start") for one, host in enumerate(hosts) if host == hosts[rank]
        ]
        monkeypatch.setattr(watch_ranks, "read_beats", lambda _: pages)
        firsts = [hosts.index(host) for host in hosts]
        given = {"rank": rank, "world": len(hosts), "store": store, "address": ("a", 29500)}
        runtime = SimpleNamespace(
            **given, gathered=lambda own: firsts if own == firsts[rank] else [], shared=lambda name: "name"
        )
        config = tiny.recipe(tmp_path, launch={"stall_s": stall_s}, data=data)
        found.clear()
        with watched(config, runtime, is_seen):
            return found[0] if found else None

    run.directory = str((tmp_path / "run").resolve())
    return run


def test_the_first_rank_of_each_host_starts_one_where_no_launcher_of_ours_does(started, monkeypatch):
    watch = started()
    assert watch == Watch(started.directory, 5.0, 605.0) and os.path.basename(watch.run_directory) == "run"
    assert started(1) is None
    assert started(0, HOSTS).hosts == Hosts("a", 29500, "name", 2, 0)
    assert started(2, HOSTS).hosts == Hosts("a", 29500, "name", 2, 1)
    assert [started(rank, HOSTS) for rank in (1, 3)] == [None, None]
    assert started(stall_s=0.0) is None and started(store=None) is None and started(is_seen=False) is None
    monkeypatch.setenv("WINDLASS_AGENT_PID", "7")
    assert started() is None


def test_a_preparation_beside_the_run_has_a_deadline_of_its_own(started):
    assert started(order={"first_epoch": "written"}).data_s == float("inf")


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"])
def test_one_process_is_watched_where_somebody_starts_it_again_and_nobody_sits_before_it(started, monkeypatch, name):
    assert started(hosts=["a"]) is None
    monkeypatch.setenv(name, "7")
    monkeypatch.setattr(watch_ranks.sys, "stdin", SimpleNamespace(isatty=lambda: False))
    assert started(hosts=["a"]) is not None
    monkeypatch.setattr(watch_ranks.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert started(hosts=["a"]) is None
