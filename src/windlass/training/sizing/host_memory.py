"""Memory that a host has left for its ranks on CPUs. No torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

V2: Final = ("memory.max", "memory.current", "inactive_file")
V1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """What may still be taken here, by the kernel and by the limits of this process's control group and those around it (a
    container, a SLURM job); None where the system does not say, as macOS."""
    try:
        available = int(_lines(root / "proc/meminfo")["MemAvailable:"]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return max(0, min([available, *_left(root)]))


def _left(root: Path) -> Iterator[int]:
    """Of each control group that limits memory, what is left."""
    for folder, (limit, current, inactive) in _groups(root):
        try:
            # the kernel drops pages of files before it refuses any; "max" where there is no limit
            used = int((folder / current).read_text()) - int(_lines(folder / "memory.stat")[inactive])
            yield int((folder / limit).read_text()) - used
        except (OSError, KeyError, ValueError):
            continue


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders of this process's group and of those around it, with the names of their files: cgroup v2, and memory's of v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = PurePosixPath(path.lstrip("/"))
        yield from ((mount / one, V1 if controllers else V2) for one in (group, *group.parents))


def _lines(file: Path) -> Mapping[str, str]:
    """The second word of each line by its first."""
    words = (line.split() for line in file.read_text().splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}
