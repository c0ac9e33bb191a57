"""What happened to a run, seen from outside its ranks: one died, stalled or did not leave. A sentence for people,
JSON for programs."""

import contextlib
import dataclasses
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from windlass.hardware import own_groups
from windlass.supervise.places import Place

OUT_OF_MEMORY: Final = (
    "; the kernel has killed a process for want of host memory: fewer ranks, a smaller run.micro_batch, or more memory"
)


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for want of host memory: of this process's control group where that counts them,
    else of the host."""
    files = [*(group / "memory.events" for group in own_groups(root)), root / "proc/vmstat"]
    for file in files:
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.M):
                return int(found[1])
    return 0


@dataclass(frozen=True)
class Incident:
    """`ranks`: those to blame, the first of them described. `exit_code`: of its process, where that ended by itself; negative for
    a signal. `step`: completed ones, `phase`: see heartbeat; None where the rank had not got so far. `places`: of all ranks."""

    cause: Literal["died", "stalled", "lingers"]
    ranks: Sequence[int]
    step: int | None = None
    phase: str | None = None
    exit_code: int | None = None
    waited_s: float | None = None
    is_out_of_memory: bool = False
    """Whether the kernel killed a process for want of host memory meanwhile."""
    places: Sequence[Place] = ()
    driver_faults: Sequence[str] = ()
    """What NVIDIA's driver wrote to the kernel's log in the minute before, and what NVML says of a GPU that it did not say when
    the ranks started."""

    @property
    def number(self) -> int | None:
        """Of the step that it happened in, counted from 1: after its update a rank is still busy with it."""
        return None if self.step is None else self.step + (self.phase in ("data", "step", "update"))

    @property
    def sentence(self) -> str:
        """Who, where, why: one line."""
        where = "" if self.number is None else f" in step {self.number}, phase {self.phase}"
        if self.cause == "died":
            why = OUT_OF_MEMORY if self.is_out_of_memory else "".join(f"; {fault}" for fault in self.driver_faults)
            return f"rank {self.ranks[0]} failed first, with {_cause(self.exit_code)}{where}{why}"
        listed = ", ".join(map(str, self.ranks))
        own = next((place for place in self.places if place.beat.rank == self.ranks[0]), None)
        on = f" on {own.host}" if own and own.host else ""
        who = f"rank {listed}{on} stalls" if len(self.ranks) == 1 else f"ranks {listed} stall"
        at = f", at {own.line}" if own else ""
        if self.cause == "lingers":
            do = "does" if len(self.ranks) == 1 else "do"
            return (
                f"{who.rpartition(' ')[0]} {do} not leave, {self.waited_s:.0f} s after the end of the run: killed{at}"
            )
        return f"{who}{where}: nothing for {self.waited_s:.0f} s{at}"

    def details(self) -> list[str]:
        """Where every rank is, in lines."""
        return [line for place in self.places for line in place.text().splitlines()]

    def fields(self) -> dict[str, Any]:
        """For a line of events.jsonl."""
        own = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        own["places"] = [place.fields() for place in self.places]
        own["driver_faults"] = list(self.driver_faults) or None
        return {**{name: value for name, value in own.items() if value is not None}, "what": self.sentence}


def _cause(exit_code: int | None) -> str:
    if exit_code is None:
        return "no exit code"
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
