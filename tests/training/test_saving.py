"""Between steps: when a checkpoint is due, and what a failed one does to the run."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests import tiny
from windlass.commands.status import status
from windlass.config import to_yaml
from windlass.proof.pool import RankFailed


def steps_of(directory):
    return sorted(int(path.name[5:]) for path in (directory / "checkpoints").glob("step-*"))


def test_checkpoints_are_kept_as_the_recipe_says(base, ranks):
    config = tiny.recipe(
        base,
        "kept",
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": 1, "keep_steps": [1, 4]},
        evaluate={"every_steps": 2},
    )
    ranks.run(2, tiny.train, config)
    lines = tiny.lines(config.run.directory)
    logged = [line for line in lines if line["kind"] == "checkpoint"]
    assert [line["step"] for line in logged] == [1, 2, 4, 6, 8, 10]
    assert all(line["bytes"] > 10_000 and line["stall_s"] >= 0 for line in logged)
    assert steps_of(config.run.directory) == [1, 4, 10], "the last, which is the best, and the two named"


def test_the_best_checkpoint_is_the_one_with_the_lowest_loss_of_its_own_step(base, ranks):
    """A rate that wrecks the model after a good start: the best is neither the first nor the last."""
    config = tiny.recipe(
        base,
        "best",
        optim={"learning_rate": 0.05, "schedule": "constant", "warmup_steps": 0, "max_norm": 100.0},
        evaluate={"every_steps": 2},
        checkpoint={"every_steps": 2, "keep_last": 1, "keep_best": 1, "keep_steps": [3]},
    )
    ranks.run(1, tiny.train, config)
    lines = tiny.lines(config.run.directory)
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "validation" and line["step"]}
    best = min(losses, key=losses.get)
    assert steps_of(config.run.directory) == sorted({3, best, 10})
    from windlass.checkpoint.keep import list_checkpoints

    metrics = {row.step: row.metric for row in list_checkpoints(config.run.directory)}
    assert metrics == {3: None, best: losses[best], 10: losses[10]}, "a loss belongs to the weights it was measured on"


def test_numbers_that_are_not_finite_end_neither_the_run_nor_its_checkpoints(base, ranks):
    config = tiny.recipe(base, "nan", optim={"learning_rate": 1e30, "schedule": "constant", "warmup_steps": 0})
    ranks.run(2, tiny.train, config)
    lines = tiny.lines(config.run.directory)
    assert "not finite: the update was skipped" in next(line["what"] for line in lines if line["kind"] == "incident")
    assert steps_of(config.run.directory)[-1] == tiny.STEPS


def test_minutes_are_judged_by_one_clock_on_logging_steps(base, ranks):
    config = tiny.recipe(
        base, "minutes", checkpoint={"every_steps": None, "every_minutes": 1e-6}, report={"every_steps": 4}
    )
    ranks.run(2, tiny.train, config)
    assert steps_of(config.run.directory) == [4, 8, 10]


def train_beside_a_clock(config, due_on):
    """Training whose ranks differ on whether it is time to save: it is on `due_on` alone."""
    from torch import distributed

    from windlass.checkpoint.checkpoints import Checkpoints

    original, own = Checkpoints.is_late, distributed.get_rank() == due_on
    Checkpoints.is_late = property(lambda _: own)
    try:
        return tiny.train(config)
    finally:
        Checkpoints.is_late = original


@pytest.mark.parametrize(("due_on", "steps"), [(0, [4, 8, 10]), (1, [10])])
def test_all_ranks_save_by_the_clock_of_rank_0(base, ranks, due_on, steps):
    every = {"every_steps": None, "every_minutes": 1e6}
    config = tiny.recipe(base, f"clock-of-{due_on}", checkpoint=every, report={"every_steps": 4})
    ranks.run(2, train_beside_a_clock, config, due_on)
    assert steps_of(config.run.directory) == steps


def fill_disk_after_first_save(config, free_again):
    """Training on a rank whose disk is full for every save after the first, or for one save only."""
    from windlass.checkpoint import commit

    original, calls = os.statvfs, []

    def statvfs(path):
        calls.append(path)
        if len(calls) == 1 or (free_again and len(calls) > 2):
            return original(path)
        found = original(path)
        return os.statvfs_result((*found[:3], 1, 1, *found[5:10]))

    commit.os.statvfs = statvfs
    try:
        return tiny.train(config)
    finally:
        commit.os.statvfs = original


def test_a_save_that_fails_is_reported_and_the_next_one_tries_again(base, ranks):
    config = tiny.recipe(base, "full-once", checkpoint={"async": False})
    ranks.run(1, fill_disk_after_first_save, config, True)
    lines = tiny.lines(config.run.directory)
    (incident,) = [line for line in lines if line["kind"] == "incident"]
    assert "the disk is full: a checkpoint needs" in incident["error"] and "are free in" in incident["error"]
    assert steps_of(config.run.directory)[-1] == tiny.STEPS


def test_one_process_survives_a_background_save_that_fails(base, ranks):
    config = tiny.recipe(base, "full-behind", checkpoint={"async": True})
    ranks.run(1, fill_disk_after_first_save, config, True)
    lines = tiny.lines(config.run.directory)
    assert "the disk is full" in next(line["error"] for line in lines if line["kind"] == "incident")
    assert steps_of(config.run.directory)[-1] == tiny.STEPS


def fill_disk_under_the_log(config, for_saves):
    """Training on a rank whose disk takes no line of events.jsonl at step 4, nor, `for_saves`, the save that is tried then."""
    from windlass.checkpoint import commit
    from windlass.report import events

    write, statvfs, state = events.EventLog.write, os.statvfs, {"step": 0}

    def open_or_not(*arguments, **more):
        if state["step"] == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open(*arguments, **more)

    def write_and_note(self, kind, step, fields):
        state["step"] = step
        write(self, kind, step, fields)

    def full(path):
        found = statvfs(path)
        return os.statvfs_result((*found[:3], 1, 1, *found[5:10])) if for_saves and state["step"] == 4 else found

    with (
        mock.patch.object(events, "open", open_or_not, create=True),
        mock.patch.object(events.EventLog, "write", write_and_note),
        mock.patch.object(commit.os, "statvfs", full),
    ):
        return tiny.train(config)


@pytest.mark.parametrize("for_saves", [False, True])
def test_where_the_disk_fills_under_the_log_one_save_is_tried_and_the_run_goes_on(base, ranks, for_saves):
    more = {"every_steps": 6, "every_minutes": None, "async": False}
    config = tiny.recipe(base, f"full-log-{for_saves}", checkpoint=more)
    (result,) = ranks.run(1, fill_disk_under_the_log, config, for_saves)
    lines = tiny.lines(config.run.directory)
    assert result["step"] == tiny.STEPS and [line["step"] for line in lines if line["kind"] == "step"] == [
        *range(1, 11)
    ]
    assert steps_of(config.run.directory) == ([6, 10] if for_saves else [4, 6, 10])
    incidents = [(line["step"], line["what"], line["error"]) for line in lines if line["kind"] == "incident"]
    assert len(incidents) == for_saves
    for step, what, error in incidents:
        assert (step, what) == (4, "checkpoint not saved")
        assert re.search(r"needs [\d.]+ [KM]iB, [\d.]+ (B|KiB) are free in /.*/checkpoints", error), error


@pytest.mark.long
def test_a_run_on_a_disk_that_is_really_full_saves_what_fits_and_ends_with_74(tmp_path):
    """A file system of 3 MiB; a neighbour takes what is left of it when step 4 is written, and leaves before the next start."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.getuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=False).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        config = tiny.recipe(tmp_path, "disk/run", checkpoint={"every_steps": 3, "async": False})
        (tmp_path / "recipe.yaml").write_text(to_yaml(config))
        done = subprocess.run(
            [sys.executable, "-c", FILLED, str(disk), str(tmp_path / "recipe.yaml")], capture_output=True, text=True
        )
        assert done.returncode == 74, done.stdout + done.stderr
        assert "the disk is full: a checkpoint needs" in done.stderr
        assert f"step {tiny.STEPS}/{tiny.STEPS} |" in done.stdout, "every step was trained"
        assert steps_of(config.run.directory) == [3] and not list((disk / "run" / "checkpoints").glob(".tmp-*"))
        assert status(config.run.directory).line == (
            f"stopped at step {tiny.STEPS}: data or storage failed (74); the same command goes on from step 3"
        )
        (disk / "neighbour").unlink()
        again = subprocess.run([sys.executable, "-m", "windlass", "train", str(tmp_path / "recipe.yaml")], check=False)
        assert again.returncode == 0 and steps_of(config.run.directory) == [3, 6, 9, 10]
        assert status(config.run.directory).line == f"finished at step {tiny.STEPS}"
        assert not list((disk / "run").glob(".report*")), "the page is larger than the disk"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


