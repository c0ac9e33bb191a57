"""Memory that a host has left for its ranks on CPUs. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

MEMINFO: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What may still be taken here, by the kernel and by the limit of a container (cgroup v2); None where the system does not
    say, as macOS."""
    try:
        available = int(_lines(meminfo)["MemAvailable:"]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" where there is none
        # the kernel drops pages of files before it refuses any
        used = int((cgroup / "memory.current").read_text()) - int(_lines(cgroup / "memory.stat")["inactive_file"])
    except (OSError, KeyError, ValueError):
        return available
    return max(0, min(available, limit - used))


def _lines(file: Path) -> Mapping[str, str]:
    """The second word of each line by its first."""
    words = (line.split() for line in file.read_text().splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}
