"""Records whole steps of a rank that trains, where `windlass profile` asks for them.

A rank that nobody asks reads one number of its own memory per step. One that is asked starts torch's profiler before its next
step, and after the last of them writes a directory with

    trace.json.gz     every operator and kernel, for windlass.profiling.summary and for any viewer of Chrome traces (Perfetto)
    collectives.json  what was sent, by torch's flight recorder (on a GPU the trace has this too)
    memory.pickle     on a GPU: what was allocated, by which line, as pytorch.org/memory_viz shows it
    facts.json        rank, steps, device, and which axes of the layout each process group runs over

It is renamed into its place when it is whole. The other ranks wait meanwhile, as for any slow rank.

Rank 0 also counts the operators and the reads of one step, the second after a start (counts.py): an event of kind `counts`.
"""

import contextlib
import gzip
import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import torch
from torch.profiler import ProfilerActivity

from windlass import flight_recorder
from windlass.profiling.counts import StepCounts
from windlass.profiling.summary import PROFILES
from windlass.safe_text import say

MEMORY_EVENTS: Final = 200_000
"""Allocations that a memory snapshot keeps, the newest."""


def profile_directory(run_directory: Path, step: int, rank: int) -> Path:
    """The directory of a rank's profile that begins after update `step`."""
    return run_directory / PROFILES / f"step-{step:08d}-rank-{rank}"


class ProfileRequests(Protocol):
    """Where requests come in; a Heartbeat is one."""

    def profile_asked(self) -> int: ...

    def profile_answered(self) -> None: ...


class Log(Protocol):
    """A Recorder."""

    def pause(self, cause: str) -> AbstractContextManager[None]: ...

    def event(self, kind: Literal["profile", "counts"], step: int, **fields: Any) -> None: ...


class _Recording:
    """Steps under way: `first` completed updates before them, up to `last`."""

    def __init__(self, first: int, last: int, device: torch.device):
        self.first, self.last = first, last
        self._device = device
        self._numbers = {entry["record_id"] for entry in flight_recorder.entries()}
        self.collectives: list[dict[str, Any]] = []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        # collectives of gloo are known by their shapes; on a GPU their kernels name their sizes
        self._profile = torch.profiler.profile(activities=activities, record_shapes=device.type == "cpu")
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        # torch 2.11 advises acc_events: with it, stop() parses every event, for nobody here
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profile.start()
        self._begin_step(first)

    def _begin_step(self, step: int) -> None:
        self._step = torch.profiler.record_function(f"step {step + 1}")
        self._step.__enter__()

    def _end_step(self) -> None:
        self._step.__exit__(None, None, None)
        for entry in flight_recorder.entries():
            if entry["record_id"] not in self._numbers:
                self._numbers.add(entry["record_id"])
                self.collectives.append(entry)

    def next_step(self, step: int) -> None:
        self._end_step()
        self._begin_step(step)

    def stop(self) -> None:
        self._end_step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.stop()

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        trace = directory / "trace.json"
        self._profile.export_chrome_trace(str(trace))
        # torch compresses line by line at gzip's slowest level: as many seconds as all else, in which every rank waits
        with trace.open("rb") as plain, gzip.open(directory / "trace.json.gz", "wb", compresslevel=6) as packed:
            shutil.copyfileobj(plain, packed, length=1 << 20)
        trace.unlink()
        (directory / "collectives.json").write_text(json.dumps(self.collectives))
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(directory / "memory.pickle"))

    def close(self) -> None:
        """Nothing is recorded from here on."""
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)


class StepRecorder:
    """Records steps of one rank. `axes`: see Mesh.axes_of_groups. `counted`: the step whose operators and reads are counted; None
    for none."""

    def __init__(
        self,
        run_directory: Path,
        rank: int,
        device: torch.device,
        axes: Mapping[str, str],
        requests: ProfileRequests,
        log: Log,
        counted: int | None = None,
    ):
        self._run_directory, self._rank, self._device, self._axes = run_directory, rank, device, axes
        self._requests, self._log = requests, log
        self._recording: _Recording | None = None
        self._counted = counted
        self._counts: StepCounts | None = None

    def between_steps(self, step: int) -> None:
        """Called before every step; `step`: completed updates."""
        if self._recording is None:
            if steps := self._requests.profile_asked():
                with self._log.pause("profile"):
                    self._recording = _Recording(step, step + steps, self._device)
            elif step + 1 == self._counted:
                with self._log.pause("profile"), contextlib.suppress(RuntimeError):
                    self._counts = StepCounts()
        elif step < self._recording.last:
            self._recording.next_step(step)
        else:
            self.finish(step)

    def after_update(self, step: int) -> None:
        """Called after update `step`, before anything of it is logged."""
        if self._counts is None:
            return
        counts, self._counts = self._counts, None
        with self._log.pause("profile"):
            found = counts.stop()
        self._log.event("counts", step, **found)

    def close(self) -> None:
        """However the run ends: nothing is counted from here on."""
        if self._counts is not None:
            self._counts.stop()
            self._counts = None

    def finish(self, step: int) -> None:
        """Ends a recording that is under way after update `step`, and writes it. What cannot be written ends no run."""
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        target = profile_directory(self._run_directory, recording.first, self._rank)
        problem = ""
        with self._log.pause("profile"):
            recording.stop()
            try:
                self._write(recording, step, target)
            except (OSError, RuntimeError) as error:  # Kineto raises RuntimeError where it cannot write
                problem = str(error)
            recording.close()
        self._requests.profile_answered()
        if problem:
            say(f"the profile of steps {recording.first + 1} to {step} is not written: {problem}")
        else:
            self._log.event("profile", step, steps=[recording.first + 1, step], directory=str(target))

    def _write(self, recording: _Recording, step: int, target: Path) -> None:
        draft = target.with_name(f".{target.name}.draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            recording.write(draft)
            facts = {
                "rank": self._rank,
                "first_step": recording.first + 1,
                "last_step": step,
                "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU",
                "axes": dict(self._axes),
            }
            (draft / "facts.json").write_text(json.dumps(facts))
            shutil.rmtree(target, ignore_errors=True)
            draft.replace(target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
