"""What happened to a run, seen from outside its ranks: one died, stalled or did not leave. A sentence for people,
JSON for programs."""

import dataclasses
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from windlass.supervise.rank_stacks import RankStack
from windlass.supervise.resident import HostMemory, holders

OUT_OF_MEMORY: Final = (
    "; the kernel has killed a process for want of host memory: fewer ranks, a smaller run.micro_batch, or more memory"
)


@dataclass(frozen=True)
class Incident:
    """`ranks`: those to blame, the first of them described. `exit_code`: of its process, where that ended by itself; negative for
    a signal, None where nobody has waited for it. `step`: completed ones, `phase`: see heartbeat; None where the rank had not got
    so far. `stacks`: of all ranks."""

    cause: Literal["died", "stalled", "lingers"]
    ranks: Sequence[int]
    step: int | None = None
    phase: str | None = None
    exit_code: int | None = None
    waited_s: float | None = None
    is_out_of_memory: bool = False
    """Whether the kernel killed a process for want of host memory meanwhile."""
    held: Sequence[HostMemory] = ()
    """What the ranks of its host held of host memory when they were last seen, where that is why it died."""
    stacks: Sequence[RankStack] = ()
    driver_faults: Sequence[str] = ()
    """What NVIDIA's driver wrote to the kernel's log in the minute before, and what NVML says of a GPU that it did not say when
    the ranks started."""

    @property
    def number(self) -> int | None:
        """The number of the step that it happened in, counted from 1: after its update a rank is still busy with it."""
        return None if self.step is None else self.step + (self.phase in ("data", "step", "update"))

    @property
    def sentence(self) -> str:
        """Who, where, why: one line."""
        where = "" if self.number is None else f" in step {self.number}, phase {self.phase}"
        if self.cause == "died":
            return f"{self._who_died()}{where}{self._why()}"
        listed = ", ".join(map(str, self.ranks))
        own = next((stack for stack in self.stacks if stack.beat.rank == self.ranks[0]), None)
        on = f" on {own.host}" if own and own.host else ""
        who = f"rank {listed}{on} stalls" if len(self.ranks) == 1 else f"ranks {listed} stall"
        at = f", at {own.line}" if own else ""
        if self.cause == "lingers":
            do = "does" if len(self.ranks) == 1 else "do"
            return f"{who.rpartition(' ')[0]} {do} not exit, {self.waited_s:.0f} s after the end of the run: killed{at}"
        return f"{who}{where}: nothing for {self.waited_s:.0f} s{at}"

    def _who_died(self) -> str:
        if self.exit_code is None:
            return f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))} died"
        how = f"signal {signal.Signals(-self.exit_code).name}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"rank {self.ranks[0]} failed first, with {how}"

    def _why(self) -> str:
        if self.is_out_of_memory:
            return f"{OUT_OF_MEMORY}{holders(self.held)}"
        return "".join(f"; {fault}" for fault in self.driver_faults)

    def details(self) -> list[str]:
        """Where every rank is, in lines."""
        return [line for stack in self.stacks for line in stack.text().splitlines()]

    def fields(self) -> dict[str, Any]:
        """For a line of events.jsonl."""
        own = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        own["stacks"] = [stack.fields() for stack in self.stacks]
        own["driver_faults"] = list(self.driver_faults) or None
        own["held"] = [one._asdict() for one in self.held] or None
        return {**{name: value for name, value in own.items() if value is not None}, "what": self.sentence}
