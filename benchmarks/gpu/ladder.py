"""The ladder: SmolLM3-3B at 8,192 tokens, from the usual first try to windlass's settings, one change at a time.

    python benchmarks/gpu/ladder.py --minutes 8
    python benchmarks/gpu/ladder.py --device cpu --tiny --out trial.json          # tries the script

The first rung is the usual one: one sequence per step, eager, a dense attention mask, fp32 logits, AdamW by multi-tensor
kernels, fp32 masters with bf16 compute. Each rung keeps what the rungs before it changed. From `recompute` on blocks are
recomputed, because eight sequences do not fit with dense logits otherwise; the last two rungs take it back. A rung's
micro-batch is the largest that fits, its tokens per step stay. Every rung has beside it what floor.py expects of it.

Shown per rung: tokens/s, MFU by causal and by full attention (PaLM), peak memory, the floor's tokens/s and how far off it is.
Measured first: the last rung and the first, since they say most; then the others.
"""

import sys
from dataclasses import replace

import torch
from book import Book, print_table
from candidates import measure_first_fit, smaller
from cells import Cell, run_script, sources_of
from step import SOURCES, Setup

SECONDS = 12.0  # of timed steps per rung
CHANGES: tuple[tuple[str, dict[str, object]], ...] = (
    ("first try", {}),
    ("right attention", {"attention": "causal"}),
    ("recompute", {"recompute": "full"}),
    ("batch", {"sequences_per_step": 8, "micro_batch": 4}),
    ("compile", {"compile": True}),
    ("chunked loss", {"loss": "chunked"}),
    ("fused optimizer", {"kernel": "fused"}),
    ("recompute less", {"recompute": "selective"}),
    ("no recomputation", {"recompute": "none"}),
)
ORDER = (
    "no recomputation",
    "first try",
    "compile",
    "batch",
    "chunked loss",
    "right attention",
    "recompute less",
    "fused optimizer",
    "recompute",
)


def rungs(tiny: bool) -> dict[str, list[Setup]]:
    """Name -> the rung's settings, largest micro-batch first."""
    preset, length = ("tiny", 64) if tiny else ("smollm3-3b", 8192)
    setup = Setup(preset, length, 1, 1, compile=False, loss="dense", kernel="foreach", attention="masked")
    found = {}
    for name, change in CHANGES:
        setup = replace(setup, **change)  # type: ignore[arg-type]
        sizes = [size for size in (4, 2, 1) if size <= setup.micro_batch]
        found[name] = smaller(setup, sizes)
    return found


def make_cells(tiny: bool) -> list[Cell]:
    known = rungs(tiny)
    assert set(ORDER) == set(known)
    return [_cell(name, known[name], 0.2 if tiny else SECONDS) for name in ORDER]


def _cell(name: str, setups: list[Setup], seconds: float) -> Cell:
    def measure(device: torch.device) -> dict[str, object]:
        return measure_first_fit(setups, device, seconds)

    compiles = setups[0].compile
    settings = {"setups": [vars(setup) for setup in setups], "seconds": seconds}
    return Cell(name, 20.0 + 25.0 * compiles + seconds, measure, sources_of(*SOURCES), settings)


def show(book: Book) -> None:
    rows, lines = book.rows(), []
    for name, _ in CHANGES:
        row = rows.get(name)
        if row is None or row["status"] != "measured":
            lines.append([name, row["status"] if row else "not yet", *[None] * 8])
            continue
        one = row["result"]
        mfus = [100 * one[key] if one[key] is not None else None for key in ("mfu_causal", "mfu_palm")]
        should, off = one["floor_practical_tokens_per_s"], one["over_practical"]
        memory = [one["allocated_gib"], one["reserved_gib"]]
        deviation = f"{100 * off:+.0f} %" if off is not None else None
        lines.append(
            [name, one["tokens_per_s"], *mfus, *memory, one["setup"]["micro_batch"], one["step_ms"], should, deviation]
        )
    header = ("rung", "tokens/s", "MFU %", "PaLM %", "GiB", "reserved", "micro", "step ms", "floor", "off")
    print_table(f"SmolLM3-3B at 8,192 on {book.run['device']}, torch {book.run['torch']}", header, lines)
    for name, row in rows.items():
        if row["status"] == "measured" and "mark" in row["result"]:
            print(f"{name}: {row['result']['mark']}")


def main(arguments: list[str] | None = None) -> int:
    return run_script("ladder", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