FILLED = """
import sys
from pathlib import Path
from windlass.report import events
from windlass.cli.main import main

disk, recipe = Path(sys.argv[1]), sys.argv[2]

def write(self, kind, step, fields, before=events.EventLog.write):
    if (kind, step) == ("step", 4):
        with open(disk / "neighbour", "wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(512))
                except OSError:
                    break
    before(self, kind, step, fields)

events.EventLog.write = write
sys.argv = ["windlass", "train", recipe, "--nproc", "1"]
main()
"""


def train_on_a_full_disk(config):
    """The same as what a disk without a free byte does: no draft of a status, no recipe.yaml, no save."""
    from windlass.checkpoint import commit

    def full(self, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    statvfs = os.statvfs
    with (
        mock.patch.object(Path, "write_bytes", full),
        mock.patch.object(Path, "write_text", full),
        mock.patch.object(commit.os, "statvfs", lambda path: os.statvfs_result((*statvfs(path)[:3], 1, 1, *[1] * 5))),
    ):
        return tiny.train(config)


def test_the_status_of_a_finished_run_that_was_made_longer_on_a_full_disk_is_no_longer_that_it_finished(base, ranks):
    sections = {"checkpoint": {"every_steps": 6, "async": False}, "evaluate": {"every_steps": 6}}
    config = tiny.recipe(base, "full-from-its-start", run={"steps": 3}, **sections)
    ranks.run(1, tiny.train, config)
    kept = (config.run.directory / "recipe.yaml").read_text()
    longer = tiny.recipe(base, "full-from-its-start", run={"steps": 5}, **sections)
    with pytest.raises(RankFailed, match="the disk is full: a checkpoint needs"):
        ranks.run(1, train_on_a_full_disk, longer)
    assert status(config.run.directory).line == (
        "stopped at step 5: data or storage failed (74); the same command goes on from step 3"
    )
    (config.run.directory / "run.json").unlink()
    with pytest.raises(RankFailed, match=r"the disk is full: a run needs 30 B"):  # before its loop
        ranks.run(1, train_on_a_full_disk, longer)
    assert status(config.run.directory).exit_code == 74
    assert (config.run.directory / "recipe.yaml").read_text() == kept
    assert not [*config.run.directory.glob("*.draft")]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_stays_full_ends_the_run_by_name_and_keeps_the_last_checkpoint(base, ranks, background):
    config = tiny.recipe(base, f"full-{background}", checkpoint={"async": background})
    with pytest.raises(RankFailed, match="the disk is full: a checkpoint needs"):
        ranks.run(1, fill_disk_after_first_save, config, False)
    assert steps_of(config.run.directory) == [3]
    lines = tiny.lines(config.run.directory)
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [3], "an event is a committed checkpoint"
    assert not list((config.run.directory / "checkpoints").glob(".tmp-*")), "its own half-written files are gone"
    resumed = ranks.run(1, tiny.train, config)[0]
    assert resumed["step"] == tiny.STEPS and len(resumed["rows"]) == tiny.STEPS - 3


def train_where_nothing_can_be_deleted(config):
    def denied(*_):
        raise PermissionError(13, "Permission denied")

    with mock.patch("windlass.checkpoint.keep.delete_checkpoint", denied):  # only rank 0 deletes
        return tiny.train(config)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_where_old_checkpoints_cannot_be_deleted(base, ranks, asynchronous):
    config = tiny.recipe(base, f"undeleted-{asynchronous}", checkpoint={"async": asynchronous, "keep_last": 1})
    assert [one["step"] for one in ranks.run(2, train_where_nothing_can_be_deleted, config)] == [tiny.STEPS] * 2
    assert steps_of(config.run.directory) == [3, 6, 9, 10]
    lines = [json.loads(line) for line in (config.run.directory / "events.jsonl").read_text().splitlines()]
    incidents = [line for line in lines if line["kind"] == "incident"]
    assert [(line["step"], line["what"]) for line in incidents] == [
        (at, "old checkpoints not deleted") for at in (6, 9, 10)
    ]
    assert "step-00000003: Permission denied; step-00000006: Permission denied" in incidents[1]["error"]
