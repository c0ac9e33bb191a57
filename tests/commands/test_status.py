"""What became of a run: its status file, and whether somebody holds the lock on its directory."""

import fcntl
import itertools
import json
import os
import time
from dataclasses import replace

import pytest

from windlass.commands.status import Row, runs, runs_as_json, runs_as_table, status
from windlass.errors import UserError
from windlass.status import LOCK, is_locked, write_status
from windlass.training.run_directory import hold


@pytest.fixture
def run(tmp_path):
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("state", "code", "line"),
    [
        ("finished", 0, "finished at step 6"),
        ("stopped", 75, "stopped at step 6; the same command goes on from step 4"),
        ("failed", 74, "stopped at step 6: data or storage failed (74); the same command goes on from step 4"),
        ("failed", 4, "failed at step 6 with exit code 4; its newest checkpoint: 4"),
        ("running", None, "dead: killed at step 6 or later; the same command goes on from step 4"),
    ],
)
def test_a_run_that_nobody_holds_is_what_its_status_says_or_dead(run, state, code, line):
    write_status(run, state, 6, code)
    found = status(run)
    assert found.line == line and (found.step, found.exit_code, found.checkpoint) == (6, code, 4)
    assert found.state == ("dead" if state == "running" else state)


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    write_status(tmp_path, "running", 2, None)
    assert status(tmp_path).line == "dead: killed at step 2 or later; the same command goes on from its beginning"


def test_a_run_that_failed_before_its_first_checkpoint_has_none(tmp_path):
    write_status(tmp_path, "failed", 2, 4)
    assert status(tmp_path).line == "failed at step 2 with exit code 4; its newest checkpoint: none"


@pytest.mark.parametrize("earlier", [None, "stopped", "running"])
def test_a_run_whose_directory_is_held_is_running_whatever_an_earlier_one_left(run, earlier):
    if earlier:
        write_status(run, earlier, 6, None)
    lock = hold(run)
    try:
        found = status(run)
        assert (found.state, found.step) == ("running", 6 if earlier else 0)
        assert found.line.startswith(f"running: at step {found.step} ") and found.line.endswith(" ago")
    finally:
        lock.close()
    assert not is_locked(run)


def test_looking_does_not_keep_a_run_from_starting(run, monkeypatch):
    """Someone looks at the very moment in which a run takes the lock, and is done while that waits."""
    looker = (run / LOCK).open("wb")
    fcntl.flock(looker, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: looker.close())
    hold(run).close()
    with pytest.raises(BlockingIOError):
        _twice(run)


def _twice(run):
    first = hold(run)
    try:
        hold(run)
    finally:
        first.close()


@pytest.mark.parametrize("place", [".", "absent"])
def test_a_directory_without_a_run_is_refused(tmp_path, place):
    with pytest.raises(UserError) as caught:
        status(tmp_path / place)
    assert (
        caught.value.given == f"{tmp_path / place} holds no status of a run" and "run.directory" in caught.value.change
    )
    assert os.listdir(tmp_path) == []


def test_a_recipe_in_place_of_a_run_is_answered_with_what_to_name(tmp_path):
    (tmp_path / "recipe.yaml").write_text("run: {}")
    with pytest.raises(UserError, match=r"recipe\.yaml holds no status of a run") as caught:
        status(tmp_path / "recipe.yaml")
    assert caught.value.change == "name the directory that the recipe calls run.directory"


