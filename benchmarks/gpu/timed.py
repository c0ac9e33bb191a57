"""Seconds on a device, and what the device did meanwhile.

A GPU is timed by its own events: warm-up, then each repeat between two events, and the median of the repeats. Before each,
256 MiB are written, which empties the level-2 cache (50 MB on an H100, 126 MB on a B200) and keeps the device busy while
the host gets ahead, so that no launch is timed. Repeats fill a fixed time and not a fixed number, because a card that has
worked for a moment only has not yet met its power limit. On a CPU the same calls are timed by the clock: a trial of the code.
"""

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20
WARM_UP = 3
MIN_REPEATS, MAX_REPEATS = 5, 200
SAMPLE_S = 0.3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, the fastest, and over how many."""

    median_s: float
    fastest_s: float
    repeats: int


class Timer:
    """Times calls on one device. `seconds`: how long the repeats of one call go on."""

    def __init__(self, device: torch.device, seconds: float = 0.2):
        self.device, self._seconds = device, seconds
        is_cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if is_cuda else None

    def time(self, call: Callable[[], object]) -> Timing:
        for _ in range(WARM_UP if self._flush is not None else 1):
            call()
        once_s = self._repeat(call, 1)[0]
        repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(self._seconds / max(once_s, 1e-9))))
        found = self._repeat(call, repeats)
        return Timing(statistics.median(found), min(found), repeats)

    def _repeat(self, call: Callable[[], object], repeats: int) -> list[float]:
        if self._flush is None:
            found = []
            for _ in range(repeats):
                start_s = time.perf_counter()
                call()
                found.append(time.perf_counter() - start_s)
            return found
        pairs = []
        for _ in range(repeats):
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]


def kernels_of(call: Callable[[], object], device: torch.device) -> list[dict[str, object]]:
    """What `call` ran on the device, the longest first: kernels by name (on a CPU: operators), with their microseconds."""
    call()
    is_cuda = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:  # without it 2.11 warns
        call()
        if is_cuda:
            torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.key_averages():
        spent_us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if spent_us > 0:
            found[event.key] = found.get(event.key, 0.0) + spent_us
    longest = sorted(found.items(), key=lambda pair: -pair[1])[:8]
    return [{"kernel": name, "us": round(us, 1)} for name, us in longest]


class Sensors:
    """Clock, power and temperature of the GPU over a `with`, as nvidia-smi reports them; nothing where there is none."""

    COMMAND = (
        "nvidia-smi",
        "--query-gpu=clocks.sm,power.draw,temperature.gpu",
        "--format=csv,noheader,nounits",
        "--id=0",
    )

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._samples: list[list[float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sensors":
        if self._is_cuda:
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            try:
                answer = subprocess.run(self.COMMAND, capture_output=True, text=True, timeout=10).stdout
            except (FileNotFoundError, subprocess.TimeoutExpired):
                return
            self._take(answer)

    def _take(self, line: str) -> None:
        try:
            self._samples.append([float(text) for text in line.split(",")])
        except ValueError:  # "[N/A]": a field that this card does not have
            return

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        if self._is_cuda:
            self._thread.join(timeout=10)

    def medians(self) -> dict[str, float] | None:
        """{"sm_mhz", "watts", "celsius"}; None where nothing was answered."""
        if not self._samples:
            return None
        columns = [statistics.median(column) for column in zip(*self._samples)]
        return dict(zip(("sm_mhz", "watts", "celsius"), columns))
