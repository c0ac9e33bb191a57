"""Shards of samples on disk: MosaicML's MDS format, our own writer and reader.

A shard file holds, little-endian: u32 number of samples n; u32 offsets[n+1] from the start of the file; a JSON text
(the columns again); then the samples. A sample holds one u32 size per column, then per column one byte (ndim << 2 |
w), the shape in unsigned integers of 2**w bytes, and the values. We keep the part of the format that we need: two
columns, `input_ids` and `labels`, both `ndarray:int32` of one dimension and equal length, written uncompressed, always
with an xxh64 in index.json. (Format: github.com/mosaicml/streaming, format version 2.) Samples of conversations have a
third column of that length, `document_ends`, `ndarray:uint8`: 1 where an EOS ends a document, since others end turns.

Writing: a shard is written under a temporary name, fsynced, renamed; index.json comes last, so that a directory
without it is no dataset. Reading: every file's size is compared when the dataset is opened, every file's hash when it
is first mapped. What does not fit raises `BadShard`; nothing is skipped. A shard whose bytes are one bit off is never
read as data. Where shards come from is the reader's `ShardSource`.
"""

import json
import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from windlass.data.files import write_durably
from windlass.data.shards.index import (
    COLUMNS,
    INDEX_NAME,
    REPAIR,
    WITH_ENDS,
    File,
    Shard,
    check_size,
    parse_index,
    unpack,
    verify_file,
)
from windlass.errors import BadShard


def _layout(num_ids: int, has_ends: bool) -> list[tuple[bytes, str]]:
    """Of each column of a sample the bytes before its values, and their dtype; they depend on the length alone."""
    width = 0 if num_ids < 1 << 8 else 1 if num_ids < 1 << 16 else 2
    head = bytes([1 << 2 | width]) + num_ids.to_bytes(1 << width, "little")
    dtypes = ["<i4", "<i4", "u1"] if has_ends else ["<i4", "<i4"]
    sizes = np.array([len(head) + np.dtype(dtype).itemsize * num_ids for dtype in dtypes], "<u4").tobytes()
    return [(head if number else sizes + head, dtype) for number, dtype in enumerate(dtypes)]


