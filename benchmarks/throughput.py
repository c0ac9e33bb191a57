"""Tokens per second on CPU cores: `windlass train` beside transformers' Trainer and a loop through Accelerate, in turns.

    python benchmarks/throughput.py [--rounds 3] [--only fp32 bf16] [--write]

One job for all: a Qwen3 of 18.9 million parameters from random weights, 4 sequences of 256 tokens a step on each rank, AdamW,
clip 1.0, warm-up and cosine. Each is given as a user would give it: windlass a recipe and its own model, the others
transformers' model (SDPA, no cache) and the flags of their fastest known setting (fused AdamW, autocast for bf16). Every
measurement is a process of its own, or a world of two; a round runs the three of a row one after another, in an order that
turns. A rate is of steps 11 to 30: tokens over wall seconds, from one step's end to another's. A row has the median over the
rounds, the spread (largest over smallest), and the rate of windlass over that of each other.

Ranks share the cores: one rank has a thread per core, two have one each. The load of the machine is noted: figures of a busy
one are no result, and --write refuses them.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "throughput.json"
QUIET_LOAD = 0.7  # one-minute load at the start, above which nothing is written
STEPS, UNCOUNTED, MICRO_BATCH, LENGTH, VOCABULARY = 30, 10, 4, 256, 4096  # a third of the steps is not counted
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
PEAK_RATE, WARM_UP, DECAY = 3e-4, 5, 0.1
CONTENDERS = ("windlass", "trainer", "accelerate")
ROWS = {
    "fp32": ("fp32", False, 1),
    "fp32 compiled": ("fp32", True, 1),
    "bf16": ("bf16", False, 1),
    "bf16 compiled": ("bf16", True, 1),
    "fp32, 2 ranks": ("fp32", False, 2),
    "bf16, 2 ranks": ("bf16", False, 2),
}
"""name -> precision, whether compiled, ranks."""


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
        "parallel": {"compile": compiled},
        "optim": {"learning_rate": PEAK_RATE, "warmup_steps": WARM_UP, "weight_decay": DECAY},
        "checkpoint": {"every_steps": 10 * STEPS},
        "report": {"every_steps": UNCOUNTED},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(tree))
    return path


def windlass_rate(folder: Path, policy: str, compiled: bool, ranks: int) -> float:
    """From the lines of steps 20 and 30 in events.jsonl."""
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
    subprocess.run([*command, f"run.directory={run}"], check=True, stdout=subprocess.DEVNULL, env=_threads(ranks))
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    seconds = [line["step_s"] * UNCOUNTED for line in lines if line["kind"] == "step" and line["step"] > UNCOUNTED]
    return MICRO_BATCH * LENGTH * ranks * (STEPS - UNCOUNTED) / sum(seconds)


def rival_rate(name: str, policy: str, compiled: bool, ranks: int) -> float:
    """What the process of rank 0 prints."""
    port, processes = _free_port(), []
    for rank in range(ranks):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = _threads(ranks) | ({key: str(value) for key, value in names.items()} if ranks > 1 else {})
        command = [sys.executable, __file__, "--rival", name, policy, str(int(compiled))]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    said = [process.communicate() for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(said[0][1][-2000:])
    return ranks * float(said[0][0].splitlines()[-1])


def _threads(ranks: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def rival_model() -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, use_cache=False, attn_implementation="sdpa")
    return Qwen3ForCausalLM(config)


def rows_of_ids() -> Any:
    import torch

    ids = torch.randint(0, VOCABULARY, (MICRO_BATCH * STEPS * 2, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(policy: str, compiled: bool) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_arguments: Any, **_more: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            max_steps=STEPS,
            per_device_train_batch_size=MICRO_BATCH,
            learning_rate=PEAK_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=WARM_UP,
            weight_decay=DECAY,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=policy == "bf16",
            torch_compile=compiled,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(rival_model(), arguments, train_dataset=rows_of_ids(), callbacks=[Clock()]).train()
    return MICRO_BATCH * LENGTH * (STEPS - UNCOUNTED) / (ends[-1] - ends[UNCOUNTED - 1])


def accelerate(policy: str, compiled: bool) -> float:
    import torch
    from accelerate import Accelerator
    from transformers import get_cosine_schedule_with_warmup

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if policy == "bf16" else "no")
    model = rival_model()
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, weight_decay=DECAY, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARM_UP, STEPS)
    loader = torch.utils.data.DataLoader(rows_of_ids(), batch_size=MICRO_BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if compiled:
        model = torch.compile(model)
    ends: list[float] = []
    while len(ends) < STEPS:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
            if len(ends) == STEPS:
                break
    return MICRO_BATCH * LENGTH * (STEPS - UNCOUNTED) / (ends[-1] - ends[UNCOUNTED - 1])


def measure(name: str, rounds: int, folder: Path) -> dict[str, Any]:
    policy, compiled, ranks = ROWS[name]
    rates: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for turn in range(rounds):
        for contender in [*CONTENDERS[turn % 3 :], *CONTENDERS[: turn % 3]]:
            if contender == "windlass":
                rate = windlass_rate(folder, policy, compiled, ranks)
            else:
                rate = rival_rate(contender, policy, compiled, ranks)
            rates[contender].append(rate)
            print(f"{name}: {contender} {rate:,.0f} tokens/s", flush=True)
    medians = {contender: statistics.median(found) for contender, found in rates.items()}
    found: dict[str, Any] = {
        contender: {"tokens_per_s": round(medians[contender]), "spread": round(max(of) / min(of), 3)}
        for contender, of in rates.items()
    }
    return found | {f"over {other}": round(medians["windlass"] / medians[other], 3) for other in CONTENDERS[1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows")
    parser.add_argument("--write", action="store_true", help="write the rows, if the machine is quiet")
    parser.add_argument("--rival", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rival is not None:
        name, policy, compiled = arguments.rival
        print({"trainer": trainer, "accelerate": accelerate}[name](policy, compiled == "1"))
        return 0
    load = os.getloadavg()[0]
    machine = {
        "cores": os.cpu_count(),
        "cpu": platform.processor() or platform.machine(),
        "load_at_start": round(load, 2),
    }
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        write_ids(Path(folder))
        for name in arguments.only:
            row = measure(name, arguments.rounds, Path(folder))
            print(f"{name}: {row}", flush=True)
            result["rows"][name] = row | {"machine": machine, "versions": versions, "rounds": arguments.rounds}
            if arguments.write and load <= QUIET_LOAD:
                RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.write and load > QUIET_LOAD:
        print(f"not written: load {load:.1f} at the start, above {QUIET_LOAD}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
