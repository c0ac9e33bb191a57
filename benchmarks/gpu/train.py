"""`windlass train` itself on one GPU: what a recipe that sets no layout trains per second, and what a save costs.

    python benchmarks/gpu/train.py --minutes 3
    python benchmarks/gpu/train.py --device cpu --tiny --out trial.json        # tries the script

The recipe names model, text, sequence length and tokens per step, as headline.py's row of that model has them. Micro-batch,
recomputation, compilation and precision are left to `auto`. Text is made of random words. The figures are read from the run's
own events: tokens/s is the median over logged intervals without warm-up and without a save; the wait of a save is what the
interval around it took beyond that median. A save is written in the background, 12 bytes per parameter.
"""

import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from book import Book, print_table
from cells import Cell, run_script, sources_of
from command import events_of, train, write_made_up_text
from step import TINY_MODEL

LOGGED: Final = 3  # steps between two logged ones
STEPS, SAVE_AT = 30, 16
DOCUMENTS, WORDS = 2500, 300  # words of a document; about two million tokens of the vocabulary below
VOCABULARY: Final = 4096


def make_cells(tiny: bool) -> list[Cell]:
    model = TINY_MODEL if tiny else {"preset": "qwen2.5-1.5b"}
    recipe = {
        "run": {"directory": "run", "steps": STEPS, "tokens_per_step": 256 if tiny else 65536},
        "model": model,
        "data": {
            "directory": "data",
            "sources": [{"path": "text.jsonl"}],
            "tokenizer": {"train": 400 if tiny else VOCABULARY},
            "sequence_length": 64 if tiny else 4096,
            "validation": "none",
        },
        "checkpoint": {"every_steps": SAVE_AT, "keep_last": 1},
        "report": {"every_steps": LOGGED},
    }
    sources = sources_of("benchmarks/gpu/train.py", "benchmarks/gpu/command.py", "src/windlass")
    documents = DOCUMENTS // 50 if tiny else DOCUMENTS
    name = "tiny" if tiny else "qwen2.5-1.5b"
    return [Cell(name, 150.0, lambda device: measure_train(recipe, documents), sources, {"recipe": recipe})]


def measure_train(recipe: dict[str, Any], documents: int) -> dict[str, Any]:
    """Trains in a process of its own and a scratch directory."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_made_up_text(scratch / "text.jsonl", documents, WORDS)
        train(recipe, scratch)
        return figures(events_of(scratch / "run"))


def figures(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a run's events: rates, what a save cost, what was derived."""
    (start,) = (event for event in events if event["kind"] == "start")
    steps = [event for event in events if event["kind"] == "step"]
    saves = [event for event in events if event["kind"] == "checkpoint"]
    plain, around = [], []
    for one, two in itertools.pairwise(steps):
        if one["warm_up"]:
            continue
        seconds = (two["time"] - one["time"]) / (two["step"] - one["step"])
        is_around = one["step"] <= SAVE_AT < two["step"]
        (around if is_around else plain).append((seconds, two))
    step_s = statistics.median(seconds for seconds, _ in plain)
    ((around_s, _),) = around  # a run without its save raises
    last = plain[-1][1]
    return {
        "tokens_per_s": round(statistics.median(event["tokens_per_s"] for _, event in plain), 1),
        "mfu": statistics.median(event["mfu"] for _, event in plain) if last["mfu"] else None,
        "step_ms": round(step_s * 1e3, 2),
        "slowest_ms": round(max(seconds for seconds, _ in plain) * 1e3, 2),
        "save_wait_s": round((around_s - step_s) * LOGGED, 3),
        "save_stall_s": saves[0]["stall_s"],
        "save_bytes": saves[0]["bytes"],
        "memory_bytes": last["memory_bytes"],
        "loss": [round(steps[0]["loss"], 4), round(steps[-1]["loss"], 4)],
        "derived": start["derived"],
    }


def show(book: Book) -> None:
    lines: list[list[object]] = []
    for name, row in book.rows().items():
        if row["status"] != "measured":
            lines.append([name, row["status"], *[None] * 4])
            continue
        one = row["result"]
        lines.append([name, one["tokens_per_s"], one["mfu"], one["step_ms"], one["save_wait_s"], one["save_bytes"]])
    title = f"windlass train on {book.run['device']}, torch {book.run['torch']}"
    print_table(title, ("model", "tokens/s", "MFU", "step ms", "a save's wait s", "bytes saved"), lines)
    for name, row in book.rows().items():
        for key, words in row.get("result", {}).get("derived", {}).items():
            print(f"  {name}: {key}: {words}")


def main(arguments: list[str] | None = None) -> int:
    return run_script("train", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
