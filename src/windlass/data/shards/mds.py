"""Shards of samples on disk: MosaicML's MDS format, our own writer and reader.

A shard file holds, little-endian: u32 number of samples n; u32 offsets[n+1] from the start of the file; a JSON text (the columns
again); then the samples (columns). We keep the part of the format that we need, always with an xxh64 in index.json. (Format:
github.com/mosaicml/streaming, format version 2.)

Writing: a shard is written under a temporary name, fsynced, renamed; index.json comes last, so that a directory
without it is no dataset. Reading: every file's size is compared when the dataset is opened, every file's hash when it
is first mapped. What does not fit raises `BadShard`; nothing is skipped. A shard whose bytes are one bit off is never
read as data. Where shards come from is the reader's `ShardSource`.
"""

import json
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from windlass.data.files import write_durably
from windlass.data.packing import WHOLE
from windlass.data.shards.columns import SampleTable
from windlass.data.shards.index import (
    INDEX_NAME,
    REPAIR,
    File,
    Shard,
    check_file_size,
    parse_shard_index,
    unpack_shard,
    verify_file,
)
from windlass.data.shards.shard_format import ShardFormat, stored_name
from windlass.errors import BadShard


class Writer:
    """Writes rows of `num_ids` ids into shards. `close()` makes them a dataset. A shard holds as many samples as fit into
    `shard_bytes` at 8 bytes per id, however few it takes, so that the order of samples does not depend on what is stored.
    `has_ends`: it also stores which ids end documents. `vocab_size`: ids and targets take the fewest bytes (columns); without it
    they are int32 and labels. `compression`: None or zstd."""

    def __init__(
        self,
        directory: Path,
        num_ids: int,
        shard_bytes: int,
        may_exist: bool = False,
        has_ends: bool = False,
        vocab_size: int | None = None,
        compression: str | None = None,
    ):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=may_exist)
        self.format = ShardFormat(num_ids, shard_bytes, has_ends, vocab_size, compression)
        self.samples_per_shard = self.format.samples_per_shard
        shape = self.samples_per_shard, num_ids  # paged in as they are filled
        self.pending = [np.empty(shape, dtype) for dtype in self.format.plain.types]
        """input_ids, labels and document_ends of the shard that is filled, or was written last; `percent` is apart."""
        self._num_pending = 0
        self._percent: np.ndarray | None = None  # of what is pending, where some of it does not weigh 100
        self._entries: list[dict[str, Any]] = []

    def write(
        self,
        input_ids_NL: np.ndarray,
        labels_NL: np.ndarray,
        ends_NL: np.ndarray | None = None,
        percent_NL: np.ndarray | None = None,
    ) -> None:
        """Appends N samples of L = `num_ids` ids each. percent_NL: how much labels weigh; None: 100."""
        columns = [input_ids_NL, labels_NL, *([] if ends_NL is None else [ends_NL])]
        at = 0
        while at < len(input_ids_NL):
            count = min(self.samples_per_shard - self._num_pending, len(input_ids_NL) - at)
            for held, column in zip(self.pending, columns, strict=True):
                held[self._num_pending : self._num_pending + count] = column[at : at + count]
            if percent_NL is not None and (percent_NL[at : at + count] != WHOLE).any():
                if self._percent is None:
                    self._percent = np.full(self.pending[0].shape, WHOLE, np.uint8)
                self._percent[self._num_pending : self._num_pending + count] = percent_NL[at : at + count]
            self._num_pending, at = self._num_pending + count, at + count
            if self._num_pending == self.samples_per_shard:
                self._flush()

    def _flush(self) -> None:
        count, self._num_pending = self._num_pending, 0
        percent = None if self._percent is None else self._percent[:count]
        columns = [held[:count] for held in self.pending]
        entry, stored = self.format.encoded(len(self._entries), columns, percent)
        self._percent = None
        self.put(entry, stored, count)
        self._entries.append(entry)

    def adopt(self, entry: dict[str, Any], path: Path) -> None:
        """The file at `path`, which `format` has encoded, is the next shard; it stays there too. `end_shard` came before."""
        _link(path, self.directory / stored_name(entry))
        self._entries.append(entry)

    def take(self, directory: Path, count: int) -> None:
        """The first `count` shards of a finished dataset, written with the same settings, become the first of this one: links to
        the same files, or copies where there can be none."""
        self._entries = json.loads((directory / INDEX_NAME).read_bytes())["shards"][:count]
        for shard in read_shard_index(directory)[:count]:
            _link(directory / shard.stored.name, self.directory / shard.stored.name)

    def put(self, entry: dict[str, Any], stored: list[Any], count: int) -> None:
        """Writes the file of a shard of `count` samples."""
        write_durably(self.directory / stored_name(entry), *stored)

    def end_shard(self) -> int:
        """What comes next goes into another shard. -> shards so far."""
        if self._num_pending:
            self._flush()
        return len(self._entries)

    @property
    def num_shards(self) -> int:
        """Written so far."""
        return len(self._entries)

    def close(self) -> None:
        self.end_shard()
        index = json.dumps({"shards": self._entries, "version": 2}, sort_keys=True)
        write_durably(self.directory / INDEX_NAME, index.encode())


def _link(path: Path, link: Path) -> None:
    """`link` becomes another name of `path`, or a copy where the file system has no links."""
    try:
        os.link(path, link)
    except OSError:
        write_durably(link, path.read_bytes())


class ShardSource(Protocol):
    """Where a reader gets shards from: a local `Folder`, or a store through a cache (windlass.data.shards.cache)."""

    @property
    def where(self) -> str:
        """The dataset's directory or URL, for messages."""

    @property
    def shards(self) -> Sequence[Shard]: ...
    @property
    def max_mapped(self) -> int:
        """Most shards that may be in use at once."""

    def load(self, number: int) -> np.ndarray:
        """The verified bytes of shard `number`, [num_bytes] uint8. Raises BadShard."""


