"""Checkpoints in an object store: whole there or not there, fetched whole or not at all, and never waited for by a step."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoint.cases import save_steps
from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.manifest import MANIFEST, step_name
from windlass.checkpoint.mirror import Mirror, fetch_newest, open_remote, whole_steps
from windlass.checkpoint.verify import verify_checkpoint
from windlass.errors import BadCheckpoint, Unavailable, UserError

KEEP_ALL = CheckpointConfig(keep_last=100, every_minutes=None)


def make_run(folder, *steps, run_id="a-run"):
    """A run directory with checkpoints of `steps`, and the small files beside them."""
    save_steps(folder, *steps, keep_last=100)
    (folder / "run.json").write_text(json.dumps({"run_id": run_id}))
    (folder / "events.jsonl").write_text("".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in steps))
    return folder


def copy_all(store, run, *steps, config=KEEP_ALL):
    for step in steps:
        mirror = Mirror(store, run, config)
        mirror.offer(step)
        mirror.close()


@pytest.fixture
def store(tmp_path):
    return open_remote(f"file://{tmp_path}/store")


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_fetched_on_an_empty_machine_is_what_was_committed(tmp_path, store):
    run, said = make_run(tmp_path / "run", 1, 2), []
    copy_all(store, run, 1, 2)
    there = tmp_path / "elsewhere" / "run"
    assert fetch_newest(store, there, said.append) == 2
    assert files_of(there / "checkpoints") == {
        name: content for name, content in files_of(run / "checkpoints").items() if name.startswith(step_name(2))
    }
    assert {name: (there / name).read_text() for name in ("run.json", "events.jsonl")} == {
        name: (run / name).read_text() for name in ("run.json", "events.jsonl")
    }
    assert said == [f"{store.url}: fetching {step_name(2)}"]
    assert fetch_newest(store, there, said.append) is None and fetch_newest(store, run, said.append) is None


def test_a_machine_that_is_behind_gets_the_newer_checkpoint_and_its_events(tmp_path, store):
    run = make_run(tmp_path / "run", 1, 2, 3)
    copy_all(store, run, 3)
    behind = make_run(tmp_path / "behind", 1, 2)
    assert fetch_newest(store, behind, print) == 3
    assert committed_steps(behind / "checkpoints") == [3, 2, 1]
    assert (behind / "events.jsonl").read_text() == (run / "events.jsonl").read_text()


def test_an_empty_store_is_a_new_run(tmp_path, store):
    assert fetch_newest(store, tmp_path / "run", print) is None and not (tmp_path / "run").exists()


def test_manifest_is_written_last_and_removed_first(tmp_path, store, monkeypatch):
    run, calls = make_run(tmp_path / "run", 1, 2), []
    write, remove = store.write, store.remove
    monkeypatch.setattr(store, "write", lambda name, source: (calls.append(("write", name)), write(name, source)))
    monkeypatch.setattr(
        store, "remove", lambda names: (calls.extend(("remove", name) for name in names), remove(names))
    )
    copy_all(store, run, 1, 2, config=CheckpointConfig(keep_last=1, every_minutes=None))
    of_copies = [call for call in calls if "/" in call[1]]
    first = [name for kind, name in of_copies if name.startswith(step_name(1)) and kind == "write"]
    assert first[-1] == f"{step_name(1)}/{MANIFEST}" and len(first) == len(files_of(run / "checkpoints" / step_name(1)))
    removed = [name for kind, name in of_copies if kind == "remove"]
    assert removed[0] == f"{step_name(1)}/{MANIFEST}" and sorted(removed) == sorted(first)
    assert of_copies.index(("remove", removed[0])) > of_copies.index(("write", f"{step_name(2)}/{MANIFEST}"))
    assert list(whole_steps(store)) == [2]
    of_run = [calls.index(("write", name)) for name in ("run.json", "events.jsonl")]
    assert max(of_run) < calls.index(("write", first[-1])), "a copy that is whole has its events"


def test_the_store_keeps_what_the_recipe_keeps(tmp_path, store):
    save_steps(run := tmp_path / "run", 1, 2, 3, 4, metrics={1: 0.5, 2: 3.0, 3: 4.0, 4: 5.0}, keep_last=100)
    copy_all(
        store, run, 1, 2, 3, 4, config=CheckpointConfig(keep_last=1, keep_best=1, keep_steps=[2], every_minutes=None)
    )
    assert list(whole_steps(store)) == [4, 2, 1]


def test_a_copy_that_was_cut_off_is_none_and_is_made_again(tmp_path, store):
    run = make_run(tmp_path / "run", 1, 2)
    copy_all(store, run, 1, 2)
    (tmp_path / "store" / step_name(2) / MANIFEST).unlink()
    (tmp_path / "store" / step_name(2) / "a-file-of-another-save").write_text("x")
    assert fetch_newest(store, tmp_path / "there", print) == 1
    copy_all(store, run, 2)
    assert not (tmp_path / "store" / step_name(2) / "a-file-of-another-save").exists()
    assert fetch_newest(store, tmp_path / "there", print) == 2


def test_a_step_that_was_saved_again_replaces_its_copy_and_one_that_is_there_costs_nothing(tmp_path, store):
    run = make_run(tmp_path / "run", 1)
    mirror = Mirror(store, run, KEEP_ALL)
    mirror.offer(1)
    mirror.close()
    (copied,) = mirror.poll()
    assert (copied.step, copied.error) == (1, None) and copied.num_bytes > 0 and mirror.poll() == []
    again = Mirror(store, run, KEEP_ALL)
    again.offer(1)
    again.close()
    assert [one.num_bytes for one in again.poll()] == [0]
    other = make_run(tmp_path / "other", 1)  # the same step of another save
    copy_all(store, other, 1)
    assert fetch_newest(store, tmp_path / "there", print) == 1
    assert files_of(tmp_path / "there" / "checkpoints") == files_of(other / "checkpoints")


@pytest.mark.parametrize("damage", ["byte", "missing", "manifest"])
def test_a_damaged_copy_is_passed_over_by_name(tmp_path, store, damage):
    copy_all(store, make_run(tmp_path / "run", 1, 2), 1, 2)
    folder, said = tmp_path / "store" / step_name(2), []
    if damage == "byte":
        file = folder / "rank-00000.bin"
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        (folder / "index.json").unlink()
    else:
        (folder / MANIFEST).write_text("{}")
    assert fetch_newest(store, tmp_path / "there", said.append) == 1
    assert damage == "manifest" or any(f"{step_name(2)} is skipped" in line for line in said)
    assert committed_steps(tmp_path / "there" / "checkpoints") == [1]
    assert sorted(path.name for path in (tmp_path / "there" / "checkpoints").iterdir()) == [step_name(1)]


def test_a_store_without_a_whole_checkpoint_is_refused_and_nothing_begins_anew(tmp_path, store):
    copy_all(store, make_run(tmp_path / "run", 1), 1)
    (tmp_path / "store" / step_name(1) / "index.json").unlink()
    with pytest.raises(BadCheckpoint, match="none of them is whole"):
        fetch_newest(store, tmp_path / "there", print)
    assert committed_steps(tmp_path / "there" / "checkpoints") == []


def test_a_store_that_holds_another_run_is_refused(tmp_path, store):
    copy_all(store, make_run(tmp_path / "run", 1, 2), 2)
    with pytest.raises(UserError, match="holds another run"):
        fetch_newest(store, make_run(tmp_path / "other", 1, run_id="b-run"), print)


def test_a_read_only_place_is_refused_before_anything_runs():
    with pytest.raises(UserError, match="is read only here"):
        open_remote("https://host.invalid/run")


class SlowStore:
    """A store whose writes wait until it is open."""

    def __init__(self, store):
        self._store, self.is_open, self.began = store, threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def write(self, name, source):
        self.began.set()
        assert self.is_open.wait(60)
        self._store.write(name, source)


def test_a_slow_store_holds_nobody_up_skips_steps_and_keeps_what_it_copies_on_disk(tmp_path, store):
    run, slow = make_run(tmp_path / "run", 1, 2, 3), SlowStore(store)
    mirror = Mirror(slow, run, KEEP_ALL)
    mirror.offer(1)
    assert slow.began.wait(60)
    mirror.offer(2)
    mirror.offer(3)
    assert mirror.held() == {1, 3} and mirror.poll() == []
    slow.is_open.set()
    mirror.close()
    assert [copied.step for copied in mirror.poll()] == [1, 3] and mirror.held() == set()
    assert list(whole_steps(store)) == [3, 1]


def test_an_error_is_news_and_the_next_copy_is_tried(tmp_path, store, monkeypatch):
    run, mirror = make_run(tmp_path / "run", 1, 2), Mirror(store, tmp_path / "run", KEEP_ALL)
    write = store.write

    def fail(name, source):
        raise Unavailable("down", "up", "wait")

    monkeypatch.setattr(store, "write", fail)
    mirror.offer(1)
    while not (news := mirror.poll()):
        time.sleep(0.01)
    assert [(one.step, one.num_bytes, type(one.error)) for one in news] == [(1, 0, Unavailable)]
    monkeypatch.setattr(store, "write", write)
    mirror.offer(2)
    mirror.close()
    assert list(whole_steps(store)) == [2]
    monkeypatch.setattr(store, "write", fail)
    last = Mirror(store, run, KEEP_ALL)
    last.offer(1)
    with pytest.raises(Unavailable):
        last.close()


def test_a_checkpoint_that_somebody_removed_is_an_error_with_its_name(tmp_path, store):
    mirror = Mirror(store, make_run(tmp_path / "run", 1), KEEP_ALL)
    (tmp_path / "run" / "checkpoints" / step_name(1) / "index.json").unlink()
    mirror.offer(1)
    with pytest.raises(UserError, match=f"{step_name(1)} cannot be copied"):
        mirror.close()
    assert whole_steps(store) == {}


COPY = """
import sys
from pathlib import Path
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.mirror import Mirror, open_remote
from windlass.checkpoint.commit import committed_steps
run = Path(sys.argv[2])
store = open_remote(sys.argv[1])
print("copying", flush=True)
mirror = Mirror(store, run, CheckpointConfig(keep_last=2, every_minutes=None))
mirror.offer(max(committed_steps(run / "checkpoints")))
mirror.close()
"""
KILLS = 50


@pytest.mark.long
def test_no_kill_during_a_copy_to_s3_loses_what_was_copied_before(tmp_path, s3_place):
    """Each trial commits one more step on disk and is killed in its copy. An empty machine then fetches the newest whole one."""
    url, draw, run, done, cut = s3_place[0], random.Random(7), tmp_path / "run", 0, 0
    duration_s, newest = None, -1
    for trial in range(KILLS + 1):
        step = trial + 1
        make_run(run, step)
        process = subprocess.Popen(
            [sys.executable, "-c", COPY, url, str(run)], stdout=subprocess.PIPE, env={**os.environ}
        )
        assert process.stdout.readline() == b"copying\n"
        start_s = time.monotonic()
        if trial:
            time.sleep(draw.uniform(0, 1.3 * duration_s))
            process.send_signal(signal.SIGKILL)
        process.communicate()
        duration_s = duration_s or time.monotonic() - start_s
        shutil.rmtree(there := tmp_path / "there", ignore_errors=True)
        fetched = fetch_newest(open_remote(url), there, lambda line: None)
        assert fetched in (newest, step), (trial, newest, fetched)
        assert verify_checkpoint(there / "checkpoints" / step_name(fetched)) == []
        done, cut, newest = done + (fetched == step), cut + (fetched != step), fetched
    print(f"{cut} copies cut off, {done} whole")
    assert cut >= 5 and done >= 5
    assert len([name for name in open_remote(url).sizes() if name.endswith(MANIFEST)]) <= 3


def test_the_urls_secret_is_not_in_what_is_printed(tmp_path):
    store = open_remote(f"file://{tmp_path}/store?token=s3cret")
    said: list[str] = []
    copy_all(store, make_run(tmp_path / "run", 1), 1)
    fetch_newest(store, Path(tmp_path / "there"), said.append)
    assert said and "s3cret" not in "".join(said)
