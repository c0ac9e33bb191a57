"""What the page of a long run costs: a million step lines with two resumes, read cold and read on.

    python benchmarks/page.py [--lines 1000000] [--write]

Each part runs in a process of its own. Measured: CPU seconds and the largest resident memory of reading all lines and rendering
the page; its bytes; the milliseconds, median of 20, until ten new lines are read and are JSON for a page that follows.
Wanted: 10 s, 300 MB, 1 MB and 50 ms. The load of the machine is written beside the figures.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "page.json"


def line(step: int) -> str:
    loss = 2 + 8 / (1 + step / 1000) + (step * 2654435761 % 1000) / 5000
    event = {
        "kind": "step", "time": 1.7e9 + step * 0.25, "step": step, "loss": loss, "gradient_norm": loss / 4,
        "learning_rate": 1e-3 / (1 + step / 1e5), "skipped": 0, "targets": 2048, "tokens": 2048 * step,
        "tokens_per_s": 8063.75, "tokens_per_s_per_gpu": 4031.87, "mfu": None, "memory_bytes": 572682240,
        "data_wait_s": 1.0e-4, "step_s": 0.25397, "warm_up": False,
        "ledger": {"training": step * 0.25, "data_wait": 0.06, "evaluate": 23.9, "checkpoint": 0.11},
    }  # fmt: skip
    return json.dumps(event) + "\n"


def write_run(directory: Path, lines: int) -> None:
    directory.mkdir(parents=True)
    with open(directory / "events.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "start", "time": 1.7e9, "step": 0}) + "\n")
        step = 0
        for number in range(lines):
            if number in (lines // 3, 2 * lines // 3):  # a thousand steps are lost and done again
                step -= 1000
                file.write(json.dumps({"kind": "resume", "time": 1.7e9 + step * 0.25, "step": step}) + "\n")
            step += 1
            file.write(line(step))


def cold(directory: Path) -> dict[str, Any]:
    from windlass.report.page.write import write_report

    page = write_report(directory)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "memory_mb": round(used.ru_maxrss * 1024 / 1e6),
        "page_bytes": page.stat().st_size,
    }


def following(directory: Path) -> dict[str, Any]:
    from windlass.report.page.serve import Live

    live = Live([directory])
    history = live.runs[0].history
    times, sizes = [], []
    step = int(history.buckets.last_step)
    for _ in range(20):
        have = f"{history.offset}.{history.buckets.revision}.{len(history.buckets)}"
        with open(directory / "events.jsonl", "a", encoding="utf-8") as file:
            for _ in range(10):
                step += 1
                file.write(line(step))
        begin = time.perf_counter()
        news = live.news(have)
        times.append(time.perf_counter() - begin)
        sizes.append(len(news or ""))
    return {"new_lines_ms": round(1000 * statistics.median(times), 1), "new_bytes": statistics.median(sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps({"cold": cold, "following": following}[given.part[0]](Path(given.part[1]))))
        return
    load = os.getloadavg()[0]
    figures: dict[str, Any] = {"lines": given.lines}
    with tempfile.TemporaryDirectory() as place:
        write_run(Path(place) / "run", given.lines)
        figures["file_mb"] = round((Path(place) / "run" / "events.jsonl").stat().st_size / 1e6)
        for part in ("cold", "following"):
            command = [sys.executable, __file__, "--part", part, str(Path(place) / "run")]
            figures |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
    }
    found = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "python": platform.python_version(), **figures}
    print(json.dumps(found, indent=1))
    if given.write:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
