"""Runs that begin while their data is prepared: the runs on finished data, waiting, killed, resumed, on other worlds."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests import tiny
from windlass.config import check_recipe, to_yaml
from windlass.data.prepare.manifest import open_prepared
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.journal import open_journal
from windlass.data.shards.mds import Reader
from windlass.data.stream.ledger import consumed_samples, spans, waited_s
from windlass.data.stream.loader import BatchCut
from windlass.data.stream.open_order import Opening
from windlass.data.stream.open_stream import open_stream
from windlass.data.stream.order import Order
from windlass.errors import UserError
from windlass.report.events import read_events
from windlass.training.announce import describe_length, describe_order
from windlass.training.start.restore import Start

DONE, STEPS, HELD_BACK = "_SUCCESS", 30, 40


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A whole source, a tokenizer, and the recipe of a finished preparation of it."""
    base = tmp_path_factory.mktemp("base")
    prepare(tiny.recipe(base).data, {}, log=lambda line: None)
    (base / "corpus" / DONE).touch()
    return base


def in_written_order(base, name, source, **sections):
    data = {
        "sources": [{"path": str(source), "grows_until": DONE}],
        "tokenizer": {"from": str(base / "data" / "tokenizer")},
        "directory": str(base / f"data-{name}"),
        "order": {"first_epoch": "written", "held_out_of": 15},
        "validation": 0.2,
        "shard_bytes": 4096,
        "shuffle_window": 2,
    }
    run = {"steps": STEPS, **sections.pop("run", {})}
    return tiny.recipe(base, name, data={**data, **sections.pop("data", {})}, run=run, **sections)


def begun_source(base, name):
    """The source without its last files, and what brings them."""
    source, rest = base / f"source-{name}", base / f"rest-{name}"
    shutil.copytree(base / "corpus", source)
    rest.mkdir()
    for path in [*sorted(source.glob("*.txt"))[-HELD_BACK:], source / DONE]:
        path.rename(rest / path.name)
    return source, rest


