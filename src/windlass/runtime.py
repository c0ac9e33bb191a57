"""The process a rank runs in: its rank in the world, device, process group, threads.

The environment says which rank this is (see windlass.contract); with an empty one the process is a world of its own, with a
store in memory instead of a port.
"""

import contextlib
import datetime
import itertools
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, ParamSpec, Self, TypeVar, cast

import torch
import torch.distributed as dist

from windlass.contract import adopt, attempt, is_elastic, local_rank, num_ranks, rank, shares_store
from windlass.errors import UserError, WindlassError, exit_code_of
from windlass.hardware import Accelerator
from windlass.ranks.awaited_work import FailedElsewhere, do_for_all, do_without_store, wait_for
from windlass.ranks.meeting import address_of, meet
from windlass.ranks.open_files import allow_many_files
from windlass.ranks.tree import Tree

GROUP_TIMEOUT = datetime.timedelta(minutes=10)
"""A collective that waits longer is an error. Long enough for a slow checkpoint, far under gloo's own 30 minutes."""

ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads the settings of its allocator, when that is first used; the second is the older name."""
SEGMENTS: Final = "expandable_segments:True"
"""A segment grows in place, so that tensors of other sizes leave fewer holes (torch's notes on CUDA)."""

_RUNS: Final = itertools.count()
"""Numbers the runs of this process in worlds of several ranks: one after the other, so that each rank counts alike."""
_LEFT: Final = list[str]()
"""What a run of several ranks failed with whose group this process has kept."""

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class Runtime:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device
    store: dist.Store | None
    """Shared by all ranks; None where the caller had made the process group itself."""
    control: dist.ProcessGroup
    """gloo, of all ranks: for what the host agrees on outside the step."""
    saving: dist.ProcessGroup
    """gloo, of all ranks: for the thread that writes checkpoints, whose messages must not meet any other."""
    _turns: Iterator[int] = field(default_factory=itertools.count)
    """Numbers the pieces of work that are done once for all ranks: each has a key of its own in the store."""
    begun_s: float = field(default_factory=time.perf_counter)  # when this process joined the others

    @property
    def address(self) -> tuple[str, int]:
        """Where other processes reach the store of a run of several ranks: host and port."""
        assert self.store is not None
        return address_of(self.store)

    @property
    def tree(self) -> Tree:
        """The tree of `control`, for what ranks agree on outside the step."""
        return Tree(self.control if self.world > 1 else None)

    def first(self, work: Callable[[], Result]) -> Result | None:
        """`work()` on rank 0, while the others wait for it outside any collective. -> its result on rank 0, else None. All ranks
        raise a WindlassError of `work`."""
        if self.store is None or self.world == 1:
            return do_without_store(self.rank == 0, work, self.gathered)
        key = f"first-{next(self._turns)}"
        if self.rank == 0:
            return do_for_all(self.store, key, work)
        wait_for(self.store, [key])
        return None

    def first_on_host(self, work: Callable[[], object]) -> None:
        """`work()` on the first rank of every host, while the others wait for it outside any collective. Collective."""
        hosts = self.hosts()
        leaders = [rank for rank, host in enumerate(hosts) if hosts.index(host) == rank]
        if self.store is None or self.world == 1:
            do_without_store(self.rank in leaders, work, self.gathered)
            return
        turn = next(self._turns)
        keys = [f"first-on-host-{turn}-{rank}" for rank in leaders]
        if self.rank in leaders:
            do_for_all(self.store, f"first-on-host-{turn}-{self.rank}", work)
        wait_for(self.store, keys)

    def exit_code(self, error: BaseException) -> int:
        """The exit code of a run that ends by `error` here. Where a WindlassError of another rank has caused `error`, it is
        that rank's code."""
        code = exit_code_of(error)
        if self.store is not None and self.world > 1 and isinstance(error, Exception):
            with contextlib.suppress(RuntimeError):  # of a store that is gone
                if isinstance(error, WindlassError):
                    self.store.set("cause", str(code))
                elif self.store.check(["cause"]):
                    return int(self.store.get("cause"))
        return code

    def shared(self, value: Result) -> Result:
        """Rank 0's value, on every rank. Collective, on the host."""
        return self.tree.broadcast(value)

    def max_over_ranks(self, value: float) -> float:
        """The largest of all ranks' values. Collective, on the host: for logging steps only."""
        return self.tree.reduce(value, max)

    def gathered(self, value: Result) -> list[Result]:
        """Every rank's value, in their order. Collective, on the host."""
        return self.tree.broadcast(self.tree.gather(value) or [])

    def hosts(self) -> list[str]:
        """The host of every rank. Collective, on the host."""
        return self.gathered(socket.gethostname())

    def memory_bytes(self) -> float:
        """Peak memory of this rank: allocated on its GPU, or resident on CPU."""
        if self.device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self.device))
        import resource

        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kib if sys.platform == "darwin" else kib * 1024.0

    def accelerators(self) -> list[Accelerator]:
        """The device of every rank. Collective, on the host."""
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        return self.gathered(Accelerator(self.device_name(), capability))

    def allocator(self) -> str | None:
        """The settings of torch's allocator; None on a CPU, which has another."""
        given = [os.environ[name] for name in ALLOCATOR if name in os.environ]
        return given[0] if given and self.device.type == "cuda" else None

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Leaves the process as it was found. After an error that only one rank of several may have, the group is left to end
        with the process: another rank may still be in a collective."""
        if error is None or self.world == 1 or issubclass(error, WindlassError):
            self.close()
        elif self.store is not None:
            _LEFT.append(error.__name__)

    def close(self) -> None:
        """Ends the process group, if this runtime made it."""
        if self.store is not None and dist.is_initialized():
            dist.destroy_process_group()


def start_runtime() -> Runtime:
    """Joins the world that the environment describes, or makes one of a single process. Collective."""
    # DTensor warns where a sum goes over two axes one after the other; the norm's does (optim/clip), on every rank alike
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if _LEFT:
        raise UserError(
            f"train() is called after a run of these ranks has failed with {_LEFT[0]}",
            "a rank may still be in a collective of that run, which no other run may join",
            "start the ranks again: the run resumes from its last checkpoint",
        )
    if dist.is_initialized():  # the caller's group: a test's pool, or a program that embeds us
        return Runtime(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), None, _gloo(), _gloo())
    adopt()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes lines to stderr otherwise
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = SEGMENTS
    device = _device(local_rank())
    own, world = rank(), num_ranks()
    if world > 1:
        allow_many_files()
        # gloo connects all pairs of every group otherwise: 5 N + 5 sockets per rank
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        prefix = f"{attempt()}/run-{next(_RUNS)}"
        store = meet(own, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), shares_store(), prefix)
    else:
        store = dist.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=own, world_size=world, timeout=GROUP_TIMEOUT)
    control, saving = _gloo(), _gloo()
    for group in (control, saving) if world > 1 else ():
        Tree(group).barrier()  # connects them
    runtime = Runtime(own, world, device, None, control, saving)
    # a store may outlive its ranks: the keys of those before must not be ours
    incarnation = runtime.shared(secrets.token_hex(8))
    return replace(runtime, store=dist.PrefixStore(f"windlass/{incarnation}", store))


def recorded(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`work`, whose exception is left in the file where torchrun, or Flyte, looks for what a rank failed with."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return work
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

    def run(*args: Arguments.args, **given: Arguments.kwargs) -> Result:
        try:
            return work(*args, **given)
        except FailedElsewhere as error:  # no Exception: torch would leave it out
            get_error_handler().record_exception(error)
            raise

    return cast(Callable[Arguments, Result], record(run))


def is_embedded() -> bool:
    """Whether the caller made the process group: its signals and its output are its own."""
    return dist.is_initialized()


def is_restarted() -> bool:
    """Whether somebody starts this process again where it is killed: torchelastic, or SLURM a job's step."""
    return is_elastic() or "SLURM_STEP_ID" in os.environ


def _gloo() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"local rank {local_rank} on {socket.gethostname()}, which has {count} GPU{'s' if count > 1 else ''}",
            "each rank has a GPU of its own (NCCL refuses two ranks on one device)",
            f"start at most {count} ranks per host (--nproc {count})",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
