"""What {DDP, ZeRO-2, ZeRO-3, HSDP} x {none, selective, full} keep, send and cost: the table of docs/performance.md.

    python benchmarks/layouts.py

The recipe of docs/techniques/fsdp.md (1.6 million parameters) on 4 gloo ranks of this machine. Bytes and calls are counted in the
second step by technique_meter, and do not depend on the machine. `cpu_s` is processor time of one rank and step, the median over
the steps behind the third, which nothing counts; it is this machine's, and says what recomputation and copies cost a CPU, nothing
of a GPU. No wall time is measured: ranks share cores. Results are written to benchmarks/results/layouts.json.
"""

import datetime
import importlib.metadata
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from meters.technique_meter import measure
from techniques import config_of

from windlass.config import RunConfig
from windlass.hardware import cpu_name
from windlass.proof.pool import Ranks
from windlass.training import loop as train
from windlass.training.preflight import make_ready

RESULTS = Path(__file__).parent / "results" / "layouts.json"
WORLD, TIMED_STEPS, WARM_UP = 4, 12, 3
LAYOUTS = {
    "DDP": ("parallel.zero=0", "parallel.shard=1"),
    "ZeRO-2": ("parallel.zero=2",),
    "ZeRO-3": ("parallel.zero=3",),
    "HSDP": ("parallel.zero=3", "parallel.replicate=2"),
}
RECOMPUTE = ("none", "selective", "full")


def cpu_seconds(config: RunConfig) -> float:
    """On one rank: trains -> processor seconds of a step, all threads of this process together."""
    marks: list[float] = []
    original = train.assemble

    def assemble(*args: Any, **more: Any) -> Any:
        run = original(*args, **more)
        update = run.optimizer.step

        def step(norm: Any) -> None:
            update(norm)
            marks.append(time.process_time())

        run.optimizer.step = step
        return run

    with mock.patch.object(train, "assemble", assemble):
        train.train(config)
    return statistics.median(after - before for before, after in zip(marks[WARM_UP:], marks[WARM_UP + 1 :]))


def count(ranks: Ranks, layout: str, recompute: str, folder: Path, timed: bool = True) -> dict[str, Any]:
    """One cell: what rank 0 keeps and sends (all ranks send the same), and the mean of all ranks' seconds."""
    changes = (*LAYOUTS[layout], f"parallel.recompute={recompute}")
    name = f"{layout}-{recompute}"

    def ready(more: tuple[str, ...], suffix: str) -> RunConfig:
        return make_ready(config_of("fsdp", folder, name + suffix, changes + more), WORLD, "cpu").config

    found = ranks.run(WORLD, measure, ready((), ""), timeout_s=600)
    row = {key: found[0][key] for key in ("parameters", "gradients", "states", "kept", "gathered", "flops", "sent")}
    if timed:
        seconds = ranks.run(WORLD, cpu_seconds, ready((f"run.steps={TIMED_STEPS}",), "-timed"), timeout_s=600)
        row["cpu_s"] = round(statistics.mean(seconds), 4)
    return row


def main() -> None:
    ranks, rows = Ranks(), {}
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            for recompute in RECOMPUTE:
                rows[f"{layout}, {recompute}"] = row = count(ranks, layout, recompute, Path(folder))
                print(f"{layout}, {recompute}: {row['cpu_s']} s, {row['sent']}", flush=True)
    ranks.close()
    head = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/layouts.py",
        "machine": {"cpu": cpu_name()},
        "versions": {"torch": importlib.metadata.version("torch")},
        "unit": "bytes of one training step on one of 4 ranks, counted; cpu_s in processor seconds",
    }
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    RESULTS.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": {{\n{body}\n }}\n}}\n')


if __name__ == "__main__":
    main()
