"""This host without its GPUs: shared memory, limits, and the environment that a run inherits."""

import os
import resource
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from windlass.contract import restart_warning
from windlass.doctor.diagnosis import Diagnosis
from windlass.units import GIB

SHARED_PER_RANK: Final = GIB
"""NCCL's buffers between ranks of one host, and what the loaders of a rank hand over."""
FILES: Final = 16_384
"""Files that a rank may open: the one that serves the store holds a socket for every rank, others 2 log2 N + 8 and NCCL's."""
SLOW: Final = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every kernel waits for the one before"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another one first"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of one host talk through host memory, not over NVLink or PCIe"),
    "NCCL_SHM_DISABLE": (("1",), "ranks of one host talk over the network"),
    "NCCL_IB_DISABLE": (("1",), "hosts talk over TCP, not over InfiniBand"),
    "NCCL_DEBUG": (("TRACE",), "every call is written to the log"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "every tensor asks the driver for memory"),
    "TORCH_USE_CUDA_DSA": (("1",), "kernels check themselves"),
}
"""Left over from a search for an error: variable -> values, what they cost. Documentation of torch and NCCL."""


class HostLimits(NamedTuple):
    """Bytes of shared memory (None: no /dev/shm), and the most that ulimit lets a process have; -1 is no limit."""

    shared: int | None
    files: int
    locked: int
    processes: int


def read_limits() -> HostLimits:
    """The hard limits of this process, up to which its children may raise a soft limit; and the size of /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
        shared = found.f_frsize * found.f_blocks
    except OSError:
        shared = None
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC)
    return HostLimits(shared, *(resource.getrlimit(kind)[1] for kind in kinds))


def check_load(load: float | None, cores: int, environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    """`cores`: of the host, as the load is."""
    if load is not None and load > cores > 1 and environ.get("OMP_NUM_THREADS") != "1":
        yield Diagnosis(
            "busy-cores",
            f"{load:.1f} threads of other programs compute or wait for one of {cores} cores",
            "a rank on the CPU has a thread per core, and all of them wait for the slowest",
            "OMP_NUM_THREADS=1 windlass train ..., or end the other programs (top)",
        )


def check_limits(limits: HostLimits, ranks: int, has_infiniband: bool, hosts: int = 1) -> Iterator[Diagnosis]:
    """`ranks`: of this host."""
    needed = ranks * SHARED_PER_RANK
    if limits.shared is not None and limits.shared < needed and ranks > 1:
        yield Diagnosis(
            "shared-memory-small",
            f"/dev/shm holds {limits.shared / GIB:.2f} GiB for {ranks} ranks",
            "ranks of one host exchange data there: a GiB per rank",
            f"docker run --shm-size={ranks}g (or --ipc=host); in Kubernetes a memory-backed emptyDir at /dev/shm",
        )
    if hosts > 1 and 0 <= limits.files < FILES:
        yield Diagnosis(
            "few-open-files",
            f"ulimit -Hn is {limits.files}",
            f"rank 0 keeps a socket for every rank beside its files: {FILES} are enough for 16,000 ranks",
            "raise nofile in /etc/security/limits.conf; in a container --ulimit nofile=1048576; LimitNOFILE= of slurmd",
        )
    if has_infiniband and limits.locked >= 0:
        yield Diagnosis(
            "locked-memory",
            f"ulimit -Hl is {limits.locked // 1024} KiB",
            "InfiniBand's buffers are locked in memory, and NCCL ends where that is refused",
            "memlock unlimited in /etc/security/limits.conf; --ulimit memlock=-1; LimitMEMLOCK=infinity of slurmd",
        )
    if 0 <= limits.processes < 1024 * ranks:
        yield Diagnosis(
            "few-processes",
            f"ulimit -Hu is {limits.processes} for {ranks} ranks",
            "threads count as processes here, and a rank with compiler and loaders starts hundreds",
            "raise nproc in /etc/security/limits.conf; in a container raise its pids limit",
        )


def check_environment(environ: Mapping[str, str], ranks: int, cores: int) -> Iterator[Diagnosis]:
    """`cores`: that this process may use."""
    slow = [f"{name}={environ[name]}: {cost}" for name, (bad, cost) in SLOW.items() if environ.get(name) in bad]
    if slow:
        yield Diagnosis(
            "slow-environment",
            "; ".join(slow),
            "switches for a search of errors slow every step",
            f"unset {' '.join(item.partition('=')[0] for item in slow)}",
        )
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) * ranks > cores and ranks > 1:
        yield Diagnosis(
            "too-many-threads",
            f"OMP_NUM_THREADS={threads} for {ranks} ranks on {cores} cores",
            "threads of all ranks together have a core each, or they take turns",
            f"unset it (windlass's launcher chooses), or OMP_NUM_THREADS={max(1, cores // ranks)}",
        )
    if warning := restart_warning(environ):
        yield Diagnosis(
            "restarts-fail",
            warning.removeprefix("warning: ").partition("; export")[0],
            "ranks of a second start that find the addresses of the first do not connect",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on every host",
        )