class Writer:
    """Writes rows of `num_ids` ids into shards of at most `shard_bytes` each. `close()` makes them a dataset. `has_ends`: it also
    stores which ids end documents."""

    def __init__(
        self, directory: Path, num_ids: int, shard_bytes: int, may_exist: bool = False, has_ends: bool = False
    ):
        self.directory, self.num_ids, self.shard_bytes = directory, num_ids, shard_bytes
        directory.mkdir(parents=True, exist_ok=may_exist)
        columns = WITH_ENDS if has_ends else COLUMNS
        self._layout = _layout(num_ids, has_ends)
        self._record_bytes = sum(len(head) + np.dtype(dtype).itemsize * num_ids for head, dtype in self._layout)
        self._config = {
            "column_encodings": list(columns.values()),
            "column_names": list(columns),
            "column_sizes": [None] * len(columns),
            "compression": None,
            "format": "mds",
            "hashes": ["xxh64"],
            "size_limit": shard_bytes,
            "version": 2,
        }
        self._config_data = json.dumps(self._config, sort_keys=True).encode()
        room_bytes = shard_bytes - len(self._config_data) - 8
        self.samples_per_shard = max(1, room_bytes // (self._record_bytes + 4))
        self._records = np.empty((self.samples_per_shard, self._record_bytes), np.uint8)  # paged in as it is filled
        self._num_pending = 0
        self._entries: list[dict[str, Any]] = []

    def write(self, input_ids_NL: np.ndarray, labels_NL: np.ndarray, ends_NL: np.ndarray | None = None) -> None:
        """Appends N samples of L = `num_ids` ids each."""
        columns = [input_ids_NL, labels_NL, *([] if ends_NL is None else [ends_NL])]
        at = 0
        while at < len(input_ids_NL):
            count = min(self.samples_per_shard - self._num_pending, len(input_ids_NL) - at)
            records = self._records[self._num_pending : self._num_pending + count]
            begin = 0
            for (head, dtype), column in zip(self._layout, columns, strict=True):
                values = np.ascontiguousarray(column[at : at + count], dtype).view(np.uint8)
                end = begin + len(head) + values.shape[1]
                records[:, begin : begin + len(head)] = np.frombuffer(head, np.uint8)
                records[:, begin + len(head) : end] = values
                begin = end
            self._num_pending, at = self._num_pending + count, at + count
            if self._num_pending == self.samples_per_shard:
                self._flush()

    def _flush(self) -> None:
        num_samples, self._num_pending = self._num_pending, 0
        start = 4 + 4 * (num_samples + 1) + len(self._config_data)
        offsets = start + self._record_bytes * np.arange(num_samples + 1, dtype=np.uint64)
        header = np.uint32(num_samples).tobytes() + offsets.astype("<u4").tobytes() + self._config_data
        body = self._records[:num_samples].reshape(-1).data
        basename = f"shard.{len(self._entries):05}.mds"
        digest = xxhash.xxh64(header)
        digest.update(body)
        raw_data = {
            "basename": basename,
            "bytes": len(header) + len(body),
            "hashes": {"xxh64": digest.hexdigest()},
        }
        entry = {**self._config, "raw_data": raw_data, "samples": num_samples, "zip_data": None}
        self.put(entry, header, body)
        self._entries.append(entry)

    def put(self, entry: dict[str, Any], header: bytes, body: memoryview) -> None:
        """Writes the file of a shard."""
        write_durably(self.directory / entry["raw_data"]["basename"], header, body)

    def columns(self, body: memoryview) -> list[np.ndarray]:
        """The columns of the samples of `body`, [N, num_ids] each: input_ids, labels, and document_ends where it is stored."""
        records, begin, found = np.frombuffer(body, np.uint8).reshape(-1, self._record_bytes), 0, []
        for head, dtype in self._layout:
            end = begin + len(head) + np.dtype(dtype).itemsize * self.num_ids
            found.append(np.ascontiguousarray(records[:, begin + len(head) : end]).view(dtype))
            begin = end
        return found

    def end_shard(self) -> int:
        """What comes next goes into another shard. -> shards so far."""
        if self._num_pending:
            self._flush()
        return len(self._entries)

    def close(self) -> None:
        self.end_shard()
        index = json.dumps({"shards": self._entries, "version": 2}, sort_keys=True)
        write_durably(self.directory / INDEX_NAME, index.encode())


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
    """Shards in a local directory. Index, presence and sizes are checked when it is opened, a file's hash when it is first
    loaded. A compressed shard is unpacked into memory for as long as it is used. `max_missing`: files that may be missing
    or of another size; loading one raises BadShard."""

    def __init__(self, directory: Path, max_missing: int = 0):
        self.directory, self.where = directory, str(directory)
        self.shards = read_index(directory, max_missing)
        self.max_mapped = len(self.shards)
        self._verified: set[int] = set()

    def load(self, number: int) -> np.ndarray:
        shard = self.shards[number]
        path = self.directory / shard.stored.name
        _check_file(shard.stored, self.directory, INDEX_NAME)
        try:
            with open(path, "rb", buffering=0) as opened:
                if shard.compression is not None:
                    return np.frombuffer(unpack(shard, opened.readall(), str(path)), np.uint8)
                if number not in self._verified:
                    verify_file(shard.raw, opened, str(path))
                    self._verified.add(number)
                return np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:  # no permission, a bad block; emptied between two looks
            rule = f"index.json promises {shard.stored.num_bytes} bytes"
            raise BadShard(f"{path} cannot be read: {error}", rule, REPAIR) from None


def read_index(directory: Path, max_missing: int = 0) -> list[Shard]:
    """index.json, strictly validated, and every file's presence and size compared with it, but for `max_missing` files. Raises
    BadShard."""
    path = directory / INDEX_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BadShard(f"{path} does not exist", "index.json is written last and makes a dataset", REPAIR) from None
    shards = parse_index(data, str(path))
    for shard in shards:
        try:
            _check_file(shard.stored, directory, str(path))
        except BadShard:
            max_missing -= 1
            if max_missing < 0:
                raise
    return shards


def _check_file(file: File, directory: Path, index: str) -> None:
    try:
        found_bytes = (directory / file.name).stat().st_size
    except FileNotFoundError:
        given = f"{directory / file.name} is missing"
        raise BadShard(given, f"{index} promises {file.num_bytes} bytes", REPAIR) from None
    check_size(file, found_bytes, str(directory / file.name))


class Reader:
    """Random access to the samples of a dataset. Keeps at most `max_mapped` shards mapped, the last used ones.

    Raises BadShard when opened (index; of a folder also presence and sizes) and when a shard is mapped (hash, header).
    """

    def __init__(self, source: Path | ShardSource, max_mapped: int = 64):
        self.source: ShardSource = Folder(source) if isinstance(source, Path) else source
        self.max_mapped = min(max_mapped, self.source.max_mapped)
        self.shards = self.source.shards
        self.shard_samples = [shard.num_samples for shard in self.shards]
        self.num_samples = sum(self.shard_samples)
        self._mapped: OrderedDict[int, tuple[np.ndarray, list[int]]] = OrderedDict()

    def name(self, number: int) -> str:
        """The path or URL of shard `number`, for messages."""
        return f"{self.source.where}/{self.shards[number].stored.name}"

    def _map(self, number: int) -> tuple[np.ndarray, list[int]]:
        while len(self._mapped) >= self.max_mapped:
            self._mapped.popitem(last=False)
        data = self.source.load(number)
        self._mapped[number] = (data, _offsets(self.shards[number], data, self.name(number)).tolist())
        return self._mapped[number]

    def read(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `row` of shard `number` -> (input_ids [L], labels [L]), int32 views into the mapped file."""
        ids, labels, _ = self._columns(number, row)
        return ids, labels

    def ends(self, number: int, row: int) -> np.ndarray | None:
        """Which ids of the sample end documents, [L] bool; None where that is not stored: then every EOS does."""
        ends = self._columns(number, row)[2]
        return ends != 0 if len(ends) else None

    def _columns(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(input_ids, labels, document_ends or nothing), views into the mapped file."""
        mapped = self._mapped.get(number)
        if mapped is None:
            mapped = self._map(number)
        else:
            self._mapped.move_to_end(number)
        data, offsets = mapped
        sample = data[offsets[row] : offsets[row + 1]]
        num_columns = 3 if self.shards[number].has_ends else 2
        head_bytes = 1 + (1 << (int(sample[4 * num_columns]) & 3))
        size = int(sample[:4].view("<u4")[0])
        second = 4 * num_columns + size
        third = second + size
        ids, labels = sample[second - size + head_bytes : second], sample[second + head_bytes : third]
        return ids.view("<i4"), labels.view("<i4"), sample[third + head_bytes :]

    def grow(self) -> None:
        """The source has more shards than when it was opened."""
        self.shard_samples += [shard.num_samples for shard in self.shards[len(self.shard_samples) :]]
        self.num_samples = sum(self.shard_samples)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, num_samples in enumerate(self.shard_samples):
            for row in range(num_samples):
                yield self.read(number, row)


def _offsets(shard: Shard, data: np.ndarray, where: str) -> np.ndarray:
    """The offsets of the samples in a shard, [num_samples + 1]. Raises BadShard where the header contradicts the index or a
    sample is not rows of equally many values: a right hash says only that the bytes are the writer's."""
    num_samples = int(data[:4].view("<u4")[0])
    offsets = data[4 : 4 + 4 * (shard.num_samples + 1)].view("<u4").astype(np.int64)
    if num_samples != shard.num_samples or len(offsets) != num_samples + 1 or int(offsets[-1]) != shard.num_bytes:
        given = f"{where} holds {num_samples} samples up to byte {int(offsets[-1])}"
        raise BadShard(given, f"index.json promises {shard.num_samples} in {shard.num_bytes} bytes", REPAIR)
    sizes_N, num_columns = np.diff(offsets), 3 if shard.has_ends else 2
    if int(offsets[0]) < 4 + 4 * len(offsets) or int(sizes_N.min()) < num_columns * (4 + 2):
        raise BadShard(f"{where} has samples that overlap or are empty", "samples follow one another", REPAIR)
    sizes_NC = data[offsets[:-1, None] + np.arange(4 * num_columns)].view("<u4").astype(np.int64)
    heads_N = 1 + (1 << (data[offsets[:-1] + 4 * num_columns].astype(np.int64) & 3))
    values_NC = sizes_NC - heads_N[:, None]  # bytes of each column's values
    if (
        (values_NC[:, 0] != values_NC[:, 1]).any()
        or (4 * num_columns + sizes_NC.sum(1) != sizes_N).any()
        or (values_NC[:, 0] % 4 != 0).any()
        or (shard.has_ends and (4 * values_NC[:, 2:] != values_NC[:, :1]).any())
    ):
        raise BadShard(f"{where} has samples with labels of another length", "each id has one label", REPAIR)
    return offsets
