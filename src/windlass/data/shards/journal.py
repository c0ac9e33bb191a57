"""A preparation that is still being written: a journal of its complete shards, which readers follow.

    directory/growing.jsonl    appended, never rewritten:  begin, shard, shard, ..., end
    directory/growing.beat     replaced once a second while the preparation works: a count, or why it failed
    directory/prepared.json    written last, as ever

`begin` says what prepared.json will say, but for the training set; by then the tokenizer and all other sets are whole. A `shard`
is the very entry that index.json will have, written when the file is whole on disk. `end` is the training set in numbers. Each
line holds the hash of itself and the line before, so the last line vouches for all, and the file cannot be another
preparation's without being noticed. A kill leaves at most the last line torn: readers do not look behind the last newline,
the next preparation cuts it off.

A preparation that goes on after a kill makes the same shards again from the parts it kept (`parts`); one that the journal has is
compared with it by hash and not written twice, so that nobody who reads is disturbed.
"""

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import xxhash

from windlass.data.files import write_durably
from windlass.data.packing import most_documents
from windlass.data.shards.index import Shard, parse_shard_index
from windlass.data.shards.mds import Writer
from windlass.errors import BadShard, Unavailable, UserError

JOURNAL_NAME: Final = "growing.jsonl"
BEAT_NAME: Final = "growing.beat"
JOURNAL_FILES: Final = (JOURNAL_NAME, BEAT_NAME, f"{BEAT_NAME}.new")
BEAT_EVERY_S: Final = 1.0
ROWS_AT_ONCE: Final = 256  # while documents are counted
REPAIR: Final = "delete the directory, and prepare again"

Item = TypeVar("Item")


def _sealed(before: str, line: dict[str, Any]) -> tuple[bytes, str]:
    """(the line with its hash behind it, the hash)."""
    digest = xxhash.xxh3_128_hexdigest(before.encode() + json.dumps(line, sort_keys=True).encode())
    return json.dumps({**line, "hash": digest}, sort_keys=True).encode() + b"\n", digest


