"""The directory of a preparation, replaced as a whole: never half-written, never written by two processes at once.

Everything is written into a hidden sibling `.NAME.preparing` and renamed at the end; the next preparation removes what a killed
one left there. A lock file `.NAME.lock` is beside it (flock, so the kernel frees it however its holder dies). A directory that
holds anything besides a preparation is never replaced.
"""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

import xxhash

from windlass.data.config import DataConfig
from windlass.data.files import sync_directory
from windlass.data.prepare.manifest import PREPARED_NAME, SCORES_NAME, TOKENIZER_NAME, load_prepared
from windlass.data.shards.journal import JOURNAL_FILES, JOURNAL_NAME, open_journal
from windlass.data.sources.bad_rows import TooManyBadRows
from windlass.data.sources.known_hashes import KNOWN_NAME
from windlass.errors import UserError
from windlass.object_store import is_url
from windlass.units import format_bytes


def local_directory(config: DataConfig) -> Path:
    """Where shards are written: `data.directory` itself; for a URL a directory beside the cache, uploaded from there."""
    if not is_url(config.directory):
        return Path(config.directory).absolute()
    assert config.cache is not None
    cache = Path(config.cache.directory).absolute()
    return cache.with_name(f"{cache.name}.prepare-{xxhash.xxh3_64_hexdigest(config.directory.encode())[:8]}")


