"""Headline rows: what one GPU trains per second, four models, windlass's best known settings for each, bf16.

    python benchmarks/gpu/headline.py --minutes 8
    python benchmarks/gpu/headline.py --device cpu --tiny --out trial.json        # tries the script

The step is windlass's own, compiled per block, about 65,000 tokens per step. For each model all settings that fit and may be the
fastest are measured in one start, and the fastest is kept, the others beside it (candidates.py); a layout with one change takes
the first that fits. Micro-batches are of about 16,000 tokens, where products have reached their rate. Selective recomputation
with two sequences comes before none with one: it repeats no product, and products of twice the rows are a little faster.
Llama-3.1-8B has bf16 optimizer states (with fp32 states 141 GB leave no room for two sequences), and on 80 GB bf16 weights too:
`pure`.
Candidates of 32,768 tokens per micro-batch ask whether larger products are worth more recomputation. Qwen3-30B-A3B has six of its
48 layers, which fit one GPU: 4.4 billion parameters, of which a token uses 1.0.
Llama-3.1-8B is measured in fp8 too, at 4,096 and at 8,192 positions: the goal is 16,000 tokens/s at 8,192; its MFU is a share of
bf16's peak. Qwen3-4B's adapters have rank 16 on all linear layers; their rows have no MFU.

The bar is the best public bf16 figure with a margin (Llama-3-8B, T 4096, one H200: 10,471 tokens/s with full recomputation),
the goal is 65 % MFU, about what floor.py's LIMIT allows. Both are for an H200; on another card they are only for orientation.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from book import Book, print_table
from candidates import measure_best, measure_first_fit
from cells import Cell, run_script, sources_of
from step import SOURCES, Setup

SECONDS = 12.0  # of timed steps per row
FP8_GOAL = 16_000  # tokens/s of Llama-3.1-8B at 8,192 positions


@dataclass(frozen=True)
class Row:
    preset: str
    sequence_length: int
    tries: tuple[tuple[str, int], ...]
    """(recomputation, micro-batch), the fastest expected first."""
    states: str
    bar: float | None
    """tokens/s that beat every public figure; None where none is known."""
    goal: float | None


def tries(large: int, small: int, *larger: tuple[str, int]) -> tuple[tuple[str, int], ...]:
    """`larger`: beyond the tokens at which products have reached their rate, so measured last."""
    pairs = [(kind, size) for size in (large, small) for kind in ("none", "selective")]
    return tuple(dict.fromkeys([*pairs, ("full", large), ("full", small), *larger]))


ROWS = (  # the most telling first
    Row("smollm3-3b", 8192, tries(2, 1, ("selective", 4)), "fp32", 24_600, 29_100),
    Row("llama-3.1-8b", 4096, tries(2, 1), "bf16", 12_000, 13_300),
    Row("qwen3-4b", 4096, tries(4, 2), "fp32", None, None),
    Row("qwen2.5-1.5b", 4096, tries(4, 2, ("none", 8)), "fp32", None, None),
)
EXPERTS = Row("qwen3-30b-a3b", 4096, tries(4, 2), "fp32", None, None)


def setups_of(row: Row, tiny: bool) -> list[Setup]:
    """Settings to try, the fastest expected first."""
    length = 64 if tiny else row.sequence_length
    best = Setup("tiny" if tiny else row.preset, length, 8 if tiny else 65536 // length, 1, states=row.states)
    found = [replace(best, recompute=kind, micro_batch=size) for kind, size in row.tries]
    if row.states == "bf16":
        found += [replace(setup, policy="bf16-pure") for setup in found]
    return found


def make_cells(tiny: bool) -> list[Cell]:
    """Every model in its best settings; then what else these could be, one change each."""
    seconds = 0.2 if tiny else SECONDS
    cells = [_best_cell(row.preset, setups_of(row, tiny), seconds) for row in ROWS]
    small, large = ROWS[0], ROWS[1]
    long = replace(large, sequence_length=8192, tries=tries(1, 1), bar=None, goal=FP8_GOAL)
    others: tuple[tuple[Row, str, dict[str, Any]], ...] = (
        (large, "gradients added in bf16", {"gradients": "bf16"}),
        (large, "rounded to nearest", {"rounding": "nearest"}),
        (small, "pure", {"policy": "bf16-pure", "states": "bf16"}),
        (large, "fp8 tensorwise", {"policy": "fp8"}),
        (long, "fp8 tensorwise at 8192", {"policy": "fp8"}),
        (long, "fp8 rowwise at 8192", {"policy": "fp8", "scaling": "rowwise"}),
        (ROWS[2], "LoRA", {"adapter": "lora"}),
        (ROWS[2], "QLoRA", {"adapter": "qlora"}),
        (EXPERTS, "six layers", {"layers": 6}),
        (EXPERTS, "six layers, not compiled", {"layers": 6, "compile": False}),
    )
    for row, words, change in others:
        setups = [s for s in setups_of(row, tiny) if s.policy == "bf16" or "gradients" not in change]
        cells.append(
            _cell(f"{row.preset}, {words}", list(dict.fromkeys(replace(setup, **change) for setup in setups)), seconds)
        )
    return cells


def _best_cell(name: str, setups: list[Setup], seconds: float) -> Cell:
    budget_s = 2 * (
        40.0 + 1.5 * seconds
    )  # two candidates are worth it; one took 23 to 61 s on an H200 (gpu-headline.json)

    def measure(device: torch.device) -> dict[str, object]:
        return measure_best(setups, device, seconds, budget_s)

    settings = {"setups": [vars(setup) for setup in setups], "seconds": seconds, "budget_s": budget_s}
    return Cell(name, budget_s, measure, sources_of(*SOURCES), settings)


def _cell(name: str, setups: list[Setup], seconds: float) -> Cell:
    def measure(device: torch.device) -> dict[str, object]:
        return measure_first_fit(setups, device, seconds)

    settings = {"setups": [vars(setup) for setup in setups], "seconds": seconds}
    return Cell(name, 75.0 + 1.5 * seconds, measure, sources_of(*SOURCES), settings)


def show(book: Book) -> None:
    rows, lines = book.rows(), []
    bars = {row.preset: (row.bar, row.goal) for row in ROWS}
    bars |= {f"llama-3.1-8b, fp8 {scaling} at 8192": (None, FP8_GOAL) for scaling in ("tensorwise", "rowwise")}
    for name in (cell.name for cell in make_cells(False)):
        row, (bar, goal) = rows.get(name), bars.get(name) or bars.get(name.partition(",")[0], (None, None))
        if row is None or row["status"] != "measured":
            lines.append([name, row["status"] if row else "not yet", bar, goal, *[None] * 7])
            continue
        one = row["result"]
        mfus = [100 * one[key] if one[key] is not None else None for key in ("mfu_causal", "mfu_palm")]
        setup = one["setup"]
        words = f"{setup['recompute']} x{setup['micro_batch']}"
        memory, should = one["allocated_gib"], one["floor_practical_tokens_per_s"]
        lines.append(
            [name, one["tokens_per_s"], bar, goal, *mfus, should, memory, one["step_ms"], words, setup["states"]]
        )
    header = ("model", "tokens/s", "bar", "goal", "MFU %", "PaLM %", "floor", "GiB", "step ms", "recompute", "states")
    print_table(f"one {book.run['device']}, torch {book.run['torch']}, bf16", header, lines)
    for name, row in rows.items():
        if row["status"] == "measured" and "mark" in row["result"]:
            print(f"{name}: {row['result']['mark']}")


def main(arguments: list[str] | None = None) -> int:
    return run_script("headline", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
