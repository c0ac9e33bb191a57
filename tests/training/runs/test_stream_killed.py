"""`windlass train` killed with all its ranks at any moment, again and again, each time resumed on another world: one stream.

Real processes and SIGKILL; what the loaders alone do is in tests/data/stream/test_stream.py.
"""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from scripts.s3_server import s3_server
from tests import tiny
from tests.stores import BUCKET, NEEDS
from windlass.config import to_yaml
from windlass.data.prepare.manifest import open_prepared
from windlass.data.shards.mds import Reader
from windlass.data.stream.ledger import consumed_samples, spans
from windlass.data.stream.order import Order
from windlass.errors import EXIT_UNAVAILABLE
from windlass.report.events import read_events, read_lines

pytestmark = pytest.mark.long
STEPS, SEQUENCES = 32, 24  # of a step: worlds 1, 2, 3 and 4 divide them


def recipe(base, name, **data):
    run = {"steps": STEPS, "tokens_per_step": 16 * SEQUENCES, "micro_batch": 2}
    data = {"shard_bytes": 4096, "shuffle_window": 3, **data}
    checkpoint = {"every_steps": 4, "keep_last": 3}
    return tiny.recipe(base, name, run=run, data=data, checkpoint=checkpoint, evaluate={"every_steps": 1000})


def start(config, world, environment=None):
    path = config.run.directory.with_suffix(".yaml")
    path.write_text(to_yaml(config))
    command = [sys.executable, "-m", "windlass", "train", str(path), "--nproc", str(world)]
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, start_new_session=True, env={**os.environ, **(environment or {})}, **outputs)


def end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdout is not None and not process.stdout.closed:
        process.communicate()


def wait_for_end(process, seconds=500):
    try:
        print(process.communicate(timeout=seconds)[0])
    finally:
        end(process)
    return process.returncode


def steps_done(config):
    path = config.run.directory / "events.jsonl"
    return max([0, *(line["step"] for line in read_lines(path) if line["kind"] == "step")]) if path.exists() else 0


def wait_for(process, condition, seconds=400):
    end_s = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end_s and not condition():
        time.sleep(0.02)


def test_killed_again_and_again_on_changing_worlds_the_stream_is_one(tmp_path):
    whole = recipe(tmp_path, "whole")
    assert wait_for_end(start(whole, 1)) == 0
    config, draw = recipe(tmp_path, "killed"), random.Random(11)
    for world, until in zip((2, 3, 1, 4, 2), (5, 11, 17, 24, None)):
        process = start(config, world)
        try:
            if until is not None:
                wait_for(process, lambda until=until: steps_done(config) >= until)
                time.sleep(draw.random() * 0.2)
                assert process.poll() is None, "it was killed, and had not finished"
        finally:
            if until is not None:
                end(process)
        assert until is not None or wait_for_end(process) == 0
    assert [event["derived"]["ranks"][0] for event in read_lines(config.run.directory / "events.jsonl")
            if event["kind"] in ("start", "resume")] == list("23142")  # fmt: skip
    expected, got = tiny.losses(whole.run.directory), tiny.losses(config.run.directory)
    assert got.keys() == expected.keys() == set(range(1, STEPS + 1))
    assert all(abs(got[step][0] - expected[step][0]) <= 1e-5 for step in got)
    prove(config)


def prove(config):
    """The ledger is the order, without a gap; every sample once per epoch."""
    reader = Reader(open_prepared(config.data, config.evaluate.sets).shards("train"))
    found = spans(read_events(config.run.directory / "events.jsonl"))
    assert [span.start for span in found[1:]] == [span.end for span in found[:-1]] and found[0].start == 0
    proved = list(consumed_samples(found, reader.shards))
    order = Order(reader.shard_samples, config.run.seed, config.data.shuffle_window)
    assert proved == list(map(tuple, order.take(0, STEPS * SEQUENCES).tolist()))
    whole_epochs = STEPS * SEQUENCES // reader.num_samples
    assert whole_epochs >= 2
    for epoch in range(whole_epochs):
        assert len(set(itertools.islice(proved, epoch * reader.num_samples, (epoch + 1) * reader.num_samples))) == (
            reader.num_samples
        )


def test_a_store_that_dies_ends_all_ranks_by_name_and_the_run_goes_on_when_it_is_back(tmp_path):
    """Two ranks, a server killed mid-stream, a cache that holds little: the run ends by the deadline."""
    for package in ("s3fs", "nanio"):
        pytest.importorskip(package, reason=NEEDS)
    cache = {"directory": str(tmp_path / "cache"), "limit_mib": 1, "deadline_s": 20}
    url, objects = f"s3://{BUCKET}/data", tmp_path / "objects"
    # about 3 MB in shards of 4 KiB, of which the run reads a dozen: lint cannot have left all of those in a cache of 1 MiB
    config = recipe(tmp_path, "run", directory=url, cache=cache, shuffle_window=1)
    tiny.write_corpus(tmp_path / "corpus", 3000)
    with s3_server(objects, bucket=BUCKET) as (environment, server):
        process = start(config, 2, environment)
        try:
            wait_for(process, lambda: steps_done(config) >= 5)
            assert process.poll() is None, process.communicate()[0][-3000:]
            server.kill()
            server.wait()
            output = process.communicate(timeout=300)[0]
        finally:
            end(process)
    done = steps_done(config)
    assert process.returncode == EXIT_UNAVAILABLE and 5 <= done < STEPS, output[-3000:]
    assert "windlass: restart 3 of 3, from the last commit" in output
    assert f"{url}/train/shard.00" in output and "failed for 20 s (data.cache.deadline_s)" in output
    with s3_server(objects, bucket=BUCKET) as (environment, _):
        assert wait_for_end(start(config, 3, environment)) == 0
    assert steps_done(config) == STEPS