def check_is_directory(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UserError(f"data.directory {directory} is a file", "it is a directory", "give another data.directory")


def check_writable(directory: Path) -> None:
    """Raises UserError where no data can be written. Creates nothing: the sources may still be wrong."""
    nearest = next(parent for parent in directory.parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "cannot be written" if nearest.is_dir() else "is a file"
        given = f"data.directory {directory} cannot be made: {nearest} {reason}"
        raise UserError(given, "prepared data needs a directory to write", "give another data.directory")


def check_apart(directory: Path, paths: Iterable[str], what: str = "data.directory") -> None:
    """Raises UserError where what is written is inside one of its own sources and would be read as one next time."""
    for path in paths:
        source = Path(path).resolve()
        if is_url(path) or not source.is_dir() or not directory.resolve().is_relative_to(source):
            continue
        inside = directory.resolve().relative_to(source)
        if not any(part.startswith(".") for part in inside.parts):  # hidden files are no source
            raise UserError(
                f"{what} {directory} is inside the source {path}",
                "a directory means every text file below it, so the next preparation would read what this one writes there",
                f"give a {what} elsewhere, or name the files of the source, such as {path}/*.jsonl",
            )


def check_is_no_source(report: Path, paths: Iterable[str]) -> None:
    """Raises UserError where a report of bad rows is a file that one of `paths`, globs among them, means, or will mean once it is
    there."""
    own = Path(os.path.abspath(report))
    for path in paths:
        pattern = os.path.abspath(os.path.expanduser(path))
        is_meant = own.match(pattern) or ("**" in pattern and fnmatch(str(own), pattern.replace("**/", "*")))
        if is_url(path) or not (is_meant or own.resolve() == Path(pattern).resolve()):
            continue
        raise UserError(
            f"`bad_rows.report: {report}` is a file of the source {path}",
            "windlass only reads sources, and every preparation rewrites the report",
            "name a file that is not a source",
        )


@contextlib.contextmanager
def locked_to_prepare(directory: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock, and first removes what a killed preparation left. Raises UserError where it cannot write. A refusal leaves
    nothing where nothing was."""
    lock = sibling(directory, "lock")
    absent = [path for path in lock.parents if not path.exists()]
    with locked(lock, directory, log), _removed_if_refused(lock, directory, absent):
        old = sibling(directory, "old")
        if old.exists() and not directory.exists():  # killed between the two renames of replaced()
            os.rename(old, directory)
        shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(sibling(directory, "preparing"), ignore_errors=True)
        yield


@contextlib.contextmanager
def _removed_if_refused(lock: Path, directory: Path, absent: Iterable[Path]) -> Iterator[None]:
    """After a UserError `lock` is removed, while it is held, and the directories that were `absent` before, unless something of a
    preparation is beside it."""
    try:
        yield
    except UserError:
        if not directory.exists() and not has_leftovers(directory):
            lock.unlink(missing_ok=True)
            for path in absent:
                with contextlib.suppress(OSError):  # something else is in it
                    path.rmdir()
        raise


@contextlib.contextmanager
def locked(path: Path, directory: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`, which is made. `directory`: what is prepared, for messages. Raises UserError where it cannot
    write."""
    with contextlib.ExitStack() as opened:
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = opened.enter_context(open(path, "a"))
            except OSError as error:
                given = f"{path.parent} cannot be written: {error.strerror}"
                raise UserError(
                    given, "prepared data is written beside its lock file", "give another data.directory"
                ) from None
            _lock(lock, directory, log)
            if _is_at(path, lock):  # else whoever had it was refused, and has removed the file
                break
        yield


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: IO[str], directory: Path, log: Callable[[str], None]) -> None:
    """Raises UserError where the file system has no locks: NFS without its lock daemon gives ENOLCK, others ENOTSUP."""
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"another process is preparing {directory}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        given = f"{file.name} cannot be locked: {error.strerror}"
        rule = "one process prepares a directory at a time, and holds a lock (flock) meanwhile"
        change = "give a data.directory on a file system with locks: a local disk, or NFS with its lock service running"
        raise UserError(given, rule, change) from None


@contextlib.contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """Yields an empty directory to write into; it replaces `directory` when the block ends without an error."""
    check_ours(directory)
    temporary, old = sibling(directory, "preparing"), sibling(directory, "old")
    temporary.mkdir()
    try:
        with refused_if_full(directory, temporary):
            yield temporary
            sync_directory(temporary)
            if directory.exists():
                os.rename(directory, old)
            os.rename(temporary, directory)
            sync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if directory.exists():
            shutil.rmtree(old, ignore_errors=True)


def check_room(directory: Path, text_bytes: int, keeps_ids: bool) -> None:
    """Raises UserError where the disk of `directory` is too small for the shards of `text_bytes`: 2 bytes per token or more,
    and 4 where `keeps_ids` until the end, at 8 bytes of text per token or fewer (the demo's Python has 3.1)."""
    besides = ", and ids 4 besides until all are written" if keeps_ids else ""
    needed, free = text_bytes * (6 if keeps_ids else 2) // 8, shutil.disk_usage(directory).free
    if needed > free:
        text = f"{format_bytes(text_bytes)} of text are to be prepared"
        given = f"{format_bytes(free)} are free on the disk of {directory}, and {text}"
        rule = f"shards take 2 bytes per token or more{besides}: at least {format_bytes(needed)} here"
        raise UserError(
            given, rule, "free space, give another data.directory (or data.cache.directory), or limit the sources"
        )


@contextlib.contextmanager
def refused_if_full(directory: Path, written_to: Path) -> Iterator[None]:
    """Raises UserError where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        written = sum(path.stat().st_size for path in written_to.rglob("*") if path.is_file())
        given = f"the disk of {directory} is full after {format_bytes(written)} of prepared data"
        raise UserError(
            given, "2 to 6 bytes per token are needed", "free space, or give another data.directory"
        ) from None


@contextlib.contextmanager
def kept_work(directory: Path) -> Iterator[Path]:
    """A sibling for work that survives a kill. It is removed when the block ends, with success or a UserError; but it stays where
    a run may be reading the unfinished preparation, which then continues once the mistake is fixed, and where there are too many
    bad rows, since the recipe may allow them."""
    work = sibling(directory, "work")
    try:
        yield work
    except TooManyBadRows:
        raise
    except UserError:
        if not (directory / JOURNAL_NAME).exists() or (directory / PREPARED_NAME).exists():
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)


def has_leftovers(directory: Path) -> bool:
    """Whether a preparation was killed here, or is running."""
    return any(sibling(directory, what).exists() for what in ("preparing", "old", "work"))


def sibling(directory: Path, what: str) -> Path:
    return directory.with_name(f".{directory.name}.{what}")


def check_ours(directory: Path) -> None:
    """Raises UserError where the directory holds anything that no preparation writes."""
    found = sorted(os.listdir(directory)) if directory.exists() else []
    old, begun = load_prepared(directory), open_journal(directory) if directory.exists() else None
    ours = {*old.sets, TOKENIZER_NAME, PREPARED_NAME, KNOWN_NAME, f"{KNOWN_NAME}.tmp"} if old is not None else set()
    if begun is not None:
        ours |= {
            *begun.begin["sets"],
            "train",
            TOKENIZER_NAME,
            PREPARED_NAME,
            f"{PREPARED_NAME}.tmp",
            *JOURNAL_FILES,
            KNOWN_NAME,
        }
    foreign = [name for name in found if name not in ours and not (ours and fnmatch(name, SCORES_NAME.format("*")))]
    if foreign:
        given = f"data.directory {directory} holds what windlass did not prepare: {', '.join(foreign[:5])}"
        raise UserError(given, "it is replaced as a whole when data is prepared", "give a directory of its own")
