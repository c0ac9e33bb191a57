"""What a logging step pays for a sink: the line of events.jsonl; and what it would pay if the step called the sink itself.

    python benchmarks/sinks.py [--lines 2000] [--write]

A line is a step line of usual size. `events.jsonl` is EventLog.write, all that a step does, with sinks or without
(tests/report/sinks/test_start.py counts that it calls no sink). A sink's row is `numbers` and `flush` of that line in the same
thread, where windlass has a process beside the run. Microseconds of the calling thread per line: its CPU, and the median by the
clock. Sinks that are not installed are left out. Written to benchmarks/results/sinks.json with the load of the machine.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page import line

from windlass.hardware import cpu_name
from windlass.report.events import EventLog
from windlass.report.sinks.follow import SINKS, UNSENT, numbers_of, open_sink
from windlass.report.sinks.sink import SentRun

RESULTS = Path(__file__).parent / "results" / "sinks.json"
WARM_UP = 50


def measured(call: Callable[[int], None], lines: int) -> dict[str, float]:
    """`call` of each step, after a few that are not counted."""
    for step in range(1, WARM_UP + 1):
        call(step)
    times, begin_s = [], time.thread_time()
    for step in range(WARM_UP + 1, WARM_UP + lines + 1):
        one_s = time.perf_counter()
        call(step)
        times.append(time.perf_counter() - one_s)
    cpu_s = time.thread_time() - begin_s
    return {"cpu_us": round(1e6 * cpu_s / lines, 1), "median_us": round(1e6 * statistics.median(times), 1)}


def fields(step: int) -> dict[str, Any]:
    return {key: value for key, value in json.loads(line(step)).items() if key not in UNSENT}


def rows(folder: Path, lines: int) -> dict[str, dict[str, float]]:
    made = {step: fields(step) for step in range(1, WARM_UP + lines + 1)}
    log = EventLog(folder / "events.jsonl")
    found = {"events.jsonl": measured(lambda step: log.write("step", step, made[step]), lines)}
    os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    for name in SINKS:
        if importlib.util.find_spec(name) is None:
            continue
        (folder / "sinks").mkdir(exist_ok=True)
        sink = open_sink(name, SentRun(folder, "0123456789abcdef", {}, "benchmark"))

        def send(step: int, sink: Any = sink) -> None:
            sink.numbers(step, 1.7e9 + step, dict(numbers_of(made[step], "train")))
            sink.flush()

        found[name] = measured(send, lines)
        sink.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as place:
        found = {
            "date": datetime.date.today().isoformat(), "machine": machine, "python": platform.python_version(),
            "lines": given.lines, "rows": rows(Path(place), given.lines),
        }  # fmt: skip
    print(json.dumps(found, indent=1))
    if given.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
