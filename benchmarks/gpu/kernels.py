"""The kernels of one training step, by kind and by name: where the headline rows' time goes.

    python benchmarks/gpu/kernels.py --minutes 3
    python benchmarks/gpu/kernels.py --device cpu --tiny --out trial.json        # tries the script

After three steps one is timed by the clock, between two synchronisations, and the next is profiled. What the clock has beyond the
sum of the kernels is the device waiting for the host; it is more here than in a run of steps, whose launches run ahead.
"""

import re
import sys
import time
from typing import Any, Final

import torch
from book import Book, print_table
from cells import Cell, run_script, sources_of
from step import SOURCES, Setup, Step, one_rank

SETUPS: Final = (
    Setup("smollm3-3b", 8192, 4, 2),
    Setup("llama-3.1-8b", 4096, 4, 1, states="bf16"),
)
KINDS: Final = {
    "products": r"gemm|nvjet|cutlass|xmma|cublas",
    "attention": r"cudnn|flash|fmha",
    "compiled": r"triton",
    "copies": r"Memcpy|Memset|copy",
    "norm of the gradients": r"multi_tensor",
    "elementwise": r"elementwise|vectorized",
}
KEPT: Final = 40  # kernels by name in the file, the longest


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def make_cells(tiny: bool) -> list[Cell]:
    setups = (Setup("tiny", 64, 4, 2, compile=False),) if tiny else SETUPS
    return [_cell(setup) for setup in setups]


def _cell(setup: Setup) -> Cell:
    sources = (*sources_of("benchmarks/gpu/kernels.py"), *sources_of(*SOURCES))
    return Cell(setup.preset, 45.0, lambda device: measure_kernels(setup, device), sources, {"setup": vars(setup)})


def measure_kernels(setup: Setup, device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with one_rank(device):
        step = Step(setup, setup.architecture(), device)
        for _ in range(3):
            step.run()
        wait = torch.cuda.synchronize if is_cuda else float
        wait()
        start_s = time.perf_counter()
        step.run()
        wait()
        wall_s = time.perf_counter() - start_s
        with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
            step.run()
            wait()
    spent = [
        (event.key, event.self_device_time_total if is_cuda else event.self_cpu_time_total, event.count)
        for event in profile.key_averages()
    ]
    return summed([row for row in spent if row[1] > 0], wall_s, setup)


def summed(spent: list[tuple[str, float, int]], wall_s: float, setup: Setup) -> dict[str, Any]:
    """`spent`: (kernel, microseconds, launches) of one step."""
    kinds: dict[str, list[float]] = {}
    for kernel, micros, launches in spent:
        total = kinds.setdefault(kind_of(kernel), [0.0, 0])
        total[0] += micros / 1e3
        total[1] += launches
    longest = sorted(spent, key=lambda row: -row[1])[:KEPT]
    return {
        "wall_ms": round(wall_s * 1e3, 2),
        "kernels_ms": round(sum(micros for _, micros, _ in spent) / 1e3, 2),
        "tokens": setup.tokens_per_step,
        "kinds": {kind: {"ms": round(ms, 2), "launches": int(n)} for kind, (ms, n) in sorted(kinds.items())},
        "kernels": [
            {"kernel": kernel[:160], "ms": round(micros / 1e3, 2), "launches": launches}
            for kernel, micros, launches in longest
        ],
    }


def show(book: Book) -> None:
    for name, row in book.rows().items():
        if row["status"] != "measured":
            print(f"{name}: {row['status']}: {row['message'][:100]}")
            continue
        one = row["result"]
        lines: list[list[object]] = [
            [kind, part["ms"], part["launches"], 1e3 * part["ms"] / one["tokens"]]
            for kind, part in sorted(one["kinds"].items(), key=lambda pair: -pair[1]["ms"])
        ]
        lines.append(["all kernels", one["kernels_ms"], None, 1e3 * one["kernels_ms"] / one["tokens"]])
        lines.append(["by the clock", one["wall_ms"], None, 1e3 * one["wall_ms"] / one["tokens"]])
        title = f"{name} on {book.run['device']}, torch {book.run['torch']}: one step of {one['tokens']:,} tokens"
        print_table(title, ("kernels", "ms", "launches", "us per token"), lines)


def main(arguments: list[str] | None = None) -> int:
    return run_script("kernels", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
