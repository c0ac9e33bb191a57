"""What 16 and 8 bits cost a model: the same run in every precision, its losses beside those of fp32.

    python benchmarks/gpu/learning.py --minutes 8
    python benchmarks/gpu/learning.py --device cpu --tiny --out trial.json        # tries the script

GPT-2 124M, 500 steps of 8,192 tokens, `windlass train` itself. The text is real and on every machine that can run this: the
Python source files of the installed packages. All runs have the same weights and tokens at the start, but for the one with
another seed, which shows how far apart two runs are by chance. `training`: the mean loss of the last fifth of the
steps. `validation`: the loss of held-out files after the last step. Both in nats per token.
"""

import json
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from book import Book, print_table
from cells import Cell, run_script, sources_of
from command import events_of, losses_of, train
from step import TINY_MODEL

REFERENCE: Final = "fp32"
PRECISIONS: Final[dict[str, dict[str, Any]]] = {
    REFERENCE: {"policy": "fp32"},
    "bf16": {"policy": "bf16"},
    "bf16, another seed": {"policy": "bf16"},
    "bf16, states in bf16": {"policy": "bf16", "states": "bf16"},
    "bf16, gradients in bf16": {"policy": "bf16", "gradients": "bf16"},
    "bf16-pure": {"policy": "bf16-pure"},
    "fp8 tensorwise": {"policy": "fp8", "scaling": "tensorwise"},
    "fp8 rowwise": {"policy": "fp8", "scaling": "rowwise"},
}
STEPS, BYTES = 500, 40_000_000
LARGEST: Final = 200_000  # bytes of a file; larger ones are tables and generated


def make_cells(tiny: bool) -> list[Cell]:
    chosen = (REFERENCE, "bf16", "fp8 tensorwise") if tiny else PRECISIONS
    return [_cell(name, recipe_of(name, tiny), 200_000 if tiny else BYTES) for name in chosen]


def _cell(name: str, recipe: dict[str, Any], size: int) -> Cell:
    sources = sources_of("benchmarks/gpu/learning.py", "benchmarks/gpu/command.py", "src/windlass")
    return Cell(name, 90.0, lambda device: measure(recipe, size), sources, {"recipe": recipe, "bytes": size})


def recipe_of(name: str, tiny: bool) -> dict[str, Any]:
    length = 64 if tiny else 1024
    return {
        "run": {
            "directory": "run",
            "steps": 20 if tiny else STEPS,
            "tokens_per_step": 8 * length,
            "seed": int("seed" in name),
        },
        "model": TINY_MODEL if tiny else {"preset": "gpt2-124m"},
        "data": {
            "directory": "data",
            "sources": [{"path": "text.jsonl"}],
            "tokenizer": {"train": 400 if tiny else 16384},
            "sequence_length": length,
        },
        "optim": {"learning_rate": 6e-4, "warmup_steps": 4 if tiny else 50},
        "precision": PRECISIONS[name],
        "evaluate": {"every_steps": 20 if tiny else STEPS},
        "report": {"every_steps": 1},
    }


def measure(recipe: dict[str, Any], size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        files = write_source_files(scratch / "text.jsonl", Path(sysconfig.get_path("purelib")), size)
        train(recipe, scratch)
        events = events_of(scratch / "run")
    losses = list(losses_of(events).values())
    validation = [event["loss"] for event in events if event["kind"] == "validation"]
    (tokens,) = {event["tokens"] for event in events if event["kind"] == "step" and event["step"] == len(losses) - 1}
    return {
        "files": files,
        "tokens": tokens,
        "training": round(statistics.mean(losses[-len(losses) // 5 :]), 5),
        "validation": round(validation[-1], 5),
        "losses": [round(loss, 4) for loss in losses],
    }


def write_source_files(path: Path, packages: Path, size: int) -> int:
    """Python files below `packages`, in the order of their paths, until there are `size` bytes -> how many."""
    found, total = 0, 0
    with path.open("w", encoding="utf-8") as out:
        for file in sorted(packages.rglob("*.py")):
            if total < size and 500 < file.stat().st_size < LARGEST:
                text = file.read_text("utf-8", errors="replace")
                out.write(json.dumps({"text": text}) + "\n")
                found, total = found + 1, total + len(text)
    return found


def show(book: Book) -> None:
    rows = {name: row["result"] for name, row in book.rows().items() if row["status"] == "measured"}
    reference, lines = rows.get(REFERENCE), []
    for name in PRECISIONS:
        if name in rows:
            one = rows[name]
            off = [one[key] - reference[key] if reference else None for key in ("training", "validation")]
            lines.append([name, one["training"], off[0], one["validation"], off[1]])
    title = f"{STEPS} steps of GPT-2 124M on {book.run['device']}, torch {book.run['torch']}: nats per token"
    print_table(title, ("precision", "training", "less fp32", "validation", "less fp32"), lines)


def main(arguments: list[str] | None = None) -> int:
    return run_script("learning", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