class Folder:
    """Shards in a local directory. The index is checked when it is opened; presence and size of a file when it is loaded, its
    hash when it is first loaded: no rank asks a file system of many for every file at its start. A compressed shard is unpacked
    into memory for as long as it is used."""

    def __init__(self, directory: Path):
        self.directory, self.where = directory, str(directory)
        self.shards = read_shard_index(directory)
        self.max_mapped = len(self.shards)
        self._verified: set[int] = set()

    def check(self, max_missing: int = 0) -> None:
        """Looks at presence and size of every file; `max_missing` may be missing, or of another size. Raises BadShard."""
        for shard in self.shards:
            try:
                _check_file(shard.stored, self.directory, str(self.directory / INDEX_NAME))
            except BadShard:
                max_missing -= 1
                if max_missing < 0:
                    raise

    def verify(self) -> None:
        """Reads every file and compares its hash. Raises BadShard."""
        for number in range(len(self.shards)):
            self.load(number)

    def load(self, number: int) -> np.ndarray:
        shard = self.shards[number]
        path = self.directory / shard.stored.name
        _check_file(shard.stored, self.directory, INDEX_NAME)
        try:
            with open(path, "rb", buffering=0) as opened:
                if shard.compression is not None:
                    return np.frombuffer(unpack_shard(shard, opened.readall(), str(path)), np.uint8)
                if number not in self._verified:
                    verify_file(shard.raw, opened, str(path))
                    self._verified.add(number)
                return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:  # no permission, a bad block; emptied between two looks
            rule = f"index.json promises {shard.stored.num_bytes} bytes"
            raise BadShard(f"{path} cannot be read: {error}", rule, REPAIR) from None


def read_shard_index(directory: Path) -> list[Shard]:
    """index.json, strictly validated. Raises BadShard."""
    path = directory / INDEX_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadShard(f"{path} does not exist", "index.json is written last and makes a dataset", REPAIR) from None
    return parse_shard_index(data, str(path))


def _check_file(file: File, directory: Path, index: str) -> None:
    try:
        found_bytes = (directory / file.name).stat().st_size
    except FileNotFoundError:
        given = f"{directory / file.name} is missing"
        raise BadShard(given, f"{index} promises {file.num_bytes} bytes", REPAIR) from None
    check_file_size(file, found_bytes, str(directory / file.name))


class Reader:
    """Random access to the samples of a dataset. Keeps at most `max_mapped` shards mapped, the last used ones.

    Raises BadShard when opened (index; of a directory also presence and sizes) and when a shard is mapped (hash, header).
    """

    def __init__(self, source: Path | ShardSource, max_mapped: int = 64):
        if isinstance(source, Path):
            (source := Folder(source)).check()
        self.source: ShardSource = source
        self.max_mapped = min(max_mapped, self.source.max_mapped)
        self.shards = self.source.shards
        self.shard_samples = [shard.num_samples for shard in self.shards]
        self.num_samples = sum(self.shard_samples)
        self._mapped: OrderedDict[int, SampleTable] = OrderedDict()

    def name(self, number: int) -> str:
        """The path or URL of shard `number`, for messages."""
        return f"{self.source.where}/{self.shards[number].stored.name}"

    def _mapped_table(self, number: int) -> SampleTable:
        if (found := self._mapped.get(number)) is not None:
            self._mapped.move_to_end(number)
            return found
        while len(self._mapped) >= self.max_mapped:
            self._mapped.popitem(last=False)
        self._mapped[number] = _open_table(self.shards[number], self.source.load(number), self.name(number))
        return self._mapped[number]

    def read(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `row` of shard `number` -> (input_ids [L], labels [L]), int32, of the mapped file or copies."""
        return self._mapped_table(number).read(row)

    def ends(self, number: int, row: int) -> np.ndarray | None:
        """Which ids of the sample end documents, [L] bool; None where that is not stored: then every EOS does."""
        ends = self._mapped_table(number).ends
        return None if ends is None else ends[row] != 0

    def percent(self, number: int, row: int) -> np.ndarray | None:
        """How much each label of the sample weighs, [L] uint8; None where all weigh 100."""
        percent = self._mapped_table(number).percent
        return None if percent is None else percent[row]

    @property
    def has_percent(self) -> bool:
        """Whether the labels of some shard do not all weigh 100."""
        return any(shard.columns.has_percent for shard in self.shards)

    def grow(self) -> None:
        """The source has more shards than when it was opened."""
        self.shard_samples += [shard.num_samples for shard in self.shards[len(self.shard_samples) :]]
        self.num_samples = sum(self.shard_samples)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, num_samples in enumerate(self.shard_samples):
            for row in range(num_samples):
                yield self.read(number, row)


def _open_table(shard: Shard, data: np.ndarray, where: str) -> SampleTable:
    """The table of the samples in a shard's bytes. Raises BadShard where the header contradicts the index, or a sample
    contradicts itself."""
    num_samples = int(data[:4].view("<u4")[0])
    offsets = data[4 : 4 + 4 * (shard.num_samples + 1)].view("<u4").astype(np.int64)
    if num_samples != shard.num_samples or len(offsets) != num_samples + 1 or int(offsets[-1]) != shard.num_bytes:
        given = f"{where} holds {num_samples} samples up to byte {int(offsets[-1])}"
        raise BadShard(given, f"index.json promises {shard.num_samples} in {shard.num_bytes} bytes", REPAIR)
    return shard.columns.table(data, offsets, where, REPAIR)
