"""Fifty hangs of five kinds in a run of two ranks: each is named by rank, step, phase and Python line, and nothing else is."""

import inspect
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from tests import tiny
from tests.supervise import hung_rank
from windlass.config import to_yaml
from windlass.supervise.heartbeat import process_state
from windlass.supervise.watchdog import Deadlines, Watchdog
from windlass.training.preflight import prepare_only

HANGS, LIMIT_S, AHEAD_S = 50, 1800, 9.0


def hang_lines(kind):
    """What may be named: the last line of the function that hangs; of a busy loop both of its lines."""
    source, first = inspect.getsourcelines(hung_rank.KINDS[kind])
    return [f"hung_rank.py:{first + len(source) - back} {kind}" for back in range(1, 3 if kind == "loop" else 2)]


@pytest.mark.long
def test_fifty_hangs_are_named_and_a_run_that_goes_on_is_not(tmp_path):
    draw = random.Random(11)
    kinds = [kind for kind in hung_rank.KINDS for _ in range(HANGS // len(hung_rank.KINDS))]
    draw.shuffle(kinds)
    plan = [
        (4 + 2 * at, draw.choice(["data", "step", "update", "record"]), draw.randrange(2), kind)
        for at, kind in enumerate(kinds)
    ]
    config = tiny.recipe(
        tmp_path, run={"steps": 2 * HANGS + 8}, evaluate={"every_steps": None}, checkpoint={"every_steps": None}
    )
    prepare_only(config)
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    ranks, said = start(tmp_path), []
    for process in ranks:  # a pipe holds less than they say
        threading.Thread(target=lambda process=process: said.append(process.communicate()[0]), daemon=True).start()
    ahead_s, named = [0.0], []
    watchdog = Watchdog(config.run.directory, Deadlines(20.0), named.append, lambda: time.monotonic() + ahead_s[0])
    wrong = []
    for number, (step, phase, rank, kind) in enumerate(plan):
        wait_for(partial(has_begun, tmp_path, number, kind, ranks[rank].pid), ranks, watchdog)
        time.sleep(0.2)  # from the mark that it leaves to the line where it hangs
        incident = None
        while incident is None:  # the clock alone decides
            ahead_s[0] += AHEAD_S
            incident = watchdog.look()
        ahead_s[0] = 0.0
        stack = next(stack for stack in incident.stacks if stack.beat.rank == rank)
        at = next((frame.rpartition("/")[2] for frame in stack.frames if "hung_rank" in frame), stack.state)
        if (incident.ranks, incident.step, incident.phase) != ([rank], step, phase) or at not in hang_lines(kind):
            wrong.append((number, kind, incident.sentence, at))
        release(tmp_path, number, kind, ranks[rank].pid)
    for process in ranks:
        assert process.wait(LIMIT_S) == 0, said
    assert len(wrong) <= 1, wrong
    assert [line["step"] for line in tiny.lines(config.run.directory) if line["kind"] == "step"][-1] == 2 * HANGS + 8


@pytest.mark.long
def test_5000_steps_on_a_busy_host_are_no_hang(tmp_path):
    """With the deadlines that users have. Two processes per core do nothing but compute beside the ranks."""
    steps = 5000
    recipe = {"evaluate": {"every_steps": 500}, "checkpoint": {"every_steps": 250}}
    config = tiny.recipe(tmp_path, run={"steps": steps}, **recipe)
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        command = [sys.executable, "-m", "windlass", "train", str(tmp_path / "recipe.yaml"), "--nproc", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT_S)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    lines = tiny.lines(config.run.directory)
    assert done.returncode == 0 and [line for line in lines if line["kind"] == "incident"] == [], done.stderr[-3000:]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, steps + 1))


def start(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tests.supervise.hung_rank",
        str(folder / "recipe.yaml"),
        str(folder / "plan.json"),
    ]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def has_begun(folder, number, kind, pid):
    return (folder / f"hanging-{number}").exists() and (kind != "stopped" or process_state(pid) == "T")


def release(folder, number, kind, pid):
    if kind == "stopped":
        os.kill(pid, signal.SIGCONT)
    (folder / f"release-{number}").touch()
    if kind == "read":
        (folder / f"release-{number}.pipe").write_bytes(b"x")


def wait_for(is_so, ranks, watchdog):
    """Meanwhile the watchdog looks, and finds nothing."""
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s and all(process.poll() is None for process in ranks)
        if not is_so():
            assert watchdog.look() is None, "nothing stalls yet"
        time.sleep(0.02)
