"""Tokens per second on CPU cores: `windlass train` beside transformers' Trainer and a loop through Accelerate, in turns.

    python benchmarks/throughput.py [--rounds 3] [--only fp32 bf16] [--write]

One job for all: a Qwen3 of 18.9 million parameters from random weights, 4 sequences of 256 tokens a step on each rank, AdamW,
clip 1.0, warm-up and cosine. Each is given as a user would give it: windlass a recipe as `windlass init` writes it (`zero: auto`)
and its own model, the others theirs with the flags of their fastest known setting (meters/rivals.py). LitGPT takes part where
scripts/litgpt_environment.sh has made its environment. Every measurement is a process of its own, or a world of two; a round
runs the contenders of a row one after another, in an order that turns. A rate is of steps 11 to 30: tokens over wall seconds,
from one step's end to another's. A row has the median over the rounds, the spread (largest over smallest), and the rate of
windlass over that of each other.

Ranks share the cores: one rank has a thread per core, two have one each. windlass lets threads that wait for each other fall
asleep soon, so that another program on the machine cannot stall a run (launch/local.let_threads_sleep); where there are several
threads, it runs once more with threads that spin as long as those of the others do. The load of the machine is noted: figures of
a busy one are no result, and --write refuses them.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from meters.rivals import DECAY, LENGTH, MICRO_BATCH, PEAK_RATE, SHAPE, STEPS, UNCOUNTED, VOCABULARY, WARM_UP

from windlass.hardware import cpu_name

RESULTS = Path(__file__).parent / "results" / "throughput.json"
QUIET_LOAD = 0.7  # one-minute load at the start, above which nothing is written
RIVALS = Path(__file__).parent / "meters" / "rivals.py"
LITGPT = Path(__file__).parents[1] / ".venv-litgpt" / "bin" / "python"
SPINNING = "windlass spinning"
CONTENDERS = ("windlass", SPINNING, "trainer", "accelerate", "litgpt")
SPINS = "300000"  # libgomp's own count, where nothing is set and no more threads than cores run
ROWS = {
    "fp32": ("fp32", False, 1),
    "fp32 compiled": ("fp32", True, 1),
    "bf16": ("bf16", False, 1),
    "bf16 compiled": ("bf16", True, 1),
    "fp32, 2 ranks": ("fp32", False, 2),
    "fp32 compiled, 2 ranks": ("fp32", True, 2),
    "bf16, 2 ranks": ("bf16", False, 2),
    "bf16 compiled, 2 ranks": ("bf16", True, 2),
    "bf16-pure compiled, 2 ranks": ("bf16-pure", True, 2),
}
"""name -> precision, whether compiled, ranks. bf16-pure, weights and moments in bf16 too, is LitGPT's bf16, and no other's."""


def write_ids(folder: Path) -> None:
    """Text for windlass, whose ids nobody looks at: the time of a step does not depend on them."""
    import random

    draw = random.Random(0)
    words = [f"w{number}" for number in range(3000)]
    (folder / "corpus").mkdir()
    for number in range(200):
        (folder / "corpus" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=2000)))


def recipe(folder: Path, policy: str, compiled: bool, ranks: int) -> Path:
    tree = {
        "run": {
            "directory": "",
            "steps": STEPS,
            "tokens_per_step": MICRO_BATCH * LENGTH * ranks,
            "micro_batch": MICRO_BATCH,
        },
        "model": {"family": "qwen3", **SHAPE},
        "data": {
            "sources": [{"path": str(folder / "corpus")}],
            "tokenizer": {"train": VOCABULARY},
            "directory": str(folder / "data"),
            "sequence_length": LENGTH,
            "validation": "none",
        },
        "precision": {"policy": policy},
        "parallel": {"compile": compiled, "zero": "auto"},
        "optim": {"learning_rate": PEAK_RATE, "warmup_steps": WARM_UP, "weight_decay": DECAY},
        "checkpoint": {"every_steps": 10 * STEPS},
        "report": {"every_steps": UNCOUNTED},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(tree))
    return path


def windlass_rate(folder: Path, policy: str, compiled: bool, ranks: int, spins: str | None = None) -> float:
    """From the lines of steps 20 and 30 in events.jsonl. `spins`: how often a thread looks before it falls asleep."""
    run = folder / f"run-{time.time_ns()}"
    command = [
        sys.executable,
        "-m",
        "windlass",
        "train",
        str(recipe(folder, policy, compiled, ranks)),
        "--nproc",
        str(ranks),
    ]
    env = _threads(ranks) | ({} if spins is None else {"GOMP_SPINCOUNT": spins})
    subprocess.run([*command, f"run.directory={run}"], check=True, stdout=subprocess.DEVNULL, env=env)
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    seconds = [line["step_s"] * UNCOUNTED for line in lines if line["kind"] == "step" and line["step"] > UNCOUNTED]
    return MICRO_BATCH * LENGTH * ranks * (STEPS - UNCOUNTED) / sum(seconds)


def rival_rate(name: str, policy: str, compiled: bool, ranks: int) -> float:
    """What the process of rank 0 prints."""
    port, processes = _free_port(), []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = _threads(ranks) | ({key: str(value) for key, value in names.items()} if ranks > 1 else {})
        command = [LITGPT if name == "litgpt" else sys.executable, RIVALS, name, policy, str(int(compiled))]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    said = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(said[0][1][-2000:])
    return ranks * float(said[0][0].splitlines()[-1])


def _threads(ranks: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}


def _run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    policy, compiled, ranks = ROWS[name]
    is_pure = policy == "bf16-pure"
    absent = {"litgpt": not LITGPT.exists(), SPINNING: ranks > 1, "trainer": is_pure, "accelerate": is_pure}
    there = [contender for contender in CONTENDERS if not absent.get(contender)]
    rates: dict[str, list[float]] = {contender: [] for contender in there}
    for turn in range(rounds):
        at = turn % len(there)
        for contender in [*there[at:], *there[:at]]:
            if contender in ("windlass", SPINNING):
                rate = windlass_rate(folder, policy, compiled, ranks, SPINS if contender == SPINNING else None)
            else:
                rate = rival_rate(contender, policy.removesuffix("-pure"), compiled, ranks)
            rates[contender].append(rate)
            print(f"{name}: {contender} {rate:,.0f} tokens/s", flush=True)
    medians = {contender: statistics.median(found) for contender, found in rates.items()}
    found: dict[str, Any] = {
        contender: {"tokens_per_s": round(medians[contender]), "spread": round(max(of) / min(of), 3)}
        for contender, of in rates.items()
    }
    return found | {f"over {other}": round(medians["windlass"] / medians[other], 3) for other in there[1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows")
    parser.add_argument("--write", action="store_true", help="write the rows, if the machine is quiet")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    machine = {
        "cores": os.cpu_count(),
        "cpu": f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
        "load_at_start": round(load, 2),
    }
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    if LITGPT.exists():
        versions["litgpt"] = _run(LITGPT, "-c", "from importlib.metadata import version; print(version('litgpt'))")
    made = {"date": date.today().isoformat(), "commit": _run("git", "rev-parse", "--short", "HEAD")}
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_ids(Path(folder))
        for name in arguments.only:
            row = measure(name, arguments.rounds, Path(folder))
            print(f"{name}: {row}", flush=True)
            row |= made | {
                "command": f"python benchmarks/throughput.py --rounds {arguments.rounds} --only '{name}' --write"
            }
            result["rows"][name] = row | {"machine": machine, "versions": versions, "rounds": arguments.rounds}
            result["rows"] = {each: result["rows"][each] for each in ROWS if each in result["rows"]}
            if arguments.write and load <= QUIET_LOAD:
                RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.write and load > QUIET_LOAD:
        print(f"not written: load {load:.1f} at the start, above {QUIET_LOAD}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
