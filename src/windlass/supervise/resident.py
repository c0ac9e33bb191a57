"""Host memory that ranks hold, by kind, and how often the kernel has killed a process for want of it.

Of a process that is gone nothing can be read, so a watchdog keeps what it saw last. Source of the names: proc_pid_status(5).
"""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from windlass.hardware import own_groups
from windlass.units import format_bytes

KINDS: Final = {"RssAnon": "of its own", "RssShmem": "shared", "RssFile": "of files"}
SHOWN: Final = 3
"""Ranks in a sentence."""


class HostMemory(NamedTuple):
    """Bytes of one rank's process that are in memory: its own, those that it shares, mapped files; and the most at once."""

    rank: int
    own: int
    shared: int
    files: int
    peak: int

    @property
    def total(self) -> int:
        return self.own + self.shared + self.files

    def __str__(self) -> str:
        sizes = dict(zip(KINDS.values(), self[1:4]))
        kinds = ", ".join(
            f"{format_bytes(size)} {kind}" for kind, size in sorted(sizes.items(), key=lambda one: -one[1])
        )
        return f"rank {self.rank} {format_bytes(self.total)} ({kinds}; {format_bytes(self.peak)} at most)"


def held_by_process(rank: int, pid: int, root: Path = Path("/")) -> HostMemory | None:
    """None where there is no such process any more, and on systems that do not say."""
    try:
        text = (root / f"proc/{pid}/status").read_text()
    except OSError:
        return None
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
    if not {*KINDS, "VmHWM"} <= found.keys():  # it has ended, and waits for its parent
        return None
    own, shared, files = (found[name] for name in KINDS)
    return HostMemory(rank, own, shared, files, found["VmHWM"])


def holders(held: Sequence[HostMemory]) -> str:
    """The ranks that hold the most, and what one rank less would free, as the end of a sentence; empty for none."""
    if not held:
        return ""
    largest = sorted(held, key=lambda one: -one.total)
    listed = ", ".join(map(str, largest[:SHOWN]))
    more = f", and {len(held) - SHOWN} more" if len(held) > SHOWN else ""
    return f"; last seen holding: {listed}{more}; a rank less on this host frees about {format_bytes(largest[0].own)}"


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for want of host memory: of this process's control group where that counts them,
    else of the host."""
    files = [*(group / "memory.events" for group in own_groups(root)), root / "proc/vmstat"]
    for file in files:
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)$", file.read_text(), re.M):
                return int(found[1])
    return 0
