"""What a trainer adds to a bare loop, counted: calls, ATen operations and scalar reads per step.

    python benchmarks/overhead.py [--layers 12] [--functions 30] [--over-ranks]

Each contender runs in a process of its own (contenders.py); meters/counting.py says how they are counted.

    bare         batches are ready in a list; forward, backward, clip_grad_norm_, optimizer, LambdaLR, zero_grad
    bare+loader  the same with torch's DataLoader, as the next but ours have it
    windlass     `windlass.training.loop.train` on a recipe, as a user starts it
    accelerate   the same loop through Accelerate
    trainer      transformers' Trainer, progress bar and reports off
    bare fsdp2   the bare loop on rank 0 of two, in bf16 by FSDP2: a unit per block, and one for the rest
    windlass fsdp2  the same recipe on two ranks, with precision.policy=bf16

The two of FSDP2 are counted with 2 and with 12 layers, whatever --layers is: what a layer costs shows there. --over-ranks counts
them alone.

Names that end in @10 log every 10 steps, so twice in a window; the others do not log in it. What a logging step of ours costs is
the difference. The contenders must end with the same validation loss, or they did not do the same work.

Limits for windlass over bare, and over bare fsdp2: at most 300 calls, 10 operations and 0 reads per step. Exit code 1 when one is
exceeded, or when a contender trained something else. `--functions N` prints where windlass differs from bare. Results are
written to benchmarks/results/overhead.json.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from meters.contenders import LOOPS, recipe, validation_loss, write_corpus
from meters.counting import STEPS, Count

from windlass.data.prepare.prepare import prepare
from windlass.hardware import cpu_name
from windlass.model.transformer import Decoder

RESULTS = Path(__file__).parent / "results" / "overhead.json"
LIMITS = {"calls": 300, "operations": 10, "reads": 0}
CONTENDERS = ("bare", "bare+loader", "windlass", "windlass@10", "accelerate", "trainer", "trainer@10")
BARE_OVER_RANKS, WINDLASS_OVER_RANKS = OVER_RANKS = ("bare fsdp2", "windlass fsdp2")
RANKS = 2
LAYERS_OVER_RANKS = (2, 12)
OVER_RANKS_KEY = "bf16 by FSDP2"
ALIKE = {"bare": 1e-5, BARE_OVER_RANKS: 1e-2}  # validation losses; bf16 has 8 bits, and 55 updates follow each other
EXPLAINED = ("windlass", "accelerate", "trainer")  # whose functions and operations are in the results by name
KEPT = 40  # the largest differences; the rest are small
LOG_NEVER = 1000  # more steps than a contender makes; the first and the last are logged all the same


def count_one(name: str, folder: Path, num_layers: int) -> None:
    """In the contender's own process: trains, and leaves <folder>/<name>.json."""
    torch.set_num_threads(1)
    loop, _, every = name.partition("@")
    log_every = int(every or LOG_NEVER)
    config = recipe(folder, name, num_layers, log_every, RANKS if name in OVER_RANKS else 1)
    count = Count(Decoder.forward.__code__)
    decoder = LOOPS[loop](config, count, log_every)
    threading.setprofile(None)  # type: ignore[arg-type]
    found = count.per_step() | {"validation_loss": validation_loss(config, decoder)}
    if os.environ.get("RANK", "0") == "0":
        (folder / f"{name}.json").write_text(json.dumps(found))


