"""The run directory, made and locked: one run writes to it at a time, and every rank sees the same one. Whether the run there has
finished, and what its status says where it ends before its loop."""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.mirror import KEPT_BESIDE
from windlass.checkpoint.shared_storage import probe_shared_storage
from windlass.config import RunConfig
from windlass.errors import UserError, exit_code_of
from windlass.model.architecture import Architecture
from windlass.model.families.family_table import to_hf
from windlass.output import redirected_output
from windlass.report.events import read_events
from windlass.runtime import Runtime
from windlass.safe_text import say
from windlass.status import FILE, LOCK, is_locked, note_failure, read_status


@contextlib.contextmanager
def failure_noted(directory: Path, runtime: Runtime) -> Iterator[None]:
    """A run that fails inside, before its loop, has that in its status where it had begun before."""
    try:
        yield
    except Exception as error:
        if runtime.rank == 0:
            note_failure(directory, exit_code_of(error))
        raise


def finished_step(config: RunConfig, runtime: Runtime) -> int | None:
    """The last step of a run that this very recipe has finished, printed with its loss; else None. Nothing is written, so the
    report keeps the time at which the run ended. Collective."""
    step = runtime.shared(_finished_step(config) if runtime.rank == 0 else None)
    if step is not None and runtime.rank == 0:
        losses = [line for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == "validation"]
        last = (
            f", {losses[-1]['name']} loss {losses[-1]['loss']:.4f} at the end" if losses and losses[-1]["loss"] else ""
        )
        key = next(key for key in ("steps", "tokens", "epochs") if getattr(config.run, key) is not None)
        say(f"{config.run.directory} has finished: step {step}{last}")
        say(f"to train on, raise run.{key}, which is {getattr(config.run, key)}; else use another run.directory")
    return step


def _finished_step(config: RunConfig) -> int | None:
    directory, steps = config.run.directory, config.run.known_steps
    status, recipe = read_status(directory), directory / "recipe.yaml"
    if status is None or status.state != "finished" or not recipe.is_file():
        return None
    may_be_longer = steps != status.step if steps is not None else "data" in config.run.accept_drift
    is_whole = committed_steps(directory / "checkpoints")[:1] == [status.step]
    lines = recipe.read_text("utf-8").splitlines(), config.recipe.splitlines()
    is_same = sorted(lines[0]) == sorted(lines[1])  # overrides may come in another order
    return status.step if is_whole and is_same and not may_be_longer else None


@contextlib.contextmanager
def open_directory(directory: Path, runtime: Runtime) -> Iterator[None]:
    """The run directory, locked, and inside the context the log of what this rank prints. Collective."""
    with locked_directory(directory, runtime), redirected_output(directory, runtime.rank):
        yield


@contextlib.contextmanager
def locked_directory(directory: Path, runtime: Runtime) -> Iterator[None]:
    """The run directory, made, seen by all ranks, and locked by rank 0 inside the context. Collective, all ranks raise alike;
    nothing is written for a recipe that was refused before."""
    run_lock = _locked(directory, runtime)
    try:
        yield
    finally:
        if run_lock is not None:
            run_lock.close()


def try_run_directory(directory: Path) -> None:
    """Raises UserError where the directory cannot be made, not be written to, or is in use; leaves nothing that was not there."""
    absent = [path for path in (directory, *directory.parents) if not path.exists()]
    _check_files(directory)
    try:
        _make(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise _refused(f"run.directory={directory} cannot be written to by this user")
        _check_lock(directory, _lock_error(directory))
    finally:
        for path in absent:
            with contextlib.suppress(OSError):  # another process writes there by now
                path.rmdir()


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(f"run.directory={directory} cannot be made: {error.strerror}") from None


def _refused(given: str) -> UserError:
    return UserError(given, "a run needs a directory to write to", "choose another run.directory")


def _locked(directory: Path, runtime: Runtime) -> BinaryIO | None:
    run_lock = None
    _check_files(directory)
    _make(directory)
    if runtime.world > 1:
        probe_shared_storage(directory, runtime.rank, runtime.world, runtime.control)
    problem = 0
    if runtime.rank == 0:
        try:
            run_lock = hold(directory)
        except OSError as error:
            problem = error.errno or errno.EIO
    _check_lock(directory, int(runtime.max_over_ranks(problem)))
    return run_lock


def _lock_error(directory: Path) -> int:
    """The number of the error that whoever took the lock now would get; 0 where it is free, or no run has made it."""
    try:
        if is_locked(directory):
            time.sleep(LOOK_S)
            return errno.EWOULDBLOCK if is_locked(directory) else 0
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _check_lock(directory: Path, problem: int) -> None:
    """Raises UserError. `problem`: the number of the error that taking the lock gave; 0 where there was none."""
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


def _check_files(directory: Path) -> None:
    """Raises UserError where a directory, or a pipe whose other end nobody holds, has the name of a file of the run: to open
    such a pipe takes for ever."""
    for name in (LOCK, FILE, *KEPT_BESIDE):
        path = directory / name
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "no regular file"
            raise UserError(
                f"{path} is {kind}", f"a run writes its {name} there", f"remove {path}, or choose another run.directory"
            )


LOOK_S: Final = 0.2
"""How long `windlass status` may hold the lock, at most: it only looks whether it is free."""


def hold(directory: Path) -> BinaryIO:
    """A lock that lasts until the file is closed (by the kernel, on any death of the process). Raises OSError:
    EWOULDBLOCK where another process has it, else what the file system says."""
    run_lock = (directory / LOCK).open("wb")
    try:
        try:
            fcntl.flock(run_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
            fcntl.flock(run_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        run_lock.close()
        raise
    return run_lock


def model_header(architecture: Architecture) -> str:
    """All fields of the model as a comment of resolved.yaml, whose `model` has those alone that the recipe gives."""
    fields = {key: value for key, value in to_hf(architecture).items() if value is not None}
    return "".join(f"# model {key}: {json.dumps(value)}\n" for key, value in fields.items())
