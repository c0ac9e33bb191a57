"""The run directory, made and locked: one run writes to it at a time, and every rank sees the same one. Where ranks say what they
do, and who looks after them."""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.commit import check_takes_steps, committed_steps, named_errors, quarantined
from windlass.checkpoint.mirror import KEPT_BESIDE, Mirror, fetch_newest, open_remote
from windlass.checkpoint.shared_storage import probe_shared_storage
from windlass.config import RunConfig
from windlass.contract import has_agent, rank
from windlass.errors import UserError, exit_code_of
from windlass.flight_recorder import last_collectives
from windlass.model.architecture import Architecture
from windlass.model.families.family_table import to_hf
from windlass.output import redirected_output
from windlass.report.events import read_events
from windlass.runtime import Runtime, is_restarted
from windlass.safe_text import say
from windlass.status import FILE, LOCK, note_failure, read_status
from windlass.supervise.beside import Hosts, Watch, watched_beside
from windlass.supervise.heartbeat import Heartbeat, folder_of, read_beats


def open_heartbeat(run_directory: Path, is_seen: bool) -> Heartbeat:
    """Where this rank says what it does, for `windlass stacks`. Unless `is_seen`, to nobody: where signals are not ours to catch,
    as in a process group of the caller's, since a stack is asked for by a signal."""
    return Heartbeat(folder_of(run_directory), rank(), last_collectives, has_agent()) if is_seen else Heartbeat()


def watched(config: RunConfig, runtime: Runtime, is_seen: bool) -> contextlib.AbstractContextManager[None]:
    """Inside, a process looks after this host's ranks, where no launcher of ours does; its first rank starts it. Not after one
    process that nobody would start again, or that somebody sits before, with a debugger maybe. Collective."""
    is_alone = runtime.world == 1 and (not is_restarted() or (sys.stdin is not None and sys.stdin.isatty()))
    if has_agent() or not is_seen or runtime.store is None or not config.launch.stall_s or is_alone:
        return contextlib.nullcontext()
    # ranks of one host are those that see each other's pages: containers may share its name, or not its memory
    seen = [beat.rank for beat in read_beats(config.run.directory) if beat.is_alive]
    firsts, name = runtime.gathered(min(seen, default=runtime.rank)), runtime.shared(secrets.token_hex(8))
    if firsts[runtime.rank] != runtime.rank:
        return contextlib.nullcontext()
    hosts = sorted(set(firsts))
    meet = None if len(hosts) == 1 else (*runtime.address, name, len(hosts), hosts.index(runtime.rank))
    directory, stall_s = str(config.run.directory.resolve()), config.launch.stall_s
    return watched_beside(Watch(directory, stall_s, config.data.batch_timeout_s + stall_s, meet and Hosts(*meet)))


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
    """Raises UserError where the directory cannot be made, or not be written to; leaves nothing that was not there."""
    absent = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        _make(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise _refused(f"run.directory={directory} cannot be written to by this user")
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


SAVED: Final = b'{"kind": "checkpoint"'
RUN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as a manifest holds it
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


def fetch_run(config: RunConfig) -> None:
    """What a store holds of this run and this directory does not: its newest checkpoint and its events. Rank 0 or the launcher
    calls it, alone."""
    if config.checkpoint.remote is not None:
        fetch_newest(open_remote(config.checkpoint.remote), config.run.directory, say)


def open_mirror(config: RunConfig, runtime: Runtime) -> Mirror | None:
    """The mirror of rank 0, which copies what is committed; None on other ranks, and where the recipe names no store."""
    if config.checkpoint.remote is None or runtime.rank != 0:
        return None
    return Mirror(open_remote(config.checkpoint.remote), config.run.directory, config.checkpoint)


def open_checkpoints(
    config: RunConfig, runtime: Runtime, log: Callable[[str], None], mirror: Mirror | None
) -> Checkpoints:
    """The checkpoints of a run, whose id rank 0 draws when the run begins. Collective. Raises UserError."""
    check_takes_steps(config.run.directory / "checkpoints")
    lost = _lost_step(config.run.directory) if runtime.rank == 0 else 0
    check_saved_is_there(config.run.directory, int(runtime.max_over_ranks(lost)))
    run_id = runtime.shared(_run_id(config.run.directory / "run.json", log) if runtime.rank == 0 else "")
    return Checkpoints(
        config.run.directory / "checkpoints",
        config.checkpoint,
        run_id=run_id,
        rank=runtime.rank,
        world=runtime.world,
        group=runtime.saving if runtime.world > 1 else None,
        log=log,
        held=tuple if mirror is None else mirror.held,
    )


def check_saved_is_there(directory: Path, lost: int | None = None) -> None:
    """Raises UserError where a run has saved, and nothing of it is there: it would begin anew without a word. `lost`: what
    another rank has found."""
    if saved := _lost_step(directory) if lost is None else lost:
        raise UserError(
            f"{directory} has saved step {saved}, by its events.jsonl, and {directory / 'checkpoints'} holds no checkpoint",
            "a run resumes from its newest checkpoint, and a new run needs a directory of its own",
            "bring the checkpoints back (is their storage mounted?), or choose another run.directory",
        )


def _lost_step(directory: Path) -> int:
    """The last step whose checkpoint was committed, where no checkpoint is there; 0 where one is, where none was, and where
    events.jsonl cannot be read."""
    step, checkpoints, events = 0, directory / "checkpoints", directory / "events.jsonl"
    if (
        committed_steps(checkpoints) or quarantined(checkpoints) or not events.is_file()
    ):  # a pipe is refused with the directory
        return step
    with contextlib.suppress(OSError), events.open("rb") as lines:
        for line in lines:
            if line.startswith(SAVED):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    step = int(json.loads(line)["step"])
    return step


def _run_id(file: Path, log: Callable[[str], None]) -> str:
    """The run's id, drawn where there is none. Leftovers of saves are known by it, and nothing else, so a damaged file costs no
    more than drafts that somebody has to delete."""
    try:
        run_id = json.loads(file.read_text("utf-8"))["run_id"]
        if RUN_ID.fullmatch(run_id):
            return run_id
        raise ValueError(run_id)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        log(
            f"{file} is damaged: the run has a new id; drafts (.tmp-*) of saves that were killed before stay in checkpoints/"
        )
    run_id = secrets.token_hex(8)
    draft = file.with_suffix(".draft")
    content = json.dumps({"run_id": run_id})
    with named_errors(file.parent, len(content), "a run"):
        draft.write_text(content)
        draft.replace(file)  # whole or not there, however the process ends
    return run_id
