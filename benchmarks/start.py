"""The start of a run on one and on two CPU processes: seconds to the first step, and what the launcher holds beside its ranks.

    python benchmarks/start.py [--label NAME] [--source DIRECTORY] [--runs N]

A model of some 20,000 parameters on data that is prepared before, so that a start is what is measured: imports, checks, the
meeting of ranks. `--source`: the src/ of another checkout, in its place. Rows are kept in benchmarks/results/start.json, with
the machine and its load; under load only rows of one call compare.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from windlass.hardware import cpu_name

RESULTS = Path(__file__).parent / "results" / "start.json"
RECIPE = {
    "run": {"steps": 2, "tokens_per_step": 256, "micro_batch": 2},
    "model": {
        "family": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "data": {
        "sources": [{"builtin": "python-stdlib", "tokens": 50_000}],
        "tokenizer": {"train": 300},
        "directory": "data",
        "sequence_length": 32,
    },
    "optim": {"learning_rate": 1e-3, "warmup_steps": 1},
    "report": {"every_steps": 1},
}


def resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024


def start(place: Path, environment: dict[str, str], ranks: int, number: int) -> dict[str, float]:
    """One run, new."""
    name = f"run-{ranks}-{number}"
    command = [sys.executable, "-m", "windlass", "train", "recipe.yaml", f"run.directory={name}", "--nproc", str(ranks)]
    begun_s, events, found = time.monotonic(), place / name / "events.jsonl", {}
    with subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if not found and events.is_file() and '"kind": "step"' in events.read_text():
                found = {"first_step_s": time.monotonic() - begun_s, "process_mib": resident_mib(process.pid)}
            time.sleep(0.02)
    assert process.returncode == 0 and found
    return {
        "ranks": ranks,
        **{key: round(value, 1) for key, value in found.items()},
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--label", default="this checkout")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    parser.add_argument("--runs", type=int, default=2)
    given = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": str(given.source.absolute()), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        command = [sys.executable, "-m", "windlass", "prepare", "recipe.yaml", "run.directory=run"]
        subprocess.run(command, cwd=place, env=environment, check=True, stdout=subprocess.DEVNULL)
        rows = [start(place, environment, ranks, number) for number in range(given.runs) for ranks in (1, 2)]
    old = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    new = {"what": given.label, "machine": cpu_name(), "date": time.strftime("%Y-%m-%d"), "starts": rows}
    RESULTS.write_text(json.dumps([*old, new], indent=1) + "\n")
    print(json.dumps(new, indent=1))


if __name__ == "__main__":
    main()
