"""How many cores this process may use: its affinity, or its cgroup's share of the CPUs where that is less.

A job of SLURM or a container sees all CPUs of its host (os.cpu_count), and may use few of them.
cpu.max: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
"""

import os
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """At least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas()]))


def _quotas() -> list[int]:
    """The limits of this process's cgroup and of all above it, in cores, rounded up; none of cgroups of version 1."""
    try:
        own = next(line[3:] for line in OWN.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    folder, found = CGROUPS / own.strip("/"), list[int]()
    for place in (folder, *folder.parents):
        if place.is_relative_to(CGROUPS) and (place / "cpu.max").is_file():
            quota, period = (place / "cpu.max").read_text().split()
            found += [] if quota == "max" else [-(-int(quota) // int(period))]
    return found
