"""Memory that a host has left for its ranks on CPUs. No torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from windlass.hardware import own_groups

FILES: Final = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the controller of version 1, "" for version 2: limit and use of a control group, and the line of its memory.stat that is
counted in use and may be dropped."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """What may still be taken here, by the kernel and by the limits of this process's control group and those around it (a
    container, a SLURM job); None where the system does not say, as macOS."""
    try:
        available = int(_lines(root / "proc/meminfo")["MemAvailable:"]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return max(0, min([available, *_left(root)]))


def _left(root: Path) -> Iterator[int]:
    """Bytes left in each control group that limits memory."""
    for controller, (limit, current, inactive) in FILES.items():
        for folder in own_groups(root, controller):
            try:
                # the kernel drops pages of files before it refuses any; "max" where there is no limit
                used = int((folder / current).read_text()) - int(_lines(folder / "memory.stat")[inactive])
                yield int((folder / limit).read_text()) - used
            except (OSError, KeyError, ValueError):
                continue


def _lines(file: Path) -> Mapping[str, str]:
    """The second word of each line by its first."""
    words = (line.split() for line in file.read_text().splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}
