"""A bounded local cache of shard files, shared by all ranks of a host and by any number of jobs.

    directory/.lock            held (flock) for every change in this directory, never while something is fetched
    directory/shards/          xxh64-<digest>-<bytes>: a shard by its content, so that datasets never mix
    directory/shards/.*.part   a shard on its way; its fetcher holds its lock
    directory/sets/<key>/      small files of one preparation (tokenizer, index.json), locked by those who use them

Limit. All files together, those on their way at their full size, never exceed `limit_bytes`: room is made, and taken
(fallocate), before the first byte is fetched. What goes first: files of preparations that nobody uses, then the shards
that were opened longest ago; those that a process has mapped come last. A mapped file that loses its name stays readable
(POSIX) and its blocks are freed when it is unmapped.

Death at any moment (kill -9). Locks are flocks, which the kernel frees. A shard gets its name by a rename when it is
complete, so what has a name was whole when it was written; a `.part` without a lock is rubbish and is swept. Nothing is
trusted for its name: whoever maps a file verifies size and hash first, and fetches a bad one again, once.

One fetch per host: who finds a `.part` locked waits for its lock and looks again.
"""

import contextlib
import errno
import fcntl
import io
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from windlass.data.shards.index import File, verify_file
from windlass.errors import BadShard, UserError
from windlass.units import MIB, format_bytes

IN_USE = ".in-use"


