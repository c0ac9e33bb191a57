"""TERM, INT, USR1 and HUP at 20 moments each, from the first line of `__main__` to after the last step: alone, and to the
launcher.

Ten moments are spread over the start, by the time that an undisturbed one took; eight come when a step is in the log, one when
the end is, one when the status is. Wherever a signal falls, one of three things is true afterwards: 75 and a checkpoint at the
step that the status names; 0 and a finished run; 130 and no checkpoint, where there was none before.
"""

import collections
import time
from pathlib import Path

import pytest

from tests.cli.test_main import (  # noqa: F401
    LONG_STEPS,
    assert_finished,
    base,
    finish,
    last_step,
    long_run,
    start,
    wait_for,
    windlass,
)
from windlass.checkpoint.commit import committed_steps
from windlass.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from windlass.report.events import read_lines
from windlass.signals import SIGNALS
from windlass.status import read_status

IN_START, IN_STEPS = 10, 8
HANDLED = sum(1 << (number - 1) for number in SIGNALS)


def handles_signals(process):
    """Whether its first line has been run: by the kernel's mask of what it catches."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return caught & HANDLED == HANDLED


def newest(run):
    steps = committed_steps(run / "checkpoints") if run.is_dir() else []
    return max(steps, default=None)


def has_end(run):
    return (run / "events.jsonl").is_file() and '"kind": "end"' in (run / "events.jsonl").read_text()


def is_finished(run):
    status = read_status(run)
    return status is not None and status.state == "finished"


def moments(start_s):
    """20 of them: whether it has come, of a run directory and the seconds since the process handles signals."""
    spread = [lambda run, age_s, at=at: age_s >= start_s * at / IN_START for at in range(IN_START)]
    steps = [lambda run, age_s, step=step: last_step(run) >= step for step in range(1, IN_STEPS + 1)]
    return [*spread, *steps, lambda run, age_s: has_end(run), lambda run, age_s: is_finished(run)]


def signalled(base, name, ranks, number, has_come):  # noqa: F811
    """A run that is signalled when that moment `has_come`, or has ended before -> its process, and its newest checkpoint then."""
    process = start(base, *long_run(name, *ranks, "checkpoint.every_steps=3"))
    wait_for(lambda: handles_signals(process), process)
    begun_s = time.monotonic()
    wait_for(lambda: process.poll() is not None or has_come(base / name, time.monotonic() - begun_s))
    before = newest(base / name)
    process.send_signal(number)
    return finish(process), before


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("ranks", [[], ["--nproc", "2"]], ids=["alone", "launcher"])
def test_no_moment_of_a_signal_loses_a_commit(base, ranks, number):  # noqa: F811
    name = f"fuzz-{number.name}-{len(ranks)}"
    calm = start(base, *long_run(f"{name}-calm", *ranks, "checkpoint.every_steps=3"))
    wait_for(lambda: handles_signals(calm), calm)
    begun_s = time.monotonic()
    wait_for(lambda: last_step(base / f"{name}-calm") >= 1, calm)
    start_s = time.monotonic() - begun_s
    assert finish(calm).returncode == 0

    found, wrong, stopped = collections.Counter(), [], None
    waits = moments(start_s)
    for at, has_come in enumerate(waits):
        run = base / f"{name}-{at}"
        done, before = signalled(base, run.name, ranks, number, has_come)
        after, status, code = newest(run), read_status(run), done.returncode
        is_right = {
            0: status is not None and (status.state, status.step, after) == ("finished", LONG_STEPS, LONG_STEPS),
            EXIT_STOPPED: status is not None
            and (status.state, status.step, status.exit_code) == ("stopped", after, EXIT_STOPPED),
            EXIT_INTERRUPTED: before is None and after is None,
        }.get(code, False)
        found[code] += 1
        if not is_right or "Traceback" in done.stderr or (before is not None and (after is None or after < before)):
            wrong.append((at, code, before, after, status, done.stderr[-600:]))
        stopped = run if code == EXIT_STOPPED else stopped
    print(f"{name}: {dict(found)}")
    assert not wrong, wrong
    assert sum(found.values()) == len(waits) == 20, found
    assert found[EXIT_INTERRUPTED] >= 1 and found[EXIT_STOPPED] >= 4, found
    assert stopped is not None
    step = newest(stopped)
    again = windlass(base, *long_run(stopped.name, *ranks, "checkpoint.every_steps=3"))
    assert again.returncode == 0, again.stderr
    assert any(line["kind"] == "resume" and line["step"] == step for line in read_lines(stopped / "events.jsonl"))
    assert_finished(stopped, LONG_STEPS)
