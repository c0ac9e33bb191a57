"""One run writes to a run directory at a time; every rank refuses alike."""

import errno
import fcntl
from unittest import mock

import pytest

from tests import tiny
from windlass.training.preflight import make_ready
from windlass.training.run_directory import hold


def refusal(ranks, world, work, config):
    """What each rank says."""
    each = ranks.run(world, work, config)
    assert not (config.run.directory / "events.jsonl").exists(), "nothing was begun"
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
