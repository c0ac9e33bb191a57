"""A run on a GPU that is killed, one that is stopped, and one that cannot fit: what windlass promises of each.

    python benchmarks/gpu/faults.py --minutes 4
    python benchmarks/gpu/faults.py --device cpu --tiny --out trial.json        # tries the script

    SIGKILL      the same command goes on from the last save, and every loss has the bits of a run that nobody killed
    SIGTERM      it saves and leaves with 75; the same command goes on, with the same bits
    too large    exit code 2, what filled the device and what to change; no traceback

Runs are under `run.deterministic`. A row that is not as promised is `failed`.
"""

import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from book import Book, print_table
from cells import Cell, plain, run_script, sources_of
from command import ended, events_of, losses_of, signal_when, start, train, write_made_up_text
from step import TINY_MODEL

STEPS, SAVE_EVERY = 40, 10
AFTER: Final = 15
"""The step after which the signal comes."""


def make_cells(tiny: bool) -> list[Cell]:
    sources = sources_of("benchmarks/gpu/faults.py", "benchmarks/gpu/command.py", "src/windlass")
    recipe = recipe_of(tiny)

    def cell(name: str, number: signal.Signals, left_with: int) -> Cell:
        return Cell(name, 75.0, lambda device: signalled(recipe, number, left_with), sources, {"recipe": recipe})

    large = too_large(recipe)
    return [
        cell("SIGKILL", signal.SIGKILL, -signal.SIGKILL),
        cell("SIGTERM", signal.SIGTERM, 75),
        *([] if tiny else [Cell("too large", 40.0, lambda device: refused(large), sources, {"recipe": large})]),
    ]


def recipe_of(tiny: bool) -> dict[str, Any]:
    length = 64 if tiny else 1024
    return {
        "run": {"directory": "run", "steps": STEPS, "tokens_per_step": 8 * length, "deterministic": True},
        "model": TINY_MODEL if tiny else {"preset": "gpt2-124m"},
        "data": {
            "directory": "data",
            "sources": [{"path": "text.jsonl"}],
            "tokenizer": {"train": 400 if tiny else 4096},
            "sequence_length": length,
            "validation": "none",
        },
        "checkpoint": {"every_steps": SAVE_EVERY, "keep_last": 5},
        "report": {"every_steps": 1},
    }


def too_large(recipe: dict[str, Any]) -> dict[str, Any]:
    """An 8B model whose step was given whole: nothing is left to choose."""
    run = {key: value for key, value in recipe["run"].items() if key != "deterministic"}
    data = recipe["data"] | {"sequence_length": 8192}
    whole = {"run": run | {"tokens_per_step": 8 * 8192, "micro_batch": 8}, "parallel": {"recompute": "none"}}
    return recipe | {"model": {"preset": "llama-3.1-8b"}, "data": data} | whole


def signalled(recipe: dict[str, Any], number: signal.Signals, left_with: int) -> dict[str, Any]:
    """One run as it is, one that gets the signal after a step and goes on."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for scratch in (one, other):
            write_made_up_text(Path(scratch) / "text.jsonl", 400, 300)
        train(recipe, Path(one))
        undisturbed = losses_of(events_of(Path(one) / "run"))
        run, process = Path(other) / "run", start(recipe, Path(other))
        signal_when(process, run, is_time, number)
        ended(process, left_with)
        before = losses_of(events_of(run))
        train(recipe, Path(other))
        events = events_of(run)
    (resumed,) = (event["step"] for event in events if event["kind"] == "resume")
    found = losses_of(events)
    if found != undisturbed:
        apart = [step for step in undisturbed if found.get(step) != undisturbed[step]]
        raise RuntimeError(f"{len(apart)} of {len(undisturbed)} losses differ, first at step {apart[0]}")
    return {
        "left_with": left_with,
        "last_step_before": max(before),
        "went_on_from": resumed,
        "equal_losses": len(found),
        "first_and_last_loss": [undisturbed[min(undisturbed)], undisturbed[max(undisturbed)]],
    }


def is_time(events: list[dict[str, Any]]) -> bool:
    """Some steps after the first save, once that is committed."""
    return max(losses_of(events), default=0) >= AFTER and any(event["kind"] == "checkpoint" for event in events)


def refused(recipe: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_made_up_text(scratch / "text.jsonl", 400, 300)
        process = start(recipe, scratch)
        printed, _ = process.communicate()
    if process.returncode != 2 or "Traceback" in printed:
        raise RuntimeError(f"left with {process.returncode}: {printed[-600:]}")
    return {"left_with": process.returncode, "words": plain(printed[-1200:])}


def show(book: Book) -> None:
    lines: list[list[object]] = []
    for name, row in book.rows().items():
        one = row.get("result", {})
        lines.append([name, row["status"], *(one.get(key) for key in ("left_with", "went_on_from", "equal_losses"))])
    title = f"faults on {book.run['device']}, torch {book.run['torch']}"
    print_table(title, ("fault", "", "exit code", "went on from step", "equal losses"), lines)


def main(arguments: list[str] | None = None) -> int:
    return run_script("faults", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
