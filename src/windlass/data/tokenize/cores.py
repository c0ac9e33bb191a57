"""How many cores this process may use: its affinity, or its cgroup's share of the CPUs where that is less.

A job of SLURM or a container sees all CPUs of its host (os.cpu_count), and may use few of them.
cpu.max: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
"""

import os
from collections.abc import Iterator
from pathlib import Path

from windlass.hardware import own_groups


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def num_workers(num_bytes: int, num_cores: int, in_process_bytes: int, bytes_per_worker: int) -> int:
    """How many workers to start for `num_bytes` of text, one for each `bytes_per_worker`; 0 for up to `in_process_bytes`: this
    process does it."""
    return 0 if num_bytes <= in_process_bytes else min(num_cores, -(-num_bytes // bytes_per_worker))


def _quotas(root: Path) -> Iterator[int]:
    """The limits of this process's cgroup and of all around it, in cores, rounded up; none of cgroups of version 1."""
    for group in own_groups(root):
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                yield -(-int(quota) // int(period))
