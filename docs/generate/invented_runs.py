"""The two runs of the pictures in docs/howto/watch-a-run.md, invented so that all happens in one: three restarts, a gradient norm
far beyond its median, a stretch without numbers.

    python docs/generate/invented_runs.py DIRECTORY          # writes runs/base and runs/faster below it
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any, Final

STEPS: Final = 2000
KILLED_AT: Final = (430, 1010, 1490)
SPIKE, LOST = 760, range(1200, 1224)


def main(directory: Path) -> None:
    write_run(directory / "runs" / "base", learning_rate=6e-4)
    write_run(directory / "runs" / "faster", learning_rate=1.2e-3, has_faults=True)


def write_run(run: Path, learning_rate: float, has_faults: bool = False) -> None:
    run.mkdir(parents=True)
    (run / "resolved.yaml").write_text(f"optim: {{learning_rate: {learning_rate}}}\n")
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events(learning_rate, has_faults)))


def events(learning_rate: float, has_faults: bool) -> list[dict[str, Any]]:
    draw, found, step, time_s = random.Random(17), list[dict[str, Any]](), 0, 1_795_000_000.0
    opening = {"derived": {"parameters": "124 M (124,439,808)", "ranks": "8 on NVIDIA H200"}}

    def put(kind: str, **fields: Any) -> None:
        found.append({"kind": kind, "time": round(time_s, 3), "step": step, **fields})

    put("start", **opening)
    to_come, training_s = list(KILLED_AT) if has_faults else [], 0.0
    while step < STEPS:
        step, time_s, training_s = step + 1, time_s + 0.31, training_s + 0.31
        curve = 3.1 + 6.5 * math.exp(-step * learning_rate * 4.8) + 0.9 * math.exp(-step * learning_rate)
        if step % 5 == 0:
            put("step", **step_line(step, curve, learning_rate, training_s, has_faults, draw))
        if has_faults and step == SPIKE:
            put("incident", what="the gradient norm is 74.0, over 100 times the median of the last 100 steps (0.65)")
        if step % 250 == 0:
            put("validation", name="validation", loss=curve + 0.12, bits_per_byte=curve / 3.1)
            put("checkpoint", stall_s=0.2, bytes=1_493_000_000)
        if to_come and step == to_come[0]:
            to_come.pop(0)
            step, time_s, training_s = step // 250 * 250, time_s + 40, 0.0
            put("resume", **opening)
    put("end", reason="finished", tokens=STEPS * 65536)
    return found


def step_line(
    step: int, curve: float, learning_rate: float, training_s: float, has_faults: bool, draw: random.Random
) -> dict[str, Any]:
    norm = 0.6 + 3 * math.exp(-step / 150) + abs(draw.gauss(0, 0.06))
    found: dict[str, Any] = {
        "loss": curve + draw.gauss(0, 0.05),
        "gradient_norm": 74.0 if has_faults and step == SPIKE else norm,
        "learning_rate": learning_rate * min(1, step / 100) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS)),
        "tokens": step * 65536,
        "tokens_per_s": 211_000 + draw.gauss(0, 1500),
        "tokens_per_s_per_gpu": 26_400.0,
        "mfu": 0.41,
        "memory_bytes": 38_000_000_000,
        "step_s": 0.31,
        "warm_up": step < 4,
        "ledger": {"training": round(training_s, 2)},
    }
    if has_faults and step in LOST:
        lost = ("loss", "gradient_norm")
        found |= {**dict.fromkeys(lost), "non_finite": dict.fromkeys(lost, "nan")}
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
