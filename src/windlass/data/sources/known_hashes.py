"""Hashes of local files, kept beside what was prepared of them: a file of the same size, time of change and inode is not read
again.

A file that changed less than two seconds before it was hashed is not kept: it may change again within the same tick of its file
system's clock. What is kept decides only whether data is prepared again; whatever is read is compared with its hash.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Final

from windlass.data.files import write_durably
from windlass.data.sources.source_files import SourceFile, hash_file

KNOWN_NAME: Final = "sources.json"
SETTLED_NS: Final = 2_000_000_000


class KnownHashes:
    """`path`: the file that keeps them, if any; with `rehash` it is written and not read. `begun`: the file of a preparation that
    is not finished, which is read where `path` knows nothing."""

    def __init__(self, path: Path | None = None, rehash: bool = False, begun: Path | None = None):
        self._path = path
        self._found: dict[str, Any] = {}
        for kept in (begun, path):
            if kept is not None and not rehash:
                with contextlib.suppress(OSError, ValueError, RecursionError):  # then all is hashed
                    found = json.loads(kept.read_bytes())
                    self._found |= found if isinstance(found, dict) else {}
        self._kept: dict[str, Any] = {}

    def is_known(self, path: Path) -> bool:
        """Whether the file is as it was when it was hashed."""
        return self._known(path) is not None

    def _known(self, path: Path) -> tuple[str, bytes] | None:
        """(xxh3-128, blocks) of a file that is as it was."""
        entry = self._found.get(str(path.absolute()))
        if not isinstance(entry, list) or len(entry) != 5 or entry[:3] != _mark(path):
            return None
        return str(entry[3]), bytes.fromhex(entry[4])

    def file(self, path: Path, name: str, text_key: str) -> SourceFile:
        """The file, hashed where it is not known."""
        try:
            mark, known = _mark(path), self._known(path)
        except OSError:
            mark, known = [], None  # hash_file says what is wrong
        if known is None:
            file = hash_file(path, name, text_key)
        else:
            file = SourceFile(path, name, mark[0], known[0], text_key, blocks=known[1])
        if mark and mark[1] < time.time_ns() - SETTLED_NS:
            self._kept[str(path.absolute())] = [*mark, file.xxh3, file.blocks.hex()]
        return file

    def save(self) -> None:
        """Keeps the hashes, where the directory can be written."""
        if self._path is not None and self._kept and (self._kept != self._found or not self._path.exists()):
            with contextlib.suppress(OSError):
                write_durably(self._path, json.dumps(self._kept).encode())


def _mark(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino]
