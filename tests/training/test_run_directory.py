"""One run writes to a run directory at a time; every rank refuses alike."""

import errno
import fcntl
import json
import os
from unittest import mock

import pytest

from tests import tiny
from windlass.supervise.heartbeat import read_beats
from windlass.training.preflight import make_ready
from windlass.training.run_directory import _run_id, hold, open_heartbeat


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


def test_a_run_directory_that_cannot_be_made_is_refused(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    (said,) = refusal(ranks, 1, tiny.refusal, tiny.recipe(tmp_path, run={"directory": str(tmp_path / "file" / "run")}))
    assert f"{tmp_path}/file is a file" in said or "cannot be made" in said


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


@pytest.mark.parametrize("signals", [True, False])
def test_a_rank_is_seen_only_where_it_may_be_signalled(tmp_path, signals):
    with open_heartbeat(tmp_path, signals) as beat:
        beat.beat("data", 1)
        assert len(read_beats(tmp_path)) == signals
