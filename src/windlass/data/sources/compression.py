"""Compressed files: which compressions are read, and bytes unpacked as they are asked for.

Nothing is unpacked ahead, so a small file cannot fill the memory: `read` returns at most what it is asked for, and a file that
unpacks to more than 1,000 times its size and 1 GiB is refused (gzip itself reaches 1,032 to 1, on zeros).
"""

import bz2
import gzip
import io
import lzma
import zlib
from typing import IO, Any, Final, cast

from windlass.errors import UserError
from windlass.units import GIB, MIB, format_bytes

KNOWN: Final = {".gz": "gzip", ".zst": "zstandard", ".xz": "xz", ".bz2": "bzip2"}
OTHER: Final = (
    ".lz4",
    ".lzma",
    ".lz",
    ".lzo",
    ".br",
    ".zip",
    ".7z",
    ".rar",
    ".tar",
    ".tgz",
    ".snappy",
    ".sz",
    ".z",
    ".zstd",
    ".gzip",
    ".bzip2",
)
PACKED_AT_ONCE: Final = 32 << 10
UNPACKED_AT_ONCE: Final = MIB
BUFFER_BYTES: Final = 128 << 10
ZSTANDARD_AT_ONCE: Final = 2 << 10  # packed bytes: at most 64 MiB, for zstandard reaches 32,768 to 1
LARGEST_WINDOW_BYTES: Final = 1 << 31  # `zstd --long=31`, the most there is; memory is taken as the frame asks for it
LARGEST_XZ_BYTES: Final = 512 * MIB  # memory; `xz -9` takes 65 MiB
BOMB_RATIO: Final = 1000
BOMB_BYTES: Final = GIB


class _Damaged(Exception):
    """Bytes that xz or bzip2 cannot unpack; the text is the library's."""


def without_compression(name: str) -> str:
    return next((name.removesuffix(end) for end in KNOWN if name.endswith(end)), name)


def unpacked_stream(stream: IO[bytes], name: str, where: str) -> IO[bytes]:
    """The stream's bytes, unpacked as the end of `name` says. Reading them may raise `broken()`, and UserError for a file that
    unpacks to far more than it is. `where`: the file, for messages."""
    packed = _Counting(stream)
    raw: Any = packed
    if name.endswith(".gz"):
        raw = gzip.GzipFile(fileobj=cast(IO[bytes], packed))
    elif name.endswith(".zst"):
        raw = _Zstandard(packed)
    elif name.endswith((".xz", ".bz2")):
        raw = _Blocks(packed, name.endswith(".xz"))
    return io.BufferedReader(_Watched(raw, packed, where), BUFFER_BYTES)


class _Counting:
    """A stream that counts the bytes read from it."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self.num_bytes = stream, 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.num_bytes += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Watched(io.RawIOBase):
    """Unpacked bytes, as long as they are not far more than the packed ones."""

    def __init__(self, raw: Any, packed: _Counting, where: str):
        self._raw, self._packed, self._where, self._num_bytes = raw, packed, where, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._raw.readinto(memoryview(buffer)[:UNPACKED_AT_ONCE])
        self._num_bytes += count
        if self._num_bytes > BOMB_BYTES and self._num_bytes > BOMB_RATIO * self._packed.num_bytes:
            given = f"{format_bytes(self._packed.num_bytes)} of {self._where} unpack to more than {format_bytes(self._num_bytes)}"
            rule = f"a file of text unpacks to at most {BOMB_RATIO:,} times its size, or to {format_bytes(BOMB_BYTES)}"
            raise UserError(given, rule, "leave the file out; or unpack it yourself, if it is what it should be")
        return count


class _Zstandard(io.RawIOBase):
    """Consecutive frames, decompressed. The library's own reader takes a truncated frame for the end of the file."""

    def __init__(self, stream: _Counting):
        self._stream, self._frame, self._left = stream, _new_frame(), memoryview(b"")
        self._is_inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._is_inside = _new_frame(), False
            data = data or self._stream.read(ZSTANDARD_AT_ONCE)
            if not data and self._is_inside:
                raise EOFError("it ends before the end of a frame")
            if not data:
                return 0
            self._left, self._is_inside = memoryview(self._frame.decompress(data)), True
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _new_frame() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW_BYTES).decompressobj()


class _Blocks(io.RawIOBase):
    """Consecutive streams of xz or bzip2."""

    def __init__(self, stream: _Counting, is_xz: bool):
        self._stream, self._is_xz = stream, is_xz
        self._one, self._is_inside = self._new(), False

    def _new(self) -> Any:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, LARGEST_XZ_BYTES) if self._is_xz else bz2.BZ2Decompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._one.eof:
                data = self._one.unused_data.lstrip(b"\0") if self._is_xz else self._one.unused_data  # xz pads streams
                self._one, self._is_inside = self._new(), False
            if not data and self._one.needs_input:
                packed = self._stream.read(PACKED_AT_ONCE)
                if not packed and self._is_inside:
                    raise EOFError("it ends before the end of a stream")
                if not packed:
                    return 0
                data = packed.lstrip(b"\0") if self._is_xz and not self._is_inside else packed
                if not data:  # padding alone; a stream may follow it
                    continue
            try:
                found = self._one.decompress(data, len(buffer))
            except (OSError, ValueError, lzma.LZMAError) as error:
                raise _Damaged(str(error)) from None
            self._is_inside = True
            if found:
                buffer[: len(found)] = found
                return len(found)


def broken() -> tuple[type[Exception], ...]:
    """What damaged compressed data raises when it is read."""
    import zstandard

    return (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError, _Damaged)


def damaged_compression(name: str, where: str, error: Exception) -> UserError:
    format_name = next((word for end, word in KNOWN.items() if name.endswith(end)), "compressed data")
    rule = f"a file whose name ends in {', '.join(KNOWN)} is compressed so, and whole"
    return UserError(
        f"{where} cannot be unpacked as {format_name}: {error}", rule, "bring the file again, or rename it"
    )
