"""A run whose checkpoints are copied to a store goes on from there on an empty machine, as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from scripts.s3_server import s3_server
from tests import tiny
from tests.stores import BUCKET, NEEDS
from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.keep import diff
from windlass.checkpoint.mirror import open_remote, whole_steps
from windlass.config import to_yaml
from windlass.errors import EXIT_STOPPED
from windlass.proof.pool import RankFailed

WORLD = 2


def mirrored(base, name, url, **checkpoint):
    return tiny.recipe(base, name, checkpoint={"remote": url, **checkpoint})


def train_without_a_store(config):
    """On one rank: a store whose every write fails."""
    from windlass.errors import Unavailable
    from windlass.object_store import Store

    def fail(self, name, source):
        raise Unavailable(f"{self.url}/{name} failed", "a store answers", "start it")

    write, Store.write = Store.write, fail
    try:
        return tiny.refusal(config)
    finally:
        Store.write = write


def test_killed_and_resumed_on_an_empty_machine_it_is_the_run_that_was_never_stopped(base, ranks, tmp_path):
    url = f"file://{tmp_path}/store"
    local = tiny.recipe(base, "never-stopped")
    ranks.run(WORLD, tiny.train, local)
    config = mirrored(base, "mirrored", url)
    with pytest.raises(RankFailed):
        ranks.run(WORLD, tiny.train, config, (1, 8))
    before = list(whole_steps(open_remote(url)))
    assert before and before[0] in (3, 6)
    shutil.rmtree(config.run.directory)
    (found, _) = ranks.run(WORLD, tiny.train, config)
    assert found["step"] == tiny.STEPS and tiny.losses(config.run.directory) == tiny.losses(local.run.directory)
    resumes = [line["step"] for line in tiny.lines(config.run.directory) if line["kind"] == "resume"]
    assert resumes == [before[0]]
    last = f"checkpoints/step-{tiny.STEPS:08d}"
    assert diff(config.run.directory / last, local.run.directory / last).bytes == []
    assert next(iter(whole_steps(open_remote(url)))) == tiny.STEPS
    there = tmp_path / "store"
    for name in ("run.json", "events.jsonl", "report.html", "resolved.yaml"):
        assert (there / name).read_bytes() == (config.run.directory / name).read_bytes()


def test_a_store_that_is_down_costs_no_step_and_ends_the_run_by_name(base, ranks, tmp_path):
    config = mirrored(base, "down", f"file://{tmp_path}/store", every_steps=2)
    said = ranks.run(1, train_without_a_store, config)[0]
    assert said.startswith("Unavailable: ") and "failed" in said
    lines = tiny.lines(config.run.directory)
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, tiny.STEPS + 1))
    saved = [line["step"] for line in lines if line["kind"] == "checkpoint"]
    assert saved == [2, 4, 6, 8, 10], "every checkpoint is on disk"
    incidents = [line["what"] for line in lines if line["kind"] == "incident"]
    assert incidents and all("is not copied: the next is tried" in what for what in incidents)
    (found,) = ranks.run(1, tiny.train, config)  # nothing to train: what was not copied is copied
    assert found["step"] == tiny.STEPS and list(whole_steps(open_remote(f"file://{tmp_path}/store"))) == [tiny.STEPS]


def test_the_thread_that_trains_calls_the_store_before_the_first_step_and_after_the_last(base, tmp_path, monkeypatch):
    """So the store stalls no step: zero calls in each, while copies are made by another thread."""
    from windlass import train
    from windlass.checkpoint.mirror import KEPT_BESIDE
    from windlass.object_store import Store
    from windlass.training import loop

    monkeypatch.delenv("RANK", raising=False)
    begun, calls, norm = [0], [], loop.gradient_norm

    def counted(call):
        def wrapper(self, name=None, *rest):
            calls.append((threading.current_thread() is threading.main_thread(), begun[0], call.__name__, name))
            return call(self, *(() if name is None else (name, *rest)))

        return wrapper

    def count_step(*arguments):
        begun[0] += 1
        return norm(*arguments)

    for name in ("read", "write", "download", "remove", "sizes"):
        monkeypatch.setattr(Store, name, counted(getattr(Store, name)))
    monkeypatch.setattr(loop, "gradient_norm", count_step)
    config = mirrored(base, "counted", f"file://{tmp_path}/store", every_steps=2)
    assert train(config).step == begun[0] == tiny.STEPS
    of_training = [(step, call, name) for is_main, step, call, name in calls if is_main]
    assert of_training[0] == (0, "sizes", None), "is there a newer checkpoint?"
    assert of_training[1:] == [(tiny.STEPS, "write", name) for name in KEPT_BESIDE]
    copied = [name for is_main, _, call, name in calls if not is_main and call == "write" and name.endswith("MANIFEST")]
    assert copied and copied[-1] == f"step-{tiny.STEPS:08d}/MANIFEST"


def train_beside_a_slow_store(config):
    """On one rank: a store that takes nothing before the last checkpoint is committed."""
    from windlass.object_store import Store

    def wait(self, name, source):
        last = ("checkpoint", tiny.STEPS)
        while not any((line["kind"], line["step"]) == last for line in tiny.lines(config.run.directory)):
            time.sleep(0.05)
        write(self, name, source)

    write, Store.write = Store.write, wait
    try:
        return tiny.train(config)
    finally:
        Store.write = write


def test_what_a_slow_store_still_copies_stays_on_disk(base, ranks, tmp_path):
    config = mirrored(base, "slow", f"file://{tmp_path}/store", every_steps=2, keep_last=1)
    ranks.run(1, train_beside_a_slow_store, config)
    incidents = [line for line in tiny.lines(config.run.directory) if line["kind"] == "incident"]
    assert incidents == [] and list(whole_steps(open_remote(f"file://{tmp_path}/store"))) == [tiny.STEPS]
    # at the last prune 2 was being copied; which step was next by then is the clock's affair
    assert {2, tiny.STEPS} <= set(committed_steps(config.run.directory / "checkpoints"))


def test_a_place_that_is_no_url_is_refused(base):
    from windlass.errors import UserError

    with pytest.raises(UserError, match=r"checkpoint.remote=/mnt/store is not a URL"):
        mirrored(base, "wrong", "/mnt/store")


def await_that(run, is_so):
    """While `run`, a process, lives."""
    while not is_so():
        assert run.poll() is None
        time.sleep(0.2)


DOWN_S = 60


@pytest.mark.long
@pytest.mark.parametrize("how", ["hangs", "is killed and started again"])
def test_a_minute_without_the_store_costs_nothing(base, tmp_path, monkeypatch, how):
    """A real server. Steps and commits go on meanwhile, then the newest is copied, and an empty machine goes on from it."""
    for package in ("s3fs", "nanio"):
        pytest.importorskip(package, reason=NEEDS)
    url = f"s3://{BUCKET}/minute"
    config = mirrored(base, f"minute {how}", url, every_steps=20, keep_last=2)
    config = config.with_steps(100_000)
    recipe, directory = tmp_path / "recipe.yaml", config.run.directory
    recipe.write_text(to_yaml(config))

    def of(kind):
        return [line["step"] for line in tiny.lines(directory) if line["kind"] == kind]

    with s3_server(tmp_path / "s3", bucket=BUCKET) as (environment, server):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        copies = tmp_path / "s3" / BUCKET / "minute"
        train = [sys.executable, "-m", "windlass", "train", str(recipe)]
        run = subprocess.Popen(train, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
        await_that(run, lambda: list(copies.glob("*/MANIFEST")))
        server.send_signal(signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
        before = {path.parent.name for path in copies.glob("*/MANIFEST")}
        saved = len(of("checkpoint"))
        time.sleep(DOWN_S)
        await_that(run, lambda: len(of("checkpoint")) > saved + 5)  # while the store is still away
        if how == "hangs":
            assert {path.parent.name for path in copies.glob("*/MANIFEST")} == before
            server.send_signal(signal.SIGCONT)
            end(run, copies, before, of)
        else:
            again = {
                "port": urlsplit(environment["AWS_ENDPOINT_URL"]).port,
                "secret": environment["AWS_SECRET_ACCESS_KEY"],
            }
            with s3_server(tmp_path / "s3", bucket=BUCKET, **again):
                end(run, copies, before, of)
                goes_on_on_an_empty_machine(config, of)
            return
        goes_on_on_an_empty_machine(config, of)


def end(run, copies, before, of):
    """A copy is made of what was saved meanwhile, and a signal ends the run with a last one."""
    await_that(run, lambda: {path.parent.name for path in copies.glob("*/MANIFEST")} - before)
    run.send_signal(signal.SIGTERM)
    assert run.wait() == EXIT_STOPPED
    assert of("incident") == [], "the deadline of a store is longer than a minute"


def goes_on_on_an_empty_machine(config, of):
    (last,) = of("end")
    assert max(whole_steps(open_remote(config.checkpoint.remote))) == last
    shutil.rmtree(config.run.directory)
    (config.run.directory.parent / "more.yaml").write_text(to_yaml(config.with_steps(last + 5)))
    more = [sys.executable, "-m", "windlass", "train", str(config.run.directory.parent / "more.yaml")]
    more += ["run.accept_drift=[run.steps]"]
    assert subprocess.run(more, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    assert of("resume") == [last] and of("end")[-1] == last + 5
