"""A file is a row of pieces; each piece has its own hash, so a reader can verify a part of a file without the rest.

Writing: `write` cuts its data into pieces of at most PIECE_BYTES; a piece never spans two calls, so a tensor's bytes
are whole pieces. A second thread hashes while this one writes: both release the GIL and read the same 4 MiB, and nothing
is copied or read twice from disk. The hash costs no time where a core is free or the disk is the limit
(benchmarks/results/checkpoint.json, two Emerald Rapids cores: 1 rank within noise; 2 ranks +4 % on disk, and +10 % in a run
before; in line it would be 6 to 10 %). Where every core is busy copying it costs 16 % (a file system in memory). The file's
own hash is the hash of its pieces' hashes; a file of one piece has that piece's hash, which is what `xxhsum -H128` prints.

Reading: `read(at, length)` reads the pieces that overlap the range, verifies each before handing out a byte of it. A
rank that needs a slice of a large tensor reads at most one piece more at either end.
"""

import os
import platform
import stat
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from windlass.checkpoint.sealed_json import bad, digest
from windlass.errors import UserError

PIECE_BYTES = 4 << 20  # fits the second-level cache with its copy; 1 TB makes 250,000 hashes, 9 MB of manifest
BATCH_PIECES = 512  # writev takes at most 1024 buffers (IOV_MAX of Linux)
BATCHES_IN_FLIGHT = 8  # bounds the memory that waits for its hash

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0)]


class FileEntry(BaseModel):
    """One file's entry in MANIFEST: size and hashes."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    size: Count
    hash: Hash
    lengths: list[Annotated[int, Field(gt=0, le=PIECE_BYTES)]] = []
    """Length of each piece in bytes; left out where there is one piece."""
    pieces: list[Hash] = []
    """Hash of each piece; left out where there is one piece."""

    @staticmethod
    def of(lengths: list[int], pieces: list[str]) -> "FileEntry":
        if len(pieces) == 1:
            return FileEntry(size=lengths[0], hash=pieces[0])
        return FileEntry(size=sum(lengths), hash=digest("".join(pieces).encode()), lengths=lengths, pieces=pieces)

    def check(self, name: str) -> None:
        """BadCheckpoint unless the pieces add up to the file."""
        if not self.pieces and not self.lengths and 0 < self.size <= PIECE_BYTES:
            return
        if len(self.pieces) != len(self.lengths) or sum(self.lengths) != self.size:
            raise bad(f"MANIFEST: the pieces of {name} do not add up to its {self.size} bytes", "pieces tile a file")
        if digest("".join(self.pieces).encode()) != self.hash:
            raise bad(f"MANIFEST: the pieces of {name} do not have its hash", "a file's hash is that of its pieces")

    def rows(self) -> tuple[list[int], list[str]]:
        """(lengths, hashes), also for a file of one piece."""
        return (self.lengths, self.pieces) if self.pieces or not self.size else ([self.size], [self.hash])


class PieceWriter:
    """Writes a new file; `close` makes it durable and returns its entry. Use it in a `with`."""

    def __init__(self, path: Path, digest: Callable[[Any], str] = digest, in_flight: int = BATCHES_IN_FLIGHT):
        self._in_flight = in_flight
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._digest = digest
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash")
        self._batch: list[memoryview] = []
        self._batch_bytes = 0
        self._lengths: list[int] = []
        self._hashes: list[Future[list[str]]] = []
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()
        os.close(self._descriptor)

    def write(self, data: memoryview) -> int:
        """Appends `data`, which must not change before `close`. Returns the offset at which it begins."""
        at = self.size
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._batch.append(piece)
            self._batch_bytes += len(piece)
            if self._batch_bytes >= PIECE_BYTES or len(self._batch) == BATCH_PIECES:
                self._flush()
        self.size += len(data)
        return at

    def _flush(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if len(self._hashes) >= self._in_flight:
            self._hashes[-self._in_flight].result()
        self._hashes.append(self._thread.submit(_hash_all, batch, self._digest))
        self._lengths += [len(piece) for piece in batch]
        _write_all(self._descriptor, batch)

    def close(self) -> FileEntry:
        """Flushes to disk (fsync) and finishes the hashes -> the file's entry in MANIFEST."""
        if self._batch:
            self._flush()
        os.fsync(self._descriptor)
        return FileEntry.of(self._lengths, [one for future in self._hashes for one in future.result()])


def _hash_all(batch: list[memoryview], digest: Callable[[Any], str]) -> list[str]:
    return [digest(piece) for piece in batch]


def _write_all(descriptor: int, batch: list[memoryview]) -> None:
    """writev until everything is written; it may write less than it is given."""
    rest = list(batch)
    while rest:
        written = os.writev(descriptor, rest)
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if rest and written:
            rest[0] = rest[0][written:]


class PieceReader:
    """Reads ranges of a file whose entry is known. BadCheckpoint names the file and the bytes that differ."""

    def __init__(self, path: Path, entry: FileEntry):
        self._path, self._entry = path, entry
        self._lengths, self._hashes = entry.rows()
        self._starts = [0, *accumulate(self._lengths)]
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:  # no BadCheckpoint: the listing has seen the file, so its bytes may well be good
            raise UserError(
                f"{path} cannot be opened on {platform.node()}: {error.strerror}",
                "every rank must see and be allowed to read the checkpoint's files",
                "put the run directory on storage that all hosts share, or fix the permissions",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def check_size(self) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise bad(f"{self._path.name}: it is no regular file", "a checkpoint holds regular files only")
        if found.st_size != self._entry.size:
            raise bad(
                f"{self._path.name}: size: {found.st_size} bytes, not {self._entry.size}", "files keep their size"
            )

    def read(self, at: int, length: int) -> memoryview:
        """The bytes at..at+length, each verified."""
        assert at >= 0 and length > 0 and at + length <= self._entry.size, (at, length, self._entry.size)
        result = memoryview(bytearray(length))
        first = bisect_right(self._starts, at) - 1
        last = bisect_right(self._starts, at + length - 1) - 1
        for number in range(first, last + 1):
            start, end = self._starts[number], self._starts[number + 1]
            if at <= start and end <= at + length:
                self._read_piece(number, result[start - at : end - at])
                continue
            piece = memoryview(bytearray(end - start))
            self._read_piece(number, piece)
            low, high = max(start, at), min(end, at + length)
            result[low - at : high - at] = piece[low - start : high - start]
        return result

    def verify(self) -> None:
        """Reads the whole file; BadCheckpoint at the first piece that differs."""
        self.check_size()
        buffer = memoryview(bytearray(max(self._lengths, default=0)))
        for number, length in enumerate(self._lengths):
            self._read_piece(number, buffer[:length])

    def _read_piece(self, number: int, into: memoryview) -> None:
        start, filled = self._starts[number], 0
        try:
            while filled < len(into):
                count = os.preadv(self._descriptor, [into[filled:]], start + filled)
                if count == 0:
                    break
                filled += count
        except OSError as error:
            raise bad(
                f"{self._path.name} cannot be read at byte {start}: {error.strerror}",
                "every byte of the file must be readable",
            ) from None
        found = digest(into[:filled])
        if filled < len(into) or found != self._hashes[number]:
            span = f"bytes {start} to {start + len(into)}"
            raise bad(
                f"{self._path.name}: hash differs in {span}: written {self._hashes[number]}, found {found}",
                "a checkpoint's bytes must be those that were written",
            )
