"""A file that is read in any order, by several processes, and is the one that was hashed.

A hash of a whole file needs all of it, first to last. So what hashes a file also writes down, of each block of 1 MiB, its own
hash and its number of line ends: 12 bytes. Whoever reads a part of the file compares each block that it touches, and the line
ends say which line it begins in.
"""

import io
from typing import IO, Any, Final

import numpy as np
import xxhash

from windlass.units import MIB

BLOCK_BYTES: Final = MIB
BLOCK: Final = np.dtype([("xxh3", "<u8"), ("line_ends", "<u4")])
LINE_END: Final = ord("\n")


class OtherBytes(Exception):
    """The file is not the one that was hashed."""


def hash_blocks(file: IO[bytes]) -> tuple[str, int, bytes]:
    """(xxh3-128 of the file, its bytes, its blocks)."""
    digest, num_bytes, blocks = xxhash.xxh3_128(), 0, bytearray()
    while data := file.read(BLOCK_BYTES):
        digest.update(data)
        num_bytes += len(data)
        line_ends = np.count_nonzero(np.frombuffer(data, np.uint8) == LINE_END)
        blocks += np.array((xxhash.xxh3_64_intdigest(data), line_ends), BLOCK).tobytes()
    return digest.hexdigest(), num_bytes, bytes(blocks)


def line_ends_before(blocks: bytes) -> np.ndarray:
    """The number of line ends before each block, [blocks]."""
    counts = np.frombuffer(blocks, BLOCK)["line_ends"].astype(np.int64)
    return np.cumsum(counts) - counts


class VerifiedFile(io.RawIOBase):
    """Raises OtherBytes where it is opened or read, and the file has changed."""

    def __init__(self, file: IO[bytes], num_bytes: int, blocks: bytes, first_block: int = 0):
        """`blocks`: those from `first_block` on, which alone may be read."""
        self._file, self._num_bytes, self._first = file, num_bytes, first_block
        self._xxh3 = np.frombuffer(blocks, BLOCK)["xxh3"]
        self._at, self._held, self._number = 0, b"", -1
        if file.seek(0, io.SEEK_END) != num_bytes:
            raise OtherBytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        self._at = begin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._num_bytes:
            return 0
        number, begin = divmod(self._at, BLOCK_BYTES)
        if number != self._number:
            self._file.seek(number * BLOCK_BYTES)
            self._held, self._number = self._file.read(BLOCK_BYTES), number
            if xxhash.xxh3_64_intdigest(self._held) != int(self._xxh3[number - self._first]):
                raise OtherBytes
        found = memoryview(self._held)[begin : begin + len(buffer)]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
