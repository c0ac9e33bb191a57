"""The run directory, made and locked: one run writes to it at a time, and every rank sees the same one."""

import errno
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from windlass.checkpoint.shared_storage import probe_shared_storage
from windlass.errors import UserError
from windlass.runtime import Runtime


def open_directory(directory: Path, runtime: Runtime) -> BinaryIO | None:
    """The run directory, made, seen by all ranks, and locked by rank 0 until the file is closed. Collective, all ranks raise
    alike; nothing is written for a recipe that was refused before."""
    run_lock = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run.directory={directory} cannot be made: {error.strerror}",
            "a run needs a directory to write to",
            "choose another run.directory",
        ) from None
    if runtime.world > 1:
        probe_shared_storage(directory, runtime.rank, runtime.world, runtime.control)
    problem = 0
    if runtime.rank == 0:
        try:
            run_lock = hold(directory)
        except OSError as error:
            problem = error.errno or errno.EIO
    problem = int(runtime.max_over_ranks(problem))
    if problem == errno.EWOULDBLOCK:
        raise UserError(
            f"run.directory={directory} is in use by another process",
            "one run writes to a run directory at a time",
            "wait for the other run, stop it, or choose another run.directory",
        )
    if problem:
        raise UserError(
            f"run.directory={directory} cannot be locked: {os.strerror(problem)}",
            "a run holds a lock on its directory, so that no second run writes there",
            "give the directory to this user, or choose one on a file system with locks (NFS: mount it with lockd or v4)",
        )
    return run_lock


def hold(directory: Path) -> BinaryIO:
    """A lock that lasts until the file is closed (by the kernel, on any death of the process). Raises OSError:
    EWOULDBLOCK where another process has it, else what the file system says."""
    run_lock = (directory / ".lock").open("wb")
    try:
        fcntl.flock(run_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        run_lock.close()
        raise
    return run_lock
