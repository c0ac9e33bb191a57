"""One run writes to a run directory at a time; every rank refuses alike."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from tests import tiny
from windlass.errors import UserError
from windlass.training import run_directory
from windlass.training.preflight import make_ready
from windlass.training.run_directory import hold


def refusal(ranks, world, work, config):
    """What each rank says."""
    each = ranks.run(world, work, config)
    assert not (config.run.directory / "events.jsonl").is_file(), "nothing was begun"
    return each


def without_locks(config):
    """`tiny.refusal` on a file system that knows no locks (NFS mounted so)."""
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        return tiny.refusal(config)


def when_free_at_first(config):
    """`tiny.refusal` where the lock is taken between the first look, before data is prepared, and the second."""
    with mock.patch.object(run_directory, "is_locked", return_value=False):
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
        assert not Path(config.data.directory).exists(), "refused before data is prepared"


def test_two_runs_that_both_find_the_directory_free_do_not_both_train(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    config.run.directory.mkdir()
    with hold(config.run.directory):
        for said in refusal(ranks, 2, when_free_at_first, config):
            assert "is in use by another process" in said
    assert Path(config.data.directory).exists()


def test_a_lock_that_is_free_after_a_moment_is_no_other_run(tmp_path, monkeypatch):
    """`windlass status` holds it while it looks, and a rank that ends until it has."""
    looked = hold(tmp_path)
    monkeypatch.setattr(run_directory.time, "sleep", lambda _: looked.close())
    run_directory.try_run_directory(tmp_path)
    assert looked.closed


def test_a_run_directory_that_cannot_be_locked_is_refused_by_every_rank(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    make_ready(config, 2, "cpu")
    for is_there in (False, True):
        assert (config.run.directory / ".lock").exists() == is_there
        for said in refusal(ranks, 2, without_locks, config):
            assert f"{config.run.directory} cannot be locked: No locks available" in said
            assert "file system with locks" in said
        assert Path(config.data.directory).exists() != is_there, (
            "before data is prepared, where there is a file to lock"
        )
        shutil.rmtree(config.data.directory, ignore_errors=True)


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
            assert f"{config.run.directory / name} is no regular file" in said
            assert f"remove {config.run.directory}" in said
    assert not Path(config.data.directory).exists()


def test_a_directory_with_the_name_of_a_file_of_the_run_is_refused(ranks, tmp_path):
    config = tiny.recipe(tmp_path)
    (config.run.directory / "events.jsonl").mkdir(parents=True)
    (said,) = refusal(ranks, 1, tiny.refusal, config)
    assert f"{config.run.directory}/events.jsonl is a directory" in said