class Cache:
    """Raises UserError where the directory cannot be used, and when room cannot be made."""

    def __init__(self, directory: Path, limit_bytes: int):
        self.directory, self.limit_bytes = directory, limit_bytes
        self._shards = directory / "shards"
        try:
            self._shards.mkdir(parents=True, exist_ok=True)
            (directory / "sets").mkdir(exist_ok=True)
            with self._alone():
                pass
        except OSError as error:
            given = f"data.cache.directory {directory} cannot be used: {error.strerror}"
            rule = "shards are cached in a local directory that can be written and locked"
            raise UserError(given, rule, "give another data.cache.directory, on a local disk") from None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self.directory / ".lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # ---- shards

    def load(self, file: File, fetch: Callable[[], bytes], where: str) -> np.ndarray:
        """The verified bytes of `file`, [num_bytes] uint8, mapped, with a shared lock on the file that lasts as long as they are
        used (mmap keeps a descriptor). `fetch` brings them, verified, where they are not here.

        `where`: the file's URL, for messages. Raises BadShard when a file that was just written reads back wrong.
        """
        path = self._shards / f"{file.algorithm}-{file.digest}-{file.num_bytes}"
        fetched = False
        while True:
            try:
                with open(path, "rb", buffering=0) as opened:
                    fcntl.flock(opened, fcntl.LOCK_SH)
                    inode = os.fstat(opened.fileno()).st_ino
                    copy = f"{path}, the cached copy of {where},"
                    verify_file(file, opened, copy, "check the disk of data.cache.directory")
                    data = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
                    with contextlib.suppress(PermissionError):  # another user's file
                        os.utime(opened.fileno())  # the last use decides what goes first
                    return data
            except FileNotFoundError:
                pass
            except BadShard:
                self._remove(path, inode)
                if fetched:
                    raise
            fetched = self._bring(path, file.num_bytes, fetch) or fetched

    def _remove(self, path: Path, inode: int) -> None:
        """Takes a spoilt file away, unless another process has put a new one there."""
        with self._alone(), contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                path.unlink()

    def _bring(self, path: Path, num_bytes: int, fetch: Callable[[], bytes]) -> bool:
        """Fetches a shard into the cache -> True; or waits for the process that does -> False."""
        part = path.with_name(f".{path.name}.part")
        with contextlib.ExitStack() as stack:
            with self._alone():
                if path.exists():
                    return False
                file = stack.enter_context(open(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0))
                is_mine = _is_locked_by_us(file)
                if is_mine:
                    stack.callback(_remove_own, part, os.fstat(file.fileno()).st_ino)
                    self._reserve(file, num_bytes)
            if not is_mine:
                fcntl.flock(file, fcntl.LOCK_SH)  # shared: the fetched file is mapped, and so locked, by others already
                return False
            data = memoryview(fetch())
            assert len(data) == num_bytes
            while data:
                try:
                    data = data[file.write(data) :]
                except OSError as error:
                    raise self._full(error, num_bytes) from None
            with self._alone():
                os.rename(part, path)
        return True

    # ---- room

    def _reserve(self, file: io.FileIO, num_bytes: int) -> None:
        """Makes `file` num_bytes long, on disk. The lock is held."""
        os.ftruncate(file.fileno(), 0)
        self.make_room(num_bytes)
        while True:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    os.ftruncate(file.fileno(), num_bytes)
                    return
                if error.errno != errno.ENOSPC or not self._evict(1):
                    raise self._full(error, num_bytes) from None

    def make_room(self, num_bytes: int) -> None:
        """Removes what goes first until `num_bytes` more fit. The lock is held. Raises UserError."""
        for part in self._shards.glob(".*.part"):
            if _is_free(part):
                part.unlink(missing_ok=True)
        excess = self.used_bytes() + num_bytes - self.limit_bytes
        if excess <= 0:
            return
        for folder in (self.directory / "sets").iterdir():
            if _is_free(folder / IN_USE):
                shutil.rmtree(folder)
        excess = self.used_bytes() + num_bytes - self.limit_bytes
        excess -= self._evict(excess)
        if excess > 0:
            given = f"data.cache.limit_mib: {self.limit_bytes / MIB:g}, and {format_bytes(num_bytes)} more are needed"
            rule = f"{format_bytes(self.used_bytes())} are in use by files that are being fetched or are always needed"
            raise UserError(given, rule, f"raise data.cache.limit_mib by {-(-excess // MIB)} or more")

    def _evict(self, num_bytes: int) -> int:
        """Removes shards of at least `num_bytes`, or all -> the bytes removed. The lock is held."""
        found = []
        for path in self._shards.glob("[!.]*"):
            status = path.stat()
            found.append((not _is_free(path), status.st_mtime_ns, status.st_size, path))
        removed = 0
        for _, _, size, path in sorted(found):
            if removed >= num_bytes:
                break
            path.unlink()
            removed += size
        return removed

    def used_bytes(self) -> int:
        """Bytes of all files below the directory."""
        total = 0
        for folder, _, names in os.walk(self.directory):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    def _full(self, error: OSError, num_bytes: int) -> Exception:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return error
        free = shutil.disk_usage(self.directory).free
        given = f"the disk of data.cache.directory {self.directory} is full: {format_bytes(num_bytes)} are needed"
        rule = f"{format_bytes(free)} are free, and the cache holds {format_bytes(self.used_bytes())}"
        return UserError(given, rule, "free space, or give another data.cache.directory")

    # ---- small files

    def folder(self, key: str) -> tuple[Path, int]:
        """(the folder of small files named `key`, the descriptor that keeps it there while it is open)."""
        folder = self.directory / "sets" / key
        with self._alone():
            try:
                folder.mkdir(exist_ok=True)
                held = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                raise self._full(error, 1) from None
            fcntl.flock(held, fcntl.LOCK_SH)
        return folder, held

    def put(self, path: Path, data: bytes) -> None:
        """Writes a small file below a folder of `folder()`, whole or not at all."""
        with self._alone():
            self.make_room(len(data))
            temporary = path.with_name(f".{path.name}.new")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary.write_bytes(data)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                raise self._full(error, len(data)) from None
            os.replace(temporary, path)


def _is_locked_by_us(file: BinaryIO | io.FileIO) -> bool:
    """Whether nobody had a lock on the file; then this `file` has it until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(path: Path) -> bool:
    """Whether no process holds a lock on the file."""
    try:
        with open(path, "rb") as file:
            return _is_locked_by_us(file)
    except FileNotFoundError:
        return True


def _remove_own(part: Path, inode: int) -> None:
    """Behind a fetch that failed. One that succeeded has renamed it, and what bears the name then is another's."""
    with contextlib.suppress(FileNotFoundError):
        if part.stat().st_ino == inode:
            part.unlink()