def write_run(directory, state, step, *events):
    directory.mkdir(parents=True)
    write_status(directory, state, step, 0)
    (directory / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock is a second after the one before."""
    seconds = itertools.count(1000.0)
    monkeypatch.setattr(time, "time", lambda: next(seconds))


def test_the_runs_below_a_directory_with_their_last_figures(tmp_path, clock):
    losses = [{"kind": "step", "step": step, "loss": 9 - step, "tokens_per_s": 1000.0 * step} for step in (1, 2)]
    sets = [{"kind": "validation", "step": 2, "name": name, "loss": loss} for name, loss in (("a", 3.25), ("b", 9.0))]
    write_run(tmp_path / "old", "finished", 2, *losses, *sets)
    write_run(tmp_path / "group" / "new", "running", 0)
    (tmp_path / "group" / "new" / "events.jsonl").write_bytes(b'{"kind": "st')  # under way
    (tmp_path / "old" / "data").mkdir()
    write_status(tmp_path / "old" / "data", "failed", 0, 1)  # inside a run: none
    (tmp_path / ".trash").mkdir()
    write_status(tmp_path / ".trash", "failed", 0, 1)
    new, old = runs(tmp_path)
    assert replace(old, age_s=0.0) == Row("old", "finished", 2, 7.0, 3.25, 2000.0, 0.0)
    assert replace(new, age_s=0.0) == Row("group/new", "dead", 0, None, None, None, 0.0)
    titles, first, second = runs_as_table([new, old], tmp_path)
    assert titles.split() == ["run", "state", "step", "loss", "validation", "last", "tok/s", "written"]
    assert first.split()[:6] == ["group/new", "dead", "0", "-", "-", "-"]
    assert second.split()[:7] == ["old", "finished", "2", "7.0000", "3.2500", "2", "k"] and second.endswith(" ago")
    assert [json.loads(line)["run"] for line in runs_as_json([new, old])] == ["group/new", "old"]
    (alone,) = runs(tmp_path / "old")
    assert replace(alone, age_s=old.age_s) == old and new.age_s < old.age_s


def test_a_loss_beyond_all_bounds_does_not_widen_the_table(tmp_path):
    write_run(tmp_path / "a", "failed", 2, {"kind": "step", "step": 2, "loss": 1e300, "tokens_per_s": 1.0})
    assert [*runs_as_table(runs(tmp_path), tmp_path)][1].split()[3:5] == ["1.0e+300", "-"]


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    events = ({"kind": "step", "step": step, "loss": 1.0 * step, "tokens_per_s": 1.0} for step in range(20_000))
    write_run(tmp_path / "long", "stopped", 20_000, *events)
    assert runs(tmp_path)[0].loss == 19_999


def damage_status(run):
    (run / "status.json").write_bytes(b'{"state": "runn\x00')
    return f"{run / 'status.json'} is no status of a run"


def damage_status_that_is_a_directory(run):
    (run / "status.json").unlink()
    (run / "status.json").mkdir()
    return f"{run / 'status.json'} is no status of a run"


def damage_status_that_is_a_dead_link(run):
    (run / "status.json").unlink()
    (run / "status.json").symlink_to("nowhere")
    return f"{run / 'status.json'} is no status of a run"


def damage_status_of_another_program(run):
    (run / "status.json").write_text('{"state": "sleeping", "step": "six", "exit_code": [], "time": {}}')
    return f"{run / 'status.json'} is no status of a run"


def damage_status_that_is_a_pipe(run):
    (run / "status.json").unlink()
    os.mkfifo(run / "status.json")
    os.mkfifo(run / LOCK)
    (run / "events.jsonl").unlink(missing_ok=True)
    os.mkfifo(run / "events.jsonl")
    return f"{run / 'status.json'} is no status of a run"


def damage_lock(run):
    (run / LOCK).mkdir()
    return f"{run / LOCK} cannot be read: Is a directory"


def damage_checkpoints(run):
    (run / "checkpoints").rmdir()
    (run / "checkpoints").write_text("no directory")
    return f"{run / 'checkpoints'} is a file"


@pytest.mark.parametrize("damage", [one for name, one in globals().items() if name.startswith("damage_")])
def test_a_damaged_run_is_one_by_name_and_hides_no_other(tmp_path, damage):
    for name in ("a", "b", "c"):
        write_run(tmp_path / name, "finished", 2)
        (tmp_path / name / "checkpoints").mkdir()
    problem = damage(tmp_path / "b")
    found = {row.run: row for row in runs(tmp_path)}
    assert [found[name].state for name in "abc"] == ["finished", "damaged", "finished"]
    assert found["b"].problem == problem and found["a"].problem is None
    _titles, *lines, last = runs_as_table(list(found.values()), tmp_path)
    assert len(lines) == 3 and last == f"b is damaged: {problem}"
    assert [json.loads(line)["problem"] for line in runs_as_json(list(found.values()))].count(None) == 2
    if damage is damage_checkpoints:
        with pytest.raises(UserError, match="is a file\n"):
            status(tmp_path / "b")
    else:
        assert status(tmp_path / "b").line == f"damaged: {problem}; its newest checkpoint: none"


def test_a_damaged_run_has_the_step_of_its_newest_checkpoint(run):
    (run / "status.json").write_text("")
    found = status(run)
    assert (found.state, found.step, found.checkpoint) == ("damaged", 4, 4)
    assert found.line.endswith("; its newest checkpoint: 4")


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    write_run(tmp_path / "a", "finished", 2)
    (tmp_path / "closed").mkdir()
    listed = os.scandir

    def refuses(folder):
        if os.path.basename(folder) == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuses)
    found = {row.run: row for row in runs(tmp_path)}
    assert found["a"].state == "finished"
    assert found["closed"].problem == f"{tmp_path / 'closed'} cannot be read: Permission denied"


def test_figures_that_are_no_numbers_are_none(tmp_path):
    events = {"kind": "step", "step": 1, "loss": "low", "tokens_per_s": 10**400}, {"kind": "validation", "loss": [1]}
    write_run(tmp_path / "a", "finished", 2, *events)
    (row,) = runs(tmp_path)
    assert (row.loss, row.validation, row.tokens_per_s) == (None, None, None)


def test_where_no_run_is(tmp_path):
    assert list(runs_as_table(runs(tmp_path), tmp_path)) == [f"no run below {tmp_path}: none has a status.json"]
    with pytest.raises(UserError, match="is no directory"):
        runs(tmp_path / "absent")
