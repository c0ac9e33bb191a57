"""The directory of a preparation as a place that changes hands whole: never half-written, never written by two at once.

Everything is written into a hidden sibling `.NAME.preparing` and renamed into place at the end; what a killed
preparation leaves there is swept up by the next. A lock file `.NAME.lock` lies beside it (flock, so the kernel frees
it however its holder dies). A directory that holds anything besides a preparation is never replaced.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.data.mds import sync_directory
from windlass.data.prepared import PREPARED_NAME, TOKENIZER_NAME, load_prepared
from windlass.errors import UserError
from windlass.units import format_bytes


def check_place(directory: Path) -> None:
    """Raises UserError where data can never lie. Makes nothing: the sources may still be wrong."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"data.directory {directory} is a file", "it is a directory", "give another data.directory")
    nearest = next(parent for parent in directory.parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "cannot be written" if nearest.is_dir() else "is a file"
        given = f"data.directory {directory} cannot be made: {nearest} {reason}"
        raise UserError(given, "prepared data needs a directory to write", "give another data.directory")


@contextlib.contextmanager
def alone(directory: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock, and first sweeps up what a killed preparation left. Raises UserError where it cannot write."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock = open(_sibling(directory, "lock"), "a")  # noqa: SIM115  closed below, which frees the lock
    except OSError as error:
        given = f"{directory.parent} cannot be written: {error.strerror}"
        raise UserError(given, "prepared data is written beside its lock file", "give another data.directory") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process is preparing {directory}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        old = _sibling(directory, "old")
        if old.exists() and not directory.exists():  # killed between the two renames of replaced()
            os.rename(old, directory)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(_sibling(directory, "preparing"), ignore_errors=True)
        yield


@contextlib.contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """Gives an empty directory to write into; it takes `directory`'s place when the block ends without an error."""
    _check_ours(directory)
    temporary, old = _sibling(directory, "preparing"), _sibling(directory, "old")
    temporary.mkdir()
    try:
        yield temporary
        sync_directory(temporary)
        if directory.exists():
            os.rename(directory, old)
        os.rename(temporary, directory)
        sync_directory(directory.parent)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        written = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
        given = f"the disk of {directory} is full after {format_bytes(written)} of prepared data"
        raise UserError(given, "8 bytes per token are needed", "free space, or give another data.directory") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)


def has_leftovers(directory: Path) -> bool:
    """Whether a preparation was killed here, or is under way."""
    return any(_sibling(directory, what).exists() for what in ("preparing", "old"))


def _sibling(directory: Path, what: str) -> Path:
    return directory.with_name(f".{directory.name}.{what}")


def _check_ours(directory: Path) -> None:
    found = sorted(os.listdir(directory)) if directory.exists() else []
    old = load_prepared(directory)
    ours = (*old.sets, TOKENIZER_NAME, PREPARED_NAME) if old is not None else ()
    foreign = [name for name in found if name not in ours]
    if foreign:
        given = f"data.directory {directory} holds what windlass did not prepare: {', '.join(foreign[:5])}"
        raise UserError(given, "it is replaced as a whole when data is prepared", "give a directory of its own")