def count_all(names: tuple[str, ...], num_layers: int) -> dict[str, dict[str, Any]]:
    """name -> what `Count.per_step` found, and the validation loss. One process each; RANKS for those of OVER_RANKS."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        prepare(recipe(folder, "prepare", num_layers, LOG_NEVER).data, {}, lambda _sentence: None)
        with ThreadPoolExecutor(2) as pool:  # two at a time: what is counted does not depend on speed
            list(pool.map(lambda contender: _run(contender, folder, num_layers), names))
        return {contender: json.loads((folder / f"{contender}.json").read_text()) for contender in names}


def _run(contender: str, folder: Path, num_layers: int) -> None:
    command = [sys.executable, __file__, "--one", contender, "--folder", str(folder), "--layers", str(num_layers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    worlds = [_rank_names(rank, port) for port in [_free_port()] for rank in range(RANKS)]
    ranks = worlds if contender in OVER_RANKS else [{}]
    with ThreadPoolExecutor(RANKS) as pool:
        done = pool.map(
            lambda own: subprocess.run(command, env=environment | own, capture_output=True, text=True), ranks
        )
        for one in done:
            if one.returncode:
                raise SystemExit(f"{contender} failed:\n{one.stdout}{one.stderr}")


def _rank_names(rank: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in own.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def failures(found: dict[str, dict[str, Any]], ours: str = "windlass", bare: str = "bare") -> list[str]:
    """A sentence per limit that windlass exceeds, and per contender that did not train the same."""
    sentences = []
    for kind, limit in LIMITS.items():
        over = found[ours][kind] - found[bare][kind]
        if over > limit:
            sentences.append(f"{ours} makes {over:.4g} {kind} per step more than the bare loop; the limit is {limit}")
    wanted = found[bare]["validation_loss"]
    for name, one in found.items():
        if abs(one["validation_loss"] - wanted) > ALIKE[bare]:
            sentences.append(
                f"{name} ends with validation loss {one['validation_loss']:.7f}, the bare loop with {wanted:.7f}"
            )
    return sentences


def difference(found: dict[str, dict[str, Any]], contender: str, part: str, bare: str = "bare") -> dict[str, float]:
    """What a contender has more of than the bare loop (less: negative), by name, the largest first; at most KEPT of them."""
    ours, theirs = found[contender][part], found[bare][part]
    changes = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in {*ours, *theirs}}
    names = sorted((name for name in changes if changes[name]), key=lambda name: (-abs(changes[name]), name))
    return {name: changes[name] for name in names[:KEPT]}


def report(found: dict[str, dict[str, Any]], num_layers: int) -> dict[str, Any]:
    kinds = ("calls", "operations", "reads", "calls_in_other_threads", "validation_loss")
    rows = {}
    for name, one in found.items():
        over = {f"{kind}_over_bare": one[kind] - found["bare"][kind] for kind in LIMITS}
        rows[name] = {kind: one[kind] for kind in kinds} | over
    lines = STEPS / 10
    rows["windlass, per logging step"] = {
        k: (found["windlass@10"][k] - found["windlass"][k]) * STEPS / lines for k in LIMITS
    }
    return {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/overhead.py --layers {num_layers}",
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.system()},
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")},
        "limits": LIMITS,
        "rows": rows,
        "calls_over_bare": {name: difference(found, name, "by_function") for name in EXPLAINED},
        "operations_over_bare": {name: difference(found, name, "by_operation") for name in EXPLAINED},
    }


def over_ranks(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The same of the two contenders of FSDP2."""
    kinds = (*LIMITS, "validation_loss")
    rows = {name: {kind: found[name][kind] for kind in kinds} for name in OVER_RANKS}
    ours, bare = (rows[name] for name in (WINDLASS_OVER_RANKS, BARE_OVER_RANKS))
    return {
        "rows": rows,
        "over_bare": {kind: ours[kind] - bare[kind] for kind in LIMITS},
        "calls_over_bare": difference(found, WINDLASS_OVER_RANKS, "by_function", BARE_OVER_RANKS),
        "operations_over_bare": difference(found, WINDLASS_OVER_RANKS, "by_operation", BARE_OVER_RANKS),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layers", type=int, default=12, help="decoder layers; what a trainer costs may grow with them"
    )
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="print the N functions that differ most")
    parser.add_argument("--over-ranks", action="store_true", help="count the two of FSDP2 alone; other rows stay")
    parser.add_argument("--one", choices=(*CONTENDERS, *OVER_RANKS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        count_one(arguments.one, arguments.folder, arguments.layers)
        return 0
    result: dict[str, Any] = json.loads(RESULTS.read_text()) if arguments.over_ranks else {}
    wrong = []
    if not arguments.over_ranks:
        found = count_all(CONTENDERS, arguments.layers)
        result |= report(found, arguments.layers)
        wrong += failures(found)
        show(result, arguments.functions)
    result[OVER_RANKS_KEY], more = count_over_ranks()
    wrong += more
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


def count_over_ranks() -> tuple[dict[str, Any], list[str]]:
    """Rows of FSDP2 by the number of layers, printed too, and the limits that they exceed."""
    rows: dict[str, Any] = {}
    wrong = []
    for layers in LAYERS_OVER_RANKS:
        found = count_all(OVER_RANKS, layers)
        rows[str(layers)] = over_ranks(found)
        wrong += failures(found, WINDLASS_OVER_RANKS, BARE_OVER_RANKS)
        over = rows[str(layers)]["over_bare"]
        print(f"bf16 by FSDP2, {layers} layers: windlass {', '.join(f'{over[kind]:+.1f} {kind}' for kind in LIMITS)}")
    return {"date": datetime.date.today().isoformat(), "ranks": RANKS, **rows}, wrong


def show(result: dict[str, Any], num_functions: int) -> None:
    """The table of one process."""
    for part in ("calls_over_bare", "operations_over_bare"):
        for name, number in list(result[part]["windlass"].items())[:num_functions]:
            print(f"{number:+9.1f}  {name}")
    print(
        f"{'per step':<12}  {'calls':>8}  {'over bare':>9}  {'ATen ops':>8}  {'over bare':>9}  {'reads':>5}  {'threads':>7}"
    )
    for name, row in ((name, result["rows"][name]) for name in CONTENDERS):
        print(
            f"{name:<12}  {row['calls']:>8.1f}  {row['calls_over_bare']:>+9.1f}  {row['operations']:>8.1f}  "
            f"{row['operations_over_bare']:>+9.1f}  {row['reads']:>5.1f}  {row['calls_in_other_threads']:>7.1f}"
        )
    line = result["rows"]["windlass, per logging step"]
    print(
        f"windlass, a logging step: {line['calls']:+.0f} calls, {line['operations']:+.0f} ops, {line['reads']:+.0f} reads"
    )


if __name__ == "__main__":
    sys.exit(main())