class Journal:
    """The reading end: `read` takes in what is new."""

    def __init__(self, directory: Path):
        self.path = directory / JOURNAL_NAME
        self.begin: dict[str, Any] = {}
        self.shards: list[Shard] = []
        self.entries: list[dict[str, Any]] = []
        self.most_documents: list[int] = []
        """Per shard, documents in the sample that has the most, of this and all earlier shards."""
        self.end: dict[str, Any] | None = None
        self.num_bytes = 0
        self._hash = ""

    def read(self) -> None:
        """Every whole line that was not read yet. Raises FileNotFoundError where there is none, BadShard where it is not what it
        was."""
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.num_bytes:
                raise self._damaged("is shorter than it was")
            file.seek(self.num_bytes)
            data = file.read()
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            self._take(line)
            self.num_bytes += len(line)

    def _take(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
            digest = fields.pop("hash")
            kind = fields["kind"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._damaged(f"holds {line[:60]!r}") from None
        if _sealed(self._hash, fields)[1] != digest or (kind == "begin") != (not self.num_bytes):
            raise self._damaged(f"is not what it was, from byte {self.num_bytes} on")
        self._hash = digest
        if kind == "begin":
            self.begin = fields
        elif kind == "shard":
            index = json.dumps({"version": 2, "shards": [fields["entry"]]}).encode()
            self.entries.append(fields["entry"])
            self.most_documents.append(max(fields["most_documents"], *self.most_documents[-1:], 1))
            self.shards += parse_shard_index(index, str(self.path))
        else:
            self.end = fields

    def _damaged(self, what: str) -> BadShard:
        rule = "the journal of a preparation is only ever appended to, and each line has the hash of those before"
        return BadShard(f"{self.path} {what}", rule, f"it was replaced, or is damaged: {REPAIR}")

    def add(self, line: dict[str, Any]) -> None:
        """The writing end. The line is on disk when this returns."""
        data, _ = _sealed(self._hash, line)
        with open(self.path, "ab", buffering=0) as file:
            os.truncate(file.fileno(), self.num_bytes)  # what a killed process left of a line
            file.write(data)
            os.fsync(file.fileno())
        self._take(data)
        self.num_bytes += len(data)


def begin_journal(directory: Path, content: dict[str, Any]) -> None:
    """The first line, with what is known before the training set is. The directory is no preparation before."""
    write_durably(directory / JOURNAL_NAME, _sealed("", {"kind": "begin", **content})[0])


def open_journal(directory: Path) -> Journal | None:
    """The journal there as far as it goes, or None. Raises BadShard."""
    journal = Journal(directory)
    try:
        journal.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return journal if journal.begin else None


class Beat:
    """The sign of life, from `begin` on. `tick` may be called at any rate."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._count, self._written_s = 0, -math.inf
        self._who = f"process {os.getpid()} on {socket.gethostname()}"

    def begin(self, directory: Path) -> None:
        self._path, self._written_s = directory / BEAT_NAME, -math.inf
        self.tick()

    def through(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each a tick."""
        for item in items:
            self.tick()
            yield item

    def tick(self) -> None:
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._written_s >= BEAT_EVERY_S:
            self._written_s = now_s
            if self._path is not None:
                _replace(self._path, {"who": self._who, "count": self._count})


@contextlib.contextmanager
def beating(directory: Path) -> Iterator[None]:
    """A beat for work that cannot tick: sources are looked at before a preparation goes on that somebody may be waiting for."""
    if not (directory / JOURNAL_NAME).exists():
        yield
        return
    beat, is_done = Beat(), threading.Event()
    beat.begin(directory)

    def work() -> None:
        while not is_done.wait(BEAT_EVERY_S):
            beat.tick()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def log_failure(directory: Path, error: UserError) -> None:
    """Why no more shards will come, for those who wait for some; nothing where there is nothing to wait for."""
    journal = open_journal(directory)
    if journal is not None and journal.end is None:
        _replace(directory / BEAT_NAME, {"failed": [error.given, error.rule, error.change], "retry": error.retry})


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Where one process takes over from another that died, both may write at once. The file is then that of one of them, or not
    whole until the next beat."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(content))
    with contextlib.suppress(FileNotFoundError):
        os.replace(temporary, path)


def read_beat(directory: Path) -> tuple[str, UserError | None]:
    """(what changes while the preparation works, why it has failed)."""
    try:
        text = (directory / BEAT_NAME).read_text()
        beat = json.loads(text)
    except (
        OSError,
        ValueError,
        RecursionError,
    ):  # there is none yet, or a network's file system shows it between two states
        return "", None
    if "failed" not in beat:
        return text, None
    return text, (Unavailable if beat["retry"] else UserError)(*beat["failed"])


class JournaledWriter(Writer):
    """Writes a set and enters each complete shard into the journal; continues a set that was begun. `row_ids`: ids of a row in
    which documents are counted; a sample may have several."""

    def __init__(
        self,
        directory: Path,
        num_ids: int,
        shard_bytes: int,
        journal: Journal,
        beat: Beat,
        eos_id: int,
        row_ids: int,
        **stored: Any,
    ):
        """`stored`: what else a Writer takes."""
        super().__init__(directory, num_ids, shard_bytes, may_exist=True, **stored)
        self._journal, self._beat, self._eos_id, self._row_ids = journal, beat, eos_id, row_ids

    def put(self, entry: dict[str, Any], stored: list[Any], count: int) -> None:
        number, known = len(self._entries), self._journal.entries
        file = entry["zip_data"] or entry["raw_data"]
        path = self.directory / file["basename"]
        self._beat.tick()
        if number < len(known):
            if entry != known[number]:
                given = f"{path} comes out with {entry['raw_data']['hashes']}, and had {known[number]['raw_data']['hashes']}"
                raise BadShard(given, "the same sources, tokenizer and settings give the same shards", REPAIR)
            if path.is_file() and path.stat().st_size == file["bytes"]:
                return
        super().put(entry, stored, count)
        if number >= len(known):
            self._journal.add({"kind": "shard", "entry": entry, "most_documents": self._most_documents(count)})

    def _most_documents(self, count: int) -> int:
        ids_NL, labels_NL, *stored = (held[:count].reshape(-1, self._row_ids) for held in self.pending)
        ends_NL = stored[0] != 0 if stored else ids_NL == self._eos_id
        starts = range(0, len(ids_NL), ROWS_AT_ONCE)
        pieces = ((ends_NL[at : at + ROWS_AT_ONCE], labels_NL[at : at + ROWS_AT_ONCE]) for at in starts)
        return max(most_documents(ends, labels) for ends, labels in pieces)
