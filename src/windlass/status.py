"""status.json: what became of a run, one small file in its run directory. No torch.

Rank 0 replaces it when the loop begins, on logging steps, and when the run ends; the launcher corrects it where the ranks died
before they could. A run that still says "running" while nobody holds the lock of its directory was killed.

A full disk must not leave the status of an earlier process there, "finished" of a run that was made longer. So the file has one
length, whatever it says, and is written over where no new one fits.
"""

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal, get_args

from windlass.errors import EXIT_STOPPED, EXIT_USER_ERROR

FILE: Final = "status.json"
NUM_BYTES: Final = 128
LOCK: Final = ".lock"
RESTARTS: Final = ".restarts"
"""What a launcher holds that starts ranks again: in between, none of them holds LOCK."""
State = Literal["running", "stopped", "finished", "failed"]


@dataclass(frozen=True)
class Status:
    state: State
    step: int
    """Completed optimizer steps."""
    exit_code: int | None
    """The exit code of the run's process; None while it runs."""
    time: float
    """When this was written, in Unix seconds."""


def write_status(run_directory: Path, state: State, step: int, exit_code: int | None) -> None:
    """Replaces status.json: a reader sees the old one or the new one, whole. On a full disk the new one is written over the old
    one. Where that fails too, the old one stays: no run ends by it."""
    content = json.dumps(asdict(Status(state, step, exit_code, time.time()))).ljust(NUM_BYTES - 1).encode() + b"\n"
    file, draft = run_directory / FILE, run_directory / f"{FILE}.draft"
    try:
        draft.write_bytes(content)
        os.replace(draft, file)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
            with file.open("r+b") as old:
                old.write(content)


def note_failure(run_directory: Path, exit_code: int) -> None:
    """Writes down that a run that had begun before was started again and failed before its loop. A refusal that only the user can
    lift changes nothing, nor does a stop; nor is the status of another process touched that holds the run now."""
    before = read_status(run_directory)
    if before is not None and exit_code not in (0, EXIT_USER_ERROR, EXIT_STOPPED) and not is_locked(run_directory):
        write_status(run_directory, "failed", before.step, exit_code)


def read_status(run_directory: Path) -> Status | None:
    """None where no run has written one, or where the file is not one of ours."""
    file = run_directory / FILE
    if not file.is_file():  # to read a pipe may take for ever
        return None
    try:
        found = Status(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    is_ours = found.state in get_args(State) and type(found.step) is int and type(found.time) in (int, float)
    return found if is_ours and type(found.exit_code) in (int, type(None)) else None


def hold_restarts(run_directory: Path) -> BinaryIO | None:
    """Makes a run whose ranks are started again count as running while no rank is alive -> a file that the launcher keeps open
    until it ends; None where it already has one, or the launcher of another host does. A "failed" that the ranks have written is
    replaced by "running"."""
    before = read_status(run_directory)
    if before is not None and before.state == "failed":
        write_status(run_directory, "running", before.step, None)
    with contextlib.suppress(OSError):
        file = os.fdopen(os.open(run_directory / RESTARTS, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644), "r+b", 0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise
        return file
    return None


def goes_on(run_directory: Path) -> bool:
    """Whether a live process trains there, or starts ranks again."""
    return is_locked(run_directory) or is_locked(run_directory, RESTARTS)


def is_locked(run_directory: Path, name: str = LOCK) -> bool:
    """Whether a live process holds the lock of the run directory. The kernel lets go of it however that process ends."""
    try:
        with open(run_directory / name, "rb", opener=_without_waiting) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe whose other end nobody holds at once, too."""
    return os.open(path, flags | os.O_NONBLOCK)
