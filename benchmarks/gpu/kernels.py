"""The kernels of a training step, by kind and by name, and the gaps between them: where the headline rows' time goes.

    python benchmarks/gpu/kernels.py --minutes 3
    python benchmarks/gpu/kernels.py --device cpu --tiny --out trial.json        # tries the script

Steps are timed by the clock as headline.py times them, without a synchronisation between them. Then two more are profiled, which
is slower where launches are short. A gap is time between two kernels in which none runs: the device waits for the host there. The
file names the gaps of both profiled steps that are longest together, each by the kernel before it and the one behind it.
"""

import re
import statistics
import sys
from collections.abc import Iterable
from typing import Any, Final

import torch
from book import Book, print_table
from cells import Cell, run_script, sources_of
from step import SOURCES, Setup, Step, one_rank
from torch.autograd import DeviceType

SETUPS: Final = {
    "smollm3-3b": Setup("smollm3-3b", 8192, 4, 2),
    "llama-3.1-8b": Setup("llama-3.1-8b", 4096, 4, 1, states="bf16"),
    "llama-3.1-8b, two sequences, selective": Setup("llama-3.1-8b", 4096, 4, 2, "selective", states="bf16"),
    "llama-3.1-8b, fp8 at 8192": Setup("llama-3.1-8b", 8192, 4, 1, "selective", states="bf16", policy="fp8"),
    "qwen3-4b, LoRA": Setup("qwen3-4b", 4096, 8, 4, adapter="lora"),
    "qwen3-30b-a3b, six layers": Setup("qwen3-30b-a3b", 4096, 8, 4, layers=6),
}
TINY: Final = {"tiny": Setup("tiny", 64, 4, 2, compile=False)}
STEPS: Final = 2  # profiled
SECONDS: Final = 3.0  # of steps by the clock
KINDS: Final = {
    "products": r"gemm|nvjet|cutlass|xmma|cublas",
    "attention": r"cudnn|flash|fmha",
    "compiled": r"triton",
    "copies": r"Memcpy|Memset|copy",
    "norm of the gradients": r"multi_tensor",
    "elementwise": r"elementwise|vectorized",
}
KEPT: Final = 40  # kernels by name in the file, the longest
GAPS_KEPT: Final = 12
LEAST_GAP_US: Final = 20.0  # shorter ones are between any two launches
Run = tuple[str, float, float]
"""A kernel's name, and when it began and ended, in microseconds."""


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def make_cells(tiny: bool) -> list[Cell]:
    return [_cell(name, setup) for name, setup in (TINY if tiny else SETUPS).items()]


def _cell(name: str, setup: Setup) -> Cell:
    sources = (*sources_of("benchmarks/gpu/kernels.py"), *sources_of(*SOURCES))
    return Cell(name, 50.0, lambda device: measure_kernels(setup, device), sources, {"setup": vars(setup)})


def measure_kernels(setup: Setup, device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with one_rank(device):
        step = Step(setup, setup.architecture(), device)
        for _ in range(2):
            step.run()
        wall_s = statistics.median(step.timed(SECONDS))
        wait = torch.cuda.synchronize if is_cuda else float
        wait()
        with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
            for _ in range(STEPS):
                step.run()
            wait()
    spent = [
        (event.key, event.self_device_time_total if is_cuda else event.self_cpu_time_total, event.count)
        for event in profile.key_averages()
    ]
    own = DeviceType.CUDA if is_cuda else DeviceType.CPU  # the host's calls of the driver are events too
    events = [event for event in profile.events() or () if event.device_type == own]
    runs = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    found = summed([row for row in spent if row[1] > 0], wall_s, setup)
    return found | {"gaps": gaps(runs)}


def summed(spent: list[tuple[str, float, int]], wall_s: float, setup: Setup) -> dict[str, Any]:
    """`spent`: (kernel, microseconds, launches) of STEPS steps -> of one."""
    kinds: dict[str, list[float]] = {}
    for kernel, micros, launches in spent:
        total = kinds.setdefault(kind_of(kernel), [0.0, 0])
        total[0] += micros / 1e3 / STEPS
        total[1] += launches / STEPS
    longest = sorted(spent, key=lambda row: -row[1])[:KEPT]
    return {
        "wall_ms": round(wall_s * 1e3, 2),
        "kernels_ms": round(sum(micros for _, micros, _ in spent) / 1e3 / STEPS, 2),
        "tokens": setup.tokens_per_step,
        "kinds": {kind: {"ms": round(ms, 2), "launches": round(n)} for kind, (ms, n) in sorted(kinds.items())},
        "kernels": [
            {"kernel": kernel[:160], "ms": round(micros / 1e3 / STEPS, 2), "launches": round(launches / STEPS)}
            for kernel, micros, launches in longest
        ],
    }


def gaps(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Where no kernel ran, of all profiled steps: the longest sums by the pair of kernels around, the greatest first."""
    found: dict[tuple[str, str], list[float]] = {}
    before, until = "", float("inf")
    for name, start, end in sorted(runs, key=lambda run: run[1]):
        if start - until >= LEAST_GAP_US:
            found.setdefault((before, name), []).append(start - until)
        if before == "" or end > until:
            before, until = name, end
    longest = sorted(found.items(), key=lambda pair: -sum(pair[1]))[:GAPS_KEPT]
    return [
        {"before": one[:100], "behind": two[:100], "ms": round(sum(each) / 1e3, 2), "times": len(each)}
        for (one, two), each in longest
    ]


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
        for gap in one.get("gaps", ())[:4]:
            print(f"  {gap['ms']} ms in {gap['times']} gaps between {gap['before'][:60]} and {gap['behind'][:60]}")


def main(arguments: list[str] | None = None) -> int:
    return run_script("kernels", __doc__, make_cells, show, arguments)


if __name__ == "__main__":
    sys.exit(main())
