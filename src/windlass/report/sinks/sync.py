"""`windlass sync RUN`: sends what a run has logged to TensorBoard, Weights & Biases or Trackio."""

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from windlass.errors import UserError, nearest
from windlass.report.config import SinkName
from windlass.report.sinks.follow import SINKS, Follower, locked_to_send, open_sink, send_until, sent_run
from windlass.status import goes_on

Until = Literal["now", "end", "eof"]
"""When it ends: at once, when nobody trains the run any more, when stdin closes."""


def sync(
    run_directory: Path, sinks: Sequence[SinkName], project: str | None, until: Until, say: Callable[[str], None]
) -> None:
    """Raises UserError where no run has begun, no sink is named, or one refuses the login."""
    run = sent_run(run_directory, project)
    named = list(dict.fromkeys(sinks or (run.settings.get("report") or {}).get("sinks") or ()))
    if not named:
        raise UserError(
            f"windlass sync {run_directory} without --to",
            "the run's recipe names no report.sinks",
            f"say where to send it: --to {', or --to '.join(SINKS)}",
        )
    if until != "now" and len(named) > 1:
        raise UserError(
            f"--follow with {' and '.join(named)}", "one process follows a run for one sink", "start one for each: --to"
        )
    ends: dict[Until, Callable[[float], bool]] = {
        "now": lambda _: True,
        "end": partial(_ended, run_directory),
        "eof": _closed,
    }
    for name in named:
        with locked_to_send(name, run_directory):
            count = send_until(Follower(name, run, partial(open_sink, name)), ends[until])
        say(f"{name}: {count} lines sent")


def sinks_of(given: Sequence[str]) -> list[SinkName]:
    """`--to`, checked. Raises UserError."""
    for name in given:
        if name not in SINKS:
            raise UserError(
                f"--to {name}",
                f"a sink is one of {', '.join(SINKS)}",
                nearest(name, list(SINKS)) or "name one of them",
            )
    return [sink for sink in SINKS if sink in given]


def _ended(run_directory: Path, seconds: float) -> bool:
    time.sleep(seconds)
    return not goes_on(run_directory)


def _closed(seconds: float) -> bool:
    """Whether whoever started this process has closed the pipe, or is gone; waits for that up to `seconds`."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)
