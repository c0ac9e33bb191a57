"""One run writes to a run directory at a time; every rank refuses alike."""

import errno
import fcntl
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests import tiny
from tests.hall.test_runtime import runtime_over
from windlass.checkpoint.commit import quarantined
from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.supervise.beside import Hosts, Watch
from windlass.supervise.heartbeat import LastBeat, read_beats
from windlass.training import run_directory
from windlass.training.preflight import make_ready
from windlass.training.run_directory import (
    _run_id,
    check_saved_is_there,
    hold,
    open_checkpoints,
    open_heartbeat,
    watched,
)


def refusal(ranks, world, work, config):
    """What each rank says."""
    each = ranks.run(world, work, config)
    assert not (config.run.directory / "events.jsonl").is_file(), "nothing was begun"
    return each


def without_locks(config):
    """`tiny.refusal` on a file system that knows no locks (NFS mounted so)."""
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        return tiny.refusal(config)


def test_a_run_directory_in_use_is_refused_by_every_rank(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    config.run.directory.mkdir()
    with hold(config.run.directory):
        with pytest.raises(BlockingIOError):
            hold(config.run.directory)
        for world in (1, 2):
            for said in refusal(ranks, world, tiny.refusal, config):
                assert "is in use by another process" in said


def test_a_run_directory_that_cannot_be_locked_is_refused_by_every_rank(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    make_ready(config, 2, "cpu")
    for said in refusal(ranks, 2, without_locks, config):
        assert "cannot be locked: No locks available" in said and "file system with locks" in said


def test_a_run_directory_below_a_file_is_refused(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    (said,) = refusal(ranks, 1, tiny.refusal, tiny.recipe(tmp_path, run={"directory": str(tmp_path / "file" / "run")}))
    assert f"{tmp_path}/file is a file" in said


@pytest.mark.parametrize(
    ("name", "says"), [("/proc/run", "cannot be made: "), ("closed", "cannot be written to by this user")]
)
def test_a_run_directory_that_cannot_be_used_is_refused_before_data_is_prepared(tmp_path, monkeypatch, name, says):
    (closed := tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # root may write anywhere
    directory = tmp_path / name  # what begins with / stays as it is
    config = tiny.recipe(tmp_path / "work", run={"directory": str(directory)})
    with pytest.raises(UserError, match="a directory to write to") as caught:
        make_ready(config, 1, "cpu")
    assert caught.value.given.startswith(f"run.directory={directory} {says}")
    assert not Path(config.data.directory).exists()


def test_a_directory_that_was_tried_leaves_nothing(tmp_path):
    (tmp_path / "kept").mkdir()
    for directory in (tmp_path / "a" / "b" / "run", tmp_path / "kept"):
        run_directory.try_run_directory(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("name", [".lock", "status.json", "run.json", "events.jsonl", "recipe.yaml", "resolved.yaml"])
def test_a_pipe_with_the_name_of_a_file_of_the_run_is_refused(ranks, tmp_path, name):
    config = tiny.recipe(tmp_path)
    config.run.directory.mkdir()
    os.mkfifo(config.run.directory / name)
    for world in (1, 2):
        for said in refusal(ranks, world, tiny.refusal, config):
            assert (
                f"{config.run.directory / name} is no regular file" in said and f"remove {config.run.directory}" in said
            )


def test_a_directory_with_the_name_of_a_file_of_the_run_is_refused(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    (config.run.directory / "events.jsonl").mkdir(parents=True)
    (said,) = refusal(ranks, 1, tiny.refusal, config)
    assert f"{config.run.directory}/events.jsonl is a directory" in said


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run_id": 7}', b'{"run_id": "../x"}', b"\xff"])
def test_a_damaged_run_json_is_replaced_and_the_run_goes_on(tmp_path, content):
    file, said = tmp_path / "run.json", []
    file.write_bytes(content)
    run_id = _run_id(file, said.append)
    assert len(run_id) == 16 and json.loads(file.read_text()) == {"run_id": run_id}
    assert len(said) == 1 and said[0].startswith(f"{file} is damaged: the run has a new id")
    assert _run_id(file, pytest.fail) == run_id


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
    monkeypatch.setattr(run_directory, "watched_beside", lambda watch: found.append(watch) or nullcontext())
    for name in ("WINDLASS_AGENT_PID", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def run(rank=0, hosts=("a", "a"), store="store", is_seen=True, stall_s=5.0, **data):
        """`hosts`: the memory in which each rank has its page."""
        pages = [
            LastBeat(os.getpid(), one, 0, 0, 0.0, "start") for one, host in enumerate(hosts) if host == hosts[rank]
        ]
        monkeypatch.setattr(run_directory, "read_beats", lambda _: pages)
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
    monkeypatch.setattr(run_directory.sys, "stdin", SimpleNamespace(isatty=lambda: False))
    assert started(hosts=["a"]) is not None
    monkeypatch.setattr(run_directory.sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert started(hosts=["a"]) is None


def no_checkpoints(config, path):
    with pytest.raises(UserError) as caught:
        open_checkpoints(config, runtime_over(path), print, None)
    return str(caught.value)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    events = config.run.directory / "events.jsonl"
    make_ready(config, 1, "cpu")
    log = EventLog(events)
    for kind, step in (("start", 0), ("step", 1), ("checkpoint", 3), ("step", 4), ("checkpoint", 6)):
        log.write(kind, step, {})
    before, prepared = events.read_bytes(), (Path(config.data.directory) / "prepared.json").read_bytes()
    (Path(config.data.sources[0].path) / "more.txt").write_text("A new text, which would be prepared. " * 50)
    for said in (*ranks.run(1, tiny.refusal, config), *ranks.run(2, no_checkpoints, config, str(tmp_path / "store"))):
        assert f"{config.run.directory} has saved step 6, by its events.jsonl, and " in said
        assert "is their storage mounted" in said and "another run.directory" in said
    assert events.read_bytes() == before and not (config.run.directory / "checkpoints").exists()
    assert (Path(config.data.directory) / "prepared.json").read_bytes() == prepared, "its data is still the lost run's"


def test_a_run_that_saved_nothing_or_whose_checkpoints_were_put_aside_begins(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    check_saved_is_there(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"kind": "step", "step": 3}\n{"kind": "checkpoint", "st')
    check_saved_is_there(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"kind": "checkpoint", "step": 3}\n')
    with pytest.raises(UserError, match="has saved step 3"):
        check_saved_is_there(tmp_path)
    checkpoints.mkdir()
    with pytest.raises(UserError, match="has saved step 3"):
        check_saved_is_there(tmp_path)
    (checkpoints / "step-00000003.corrupt").mkdir()
    assert quarantined(checkpoints)
    check_saved_is_there(tmp_path)
