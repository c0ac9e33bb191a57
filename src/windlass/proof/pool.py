"""A pool of gloo ranks on this machine that serves many cases per start.

The idea: importing torch costs more than a small case does. A fork server imports it once; ranks are forked from it, kept, and
handed one case after the other. Each case gets a fresh default process group of its own world size (ranks 0..world-1 take part,
the others sleep), so the code under test may use the default group as it would under torchrun, and nothing leaks into the
next case. Measured on two Zen 4 cores: first start 3.0 s, later 0.17 s; an empty case on 4 ranks 65 ms.

Failing: a rank that raises sends its traceback, one that dies is named with its exit code (and the Python stack of a
segmentation fault), one that hangs with its Python stack. Messages keep the order in which they came, so the cause comes before
the "connection reset" it makes elsewhere. After a failure all ranks are killed, because the survivors may sit in a
collective for ever; the next case starts new ones.

A rank that ends by SIGSEGV, SIGBUS or SIGABRT crashed in a library, since windlass is Python alone. That happened four times in
five days of test runs, each time in another case; process groups come and go here as in no training run. The crash is printed,
and the case runs once more on new ranks; a crash that the case itself causes comes again and fails it.
"""

import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

MAX_RANKS = 16
PRELOAD = (
    "torch",
    "torch._inductor.config",  # use_deterministic_algorithms imports it: 3.5 s, paid before the fork
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.nn.parallel",
    "pydantic",
    "yaml",
)


class RankFailed(AssertionError):
    """At least one rank raised, died or hung; the message holds each one's cause, the first cause first."""


CRASHES: Final = tuple(f"died with exit code -{one:d}" for one in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT))


class RankCrashed(RankFailed):
    """A rank died in the code of a library."""


def _forget_groups() -> None:
    """Empties what DTensor remembers of a case's meshes, and frees the meshes.

    It remembers per operation the mesh of the result, and a mesh finds its groups by name. Names begin anew with
    every process group, so an equal mesh of the next case was handed the former's, and with it another group's ranks.

    A group that something still holds keeps 3 threads and 5 files, and gloo's thread looks for news every 10 ms: ranks of 300
    such threads took half of both cores to do nothing. Meshes are in reference cycles, so a collection frees them; the rest is
    frozen, or the next one would look at all of torch's objects again (0.5 s).
    """
    from torch.distributed.tensor import _redistribute, debug
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
    gc.freeze()


def _serve(rank: int, pipe: Connection, store_path: str, stack_path: str, sys_path: list[str]) -> None:
    """A rank's whole life: receive a case, run it inside its own process group, send the result."""
    sys.path[:] = sys_path
    import torch
    import torch.distributed as dist

    gc.freeze()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    stack_file = open(stack_path, "w")  # noqa: SIM115  faulthandler writes to it as long as the rank lives
    faulthandler.enable(stack_file)  # a segmentation fault writes its stack there
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    while True:
        try:
            number, world, function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            store = dist.FileStore(f"{store_path}-{number}", world)
            timeout = datetime.timedelta(minutes=5)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
            result = function(*args)
            dist.barrier()
            dist.destroy_process_group()
            _forget_groups()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return


class Ranks:
    """The pool. `run` is the only call; ranks start when first needed, as many as the largest world so far. `warn` is called with
    the sentence on a case that runs once more."""

    def __init__(self, warn: Callable[[str], None] = warnings.warn) -> None:
        self._warn = warn
        self._number = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def _start(self, world: int) -> None:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="windlass-ranks-")
        base = self._directory.name
        for rank in range(len(self._processes), world):
            ours, theirs = self._context.Pipe()
            paths = (f"{base}/store", f"{base}/stack-{rank}", list(sys.path))
            process = self._context.Process(target=_serve, daemon=True, args=(rank, theirs, *paths))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> list[Any]:
        """`function(*args)` on `world` ranks -> one result per rank, in rank order. `function` must be importable by name.

        Raises RankFailed when a rank raises, dies, or is not done within `timeout_s`.
        """
        if not 1 <= world <= MAX_RANKS:
            raise ValueError(f"world {world} is outside 1..{MAX_RANKS}")
        try:
            return self._run(world, function, args, timeout_s)
        except RankCrashed as crash:
            self._warn(f"the case runs once more, on new ranks: {crash}")
            return self._run(world, function, args, timeout_s)

    def _run(self, world: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        self._start(world)
        self._number += 1
        for pipe in self._pipes[:world]:
            pipe.send((self._number, world, function, args))
        results, failed = self._collect(world, timeout_s)
        if len(results) == world:
            return [results[rank] for rank in range(world)]
        message = self._explain(world, results, failed, timeout_s)
        kind = RankCrashed if any(text in CRASHES for text in failed.values()) else RankFailed
        self.close()
        raise kind(message)

    def _collect(self, world: int, timeout_s: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        end_s = time.monotonic() + timeout_s
        while len(results) + len(failed) < world:
            pending = {self._pipes[r]: r for r in range(world) if r not in results and r not in failed}
            ready: list[Any] = wait(list(pending), timeout=max(0.0, end_s - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = pending[pipe]
                try:
                    good, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(1)
                    good, value = False, f"died with exit code {self._processes[rank].exitcode}"
                (results if good else failed)[rank] = value
                if not good:  # the others get a moment to fail by themselves, and no more
                    end_s = min(end_s, time.monotonic() + 1.0)
        return results, failed

    def _explain(self, world: int, results: dict[int, Any], failed: dict[int, str], timeout_s: float) -> str:
        waiting = [rank for rank in range(world) if rank not in results and rank not in failed]
        # a survivor's "connection reset" may be read before the end of the one that died
        failed = dict(sorted(failed.items(), key=lambda item: not item[1].startswith("died")))
        for rank in waiting:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)  # faulthandler writes from the signal handler
        parts = [f"rank {rank} of {world} failed:\n{text}\n{self._stack(rank)}" for rank, text in failed.items()]
        if failed:  # the cause in the first line, which is all that a test's summary shows
            rank, text = next(iter(failed.items()))
            # rule and change of a UserError are indented
            lines = [line for line in text.splitlines() if line[:1].strip()]
            parts.insert(0, f"rank {rank} of {world} failed first: {lines[-1]}")
        for rank in waiting:
            state = "was still waiting" if failed else f"did not finish within {timeout_s} s"
            parts.append(f"rank {rank} of {world} {state}, at:\n{self._stack(rank)}")
        return "\n".join(parts)

    def _stack(self, rank: int) -> str:
        """What faulthandler wrote in this rank: empty while nothing has asked for it."""
        assert self._directory is not None
        return Path(self._directory.name, f"stack-{rank}").read_text()