def fill(source, rest, pause_s, is_time=lambda: True):
    """In another thread, one file after the other, once it is time."""

    def work():
        while not is_time():
            time.sleep(0.1)
        for path in [*sorted(rest.glob("*.txt")), rest / DONE]:
            path.rename(source / path.name)
            time.sleep(pause_s)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def train_and_fill(config, source, rest):
    """On one rank; the first brings the rest of the source when the run must be waiting for it."""
    if _is_first():
        events, waiting_s = config.run.directory / "events.jsonl", []

        def is_time():
            """Two seconds behind the last step that can be made of what is there."""
            logged = open_journal(Path(config.data.directory))
            if logged is None or not events.exists():
                return False
            samples = sum(shard.num_samples for shard in logged.shards[: len(logged.shards) // 2 * 2])
            if sum(event["kind"] == "step" for event in read_events(events)) >= max(
                1, samples // config.sequences_per_step
            ):
                waiting_s.append(time.monotonic())
            return bool(waiting_s) and time.monotonic() - waiting_s[0] > 2.0

        fill(source, rest, 0.0, is_time)
    return tiny.train(config)


def _is_first():
    import torch

    return torch.distributed.get_rank() == 0


def rows_of(results, num_steps=STEPS):
    return [row for step in range(num_steps) for result in results for row in result["rows"][step]]


def prove(config, given):
    """The ledger expands to the rows that were given."""
    reader = Reader(open_prepared(config.data, config.evaluate.sets).shards("train"))
    found = spans(read_events(config.run.directory / "events.jsonl"))
    proved = [reader.read(shard, row)[0][:-1].tolist() for shard, row in consumed_samples(found, reader.shards)]
    assert len(given) == STEPS * config.sequences_per_step and np.array_equal(proved, given)


def test_a_run_that_waits_for_data_is_the_run_on_finished_data(base, ranks, monkeypatch):
    finished = in_written_order(base, "finished", base / "corpus")
    prepare(finished.data, {}, log=lambda line: None)
    expected = ranks.run(1, tiny.train, finished)
    source, rest = begun_source(base, "waiting")
    waiting = in_written_order(base, "waiting", source)
    found = ranks.run(2, train_and_fill, waiting, source, rest)
    assert rows_of(found) == rows_of(expected)
    prove(waiting, rows_of(expected))
    prove(finished, rows_of(expected))
    of_finished, of_waiting = (read_events(config.run.directory / "events.jsonl") for config in (finished, waiting))
    assert waited_s(of_waiting) > 1.0 and waited_s(of_finished) == 0.0
    wait = next(event for event in of_waiting if "waited_s" in event)
    line = next(event for event in of_waiting if event["kind"] == "step" and event["step"] == wait["step"])
    assert wait["kind"] == "incident" and line["data_wait_s"] > 1.0
    before, after = tiny.losses(finished.run.directory), tiny.losses(waiting.run.directory)
    assert before.keys() == after.keys()  # on two ranks: sums differ in their last bits, and that grows with the steps
    assert all(np.allclose(before[at], after[at], rtol=1e-5) for at in range(1, 6))
    epoch = [tuple(row) for row in rows_of(expected)]
    assert len(set(epoch)) == len(epoch), "the first epoch is longer than the run"


def test_a_finished_preparation_of_other_files_is_not_gone_on_with(base):
    config = in_written_order(base, "finished", base / "corpus")
    prepared = prepare(config.data, {}, log=lambda line: None)
    read = {"num_shards": 2, "shards": "0" * 32}
    trainer_state = {"data": {"stream": prepared.stream}, "samples_consumed": 8, "read_from": read}
    state = Start(1, "", trainer_state).stream_state(config, prepared.stream)
    assert state == {"samples_consumed": 8, "read_from": read}
    opening = {"prepared": prepared, "config": config.data, "cut": BatchCut(4), "seed": 4}
    with pytest.raises(UserError, match="are not those that the run's checkpoint has read"):
        open_stream(Opening(**opening, state=state))
    assert Start(0, "").stream_state(config, prepared.stream) == {}
    accepted = config.model_copy(update={"run": config.run.model_copy(update={"accept_drift": ["data"]})})
    state = Start(1, "", trainer_state).stream_state(accepted, prepared.stream)
    source = open_stream(Opening(**opening, state=state))
    assert state == {"samples_consumed": 8} and source.state() == {**state, "read_from": None}
    source.close()


def test_what_is_not_known_yet_is_said(base):
    config = in_written_order(base, "finished", base / "corpus")
    assert describe_length(config, 30, 120, is_whole=True) == "2.00 epochs"
    assert (
        describe_length(config, 1500, 60, is_whole=True) == "200.00 epochs, in which a model learns its text by heart"
    )
    assert describe_length(config, 30, 120, is_whole=False) == "240 samples, of which 120 are prepared so far"
    assert "no baselines, and later shards are not linted" in describe_order(config, is_whole=False)["first epoch"]
    assert describe_order(config, is_whole=True) == {
        "first epoch": "in written order, shuffled inside windows of 2 shards"
    }
    assert describe_order(tiny.recipe(base), is_whole=True) == {}


def test_a_length_in_epochs_waits_for_all_data_and_says_so(base, capsys):
    from windlass.training.preflight import make_ready

    source, rest = begun_source(base, "epochs")
    config = in_written_order(base, "epochs", source, run={"steps": None, "epochs": 1.0})
    filling = fill(source, rest, 0.0)
    make_ready(config, 1, "cpu")
    filling.join()
    assert "run.epochs: the length of an epoch is known when all is prepared" in capsys.readouterr().out
    assert open_prepared(config.data, {}).is_whole


# ---- kills


def command(recipe, num_ranks):
    return [sys.executable, "-m", "windlass", "train", str(recipe), "--nproc", str(num_ranks)]


def preparer_of(launcher):
    """The process id of the preparation that the run of this process has started, in it or in its rank 0."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "windlass.data.prepare.background" in child.cmdline():
                    return child.pid
    return None


def wait_for_lines(process, events, more):
    """Until the run has written `more` further lines, at most a minute and a half -> its exit code, if it has ended."""
    count = lambda: len(events.read_bytes().splitlines()) if events.exists() else 0  # noqa: E731
    wanted, end_s = count() + more, time.monotonic() + 90.0
    while process.poll() is None and count() < wanted and time.monotonic() < end_s:
        time.sleep(0.05)
    return process.poll()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_trainer_or_preparation_killed_at_random_the_stream_is_one(base, tmp_path, seed):
    """What the ledger proves, against the order of a preparation that was never disturbed."""
    draw, name = random.Random(seed), f"killed-{seed}"
    source, rest = begun_source(base, name)
    config = in_written_order(base, name, source, run={"steps": 60}, checkpoint={"every_steps": 2, "keep_last": 3})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(config))
    filling, log = None, tmp_path / "log"
    for _ in range(12):
        with open(log, "w") as output:
            process = subprocess.Popen(
                command(recipe, draw.choice([1, 2])), start_new_session=True, stdout=output, stderr=output
            )
        filling = filling or fill(source, rest, 1.0)
        code = wait_for_lines(process, config.run.directory / "events.jsonl", draw.randint(1, 25))
        preparer = preparer_of(process.pid) if code is None else None
        if preparer is not None and draw.random() < 0.5:
            os.kill(preparer, signal.SIGKILL)
            code = process.wait(300)  # in an error that names it, or at the end if all was there
            assert code in (0, 2), log.read_text()
            assert code == 0 or "ended with exit code -9" in log.read_text(), log.read_text()
        elif code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code == 0:
            break
    else:
        output = subprocess.run(command(recipe, 1), capture_output=True, text=True, timeout=600, check=False)
        assert output.returncode == 0, output.stdout + output.stderr
    filling.join()
    whole = in_written_order(base, f"whole-{seed}", source)
    prepare(whole.data, {}, log=lambda line: None)
    reader = Reader(open_prepared(whole.data, {}).shards("train"))
    order = Order(reader.shard_samples, config.run.seed, config.data.shuffle_window, written=True)
    wanted = [tuple(place) for place in order.take(0, 60 * config.sequences_per_step).tolist()]
    own = Reader(open_prepared(config.data, {}).shards("train"))
    found = list(consumed_samples(spans(read_events(config.run.directory / "events.jsonl")), own.shards))
    assert found == wanted and own.shards == reader.shards
    assert check_recipe(config.model_dump(mode="json", by_alias=True)) == config
