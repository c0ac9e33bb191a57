"""Shards of samples on disk: MosaicML's MDS format, our own writer and reader.

A shard file holds, little-endian: u32 number of samples n; u32 offsets[n+1] from the start of the file; a JSON text
(the columns again); then the samples. A sample holds one u32 size per column, then per column one byte (ndim << 2 |
w), the shape in unsigned integers of 2**w bytes, and the values. We keep the part of the format that we need: two
columns, `input_ids` and `labels`, both `ndarray:int32` of one dimension and equal length, uncompressed, always with
an xxh64 in index.json. (Format: github.com/mosaicml/streaming, format version 2.)

Writing: a shard is written under a temporary name, fsynced, renamed; index.json comes last, so that a directory
without it is no dataset. Reading: every file's size is compared when the dataset is opened, every file's hash when it
is first mapped. What does not fit raises `BadShard`; nothing is skipped. A shard whose bytes are one bit off is never
read as data.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from windlass.errors import BadShard

COLUMNS = ("input_ids", "labels")
ENCODING = "ndarray:int32"
INDEX_NAME = "index.json"
REPAIR = "prepare the data again into this directory (delete it first), or copy it again from where it is whole"


class Shard(NamedTuple):
    """One line of index.json: what the file must be."""

    path: Path
    num_samples: int
    num_bytes: int
    xxh64: str


def _layout(num_ids: int) -> tuple[bytes, bytes]:
    """The bytes before the values of a sample's first and second column; they depend on the length alone."""
    width = 0 if num_ids < 1 << 8 else 1 if num_ids < 1 << 16 else 2
    head = bytes([1 << 2 | width]) + num_ids.to_bytes(1 << width, "little")
    sizes = np.full(len(COLUMNS), len(head) + 4 * num_ids, "<u4").tobytes()
    return sizes + head, head


def write_durably(path: Path, *chunks: bytes) -> None:
    """The file exists whole under its name, or not at all, whatever kills the machine."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Writer:
    """Writes rows of `num_ids` ids into shards of at most `shard_bytes` each. `close()` makes them a dataset."""

    def __init__(self, directory: Path, num_ids: int, shard_bytes: int):
        self.directory, self.num_ids, self.shard_bytes = directory, num_ids, shard_bytes
        directory.mkdir(parents=True)
        self._heads = _layout(num_ids)
        self._record_bytes = sum(map(len, self._heads)) + 2 * 4 * num_ids
        self._config = {
            "column_encodings": [ENCODING, ENCODING],
            "column_names": list(COLUMNS),
            "column_sizes": [None, None],
            "compression": None,
            "format": "mds",
            "hashes": ["xxh64"],
            "size_limit": shard_bytes,
            "version": 2,
        }
        self._config_data = json.dumps(self._config, sort_keys=True).encode()
        room_bytes = shard_bytes - len(self._config_data) - 8
        self.samples_per_shard = max(1, room_bytes // (self._record_bytes + 4))
        self._pending: list[np.ndarray] = []
        self._num_pending = 0
        self._entries: list[dict[str, Any]] = []

    def write(self, input_ids_NL: np.ndarray, labels_NL: np.ndarray) -> None:
        """Appends N samples of L = `num_ids` ids each."""
        first, second = (np.frombuffer(head, np.uint8) for head in self._heads)
        records = np.empty((len(input_ids_NL), self._record_bytes), np.uint8)
        cut = len(first) + 4 * self.num_ids
        records[:, : len(first)] = first
        records[:, len(first) : cut] = np.ascontiguousarray(input_ids_NL, "<i4").view(np.uint8)
        records[:, cut : cut + len(second)] = second
        records[:, cut + len(second) :] = np.ascontiguousarray(labels_NL, "<i4").view(np.uint8)
        self._pending.append(records)
        self._num_pending += len(records)
        while self._num_pending >= self.samples_per_shard:
            self._flush(self.samples_per_shard)

    def _flush(self, num_samples: int) -> None:
        records = np.concatenate(self._pending)
        self._pending = [records[num_samples:].copy()]
        self._num_pending -= num_samples
        start = 4 + 4 * (num_samples + 1) + len(self._config_data)
        offsets = start + self._record_bytes * np.arange(num_samples + 1, dtype=np.uint64)
        header = np.uint32(num_samples).tobytes() + offsets.astype("<u4").tobytes() + self._config_data
        body = records[:num_samples].tobytes()
        basename = f"shard.{len(self._entries):05}.mds"
        digest = xxhash.xxh64(header)
        digest.update(body)
        write_durably(self.directory / basename, header, body)
        raw_data = {
            "basename": basename,
            "bytes": len(header) + len(body),
            "hashes": {"xxh64": digest.hexdigest()},
        }
        self._entries.append({**self._config, "raw_data": raw_data, "samples": num_samples, "zip_data": None})

    def close(self) -> None:
        if self._num_pending:
            self._flush(self._num_pending)
        index = json.dumps({"shards": self._entries, "version": 2}, sort_keys=True)
        write_durably(self.directory / INDEX_NAME, index.encode())


def _entry(path: Path, number: int, entry: Any) -> Shard:
    """Checks one entry of index.json down to every key that decides how bytes are read."""
    given = f"shard {number} in {path}"
    if not isinstance(entry, dict) or not isinstance(entry.get("raw_data"), dict):
        raise BadShard(f"{given} is not an entry of an MDS index", "an entry is an object with `raw_data`", REPAIR)
    wanted = {"format": "mds", "version": 2, "compression": None, "zip_data": None, "column_names": list(COLUMNS)}
    wanted |= {"column_encodings": [ENCODING, ENCODING], "column_sizes": [None, None]}
    for key, value in wanted.items():
        if entry.get(key) != value:
            raise BadShard(f"{given} has {key} {entry.get(key)!r}", f"{key} must be {value!r} to be read here", REPAIR)
    raw, samples = entry["raw_data"], entry.get("samples")
    basename, size = raw.get("basename"), raw.get("bytes")
    if not isinstance(basename, str) or basename in ("", ".", "..") or "/" in basename or "\0" in basename:
        raise BadShard(f"{given} names the file {basename!r}", "a shard lies directly beside its index.json", REPAIR)
    digest = raw.get("hashes", {}).get("xxh64") if isinstance(raw.get("hashes"), dict) else None
    if not isinstance(digest, str):
        raise BadShard(f"{given} has no xxh64", "a shard without a hash cannot be verified", REPAIR)
    if type(samples) is not int or type(size) is not int or samples < 1 or size < 1:
        raise BadShard(f"{given} has {samples!r} samples in {size!r} bytes", "both are whole numbers above 0", REPAIR)
    return Shard(path.parent / basename, samples, size, digest)


def read_index(directory: Path) -> list[Shard]:
    """index.json, strictly validated, and every file's presence and size compared with it. Raises BadShard."""
    path = directory / INDEX_NAME
    try:
        index = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadShard(f"{path} does not exist", "index.json is written last and makes a dataset", REPAIR) from None
    except ValueError as error:
        raise BadShard(f"{path} is not JSON: {error}", "index.json lists the shards of a dataset", REPAIR) from None
    if not isinstance(index, dict) or index.get("version") != 2 or not isinstance(index.get("shards"), list):
        raise BadShard(f"{path} is not an MDS index", "it is an object with version 2 and a list `shards`", REPAIR)
    shards = [_entry(path, number, entry) for number, entry in enumerate(index["shards"])]
    if not shards or len({shard.path for shard in shards}) != len(shards):
        raise BadShard(f"{path} lists {len(shards)} shards, or one twice", "shards are at least one, each once", REPAIR)
    for shard in shards:
        try:
            found_bytes = shard.path.stat().st_size
        except FileNotFoundError:
            raise BadShard(f"{shard.path} is missing", f"{path} promises {shard.num_bytes} bytes", REPAIR) from None
        if found_bytes != shard.num_bytes:
            rule = f"{path} promises {shard.num_bytes} bytes"
            raise BadShard(f"{shard.path} has {found_bytes} bytes (truncated, or of another preparation)", rule, REPAIR)
    return shards


class Reader:
    """Random access to the samples of a dataset. Keeps at most `max_mapped` files mapped, the last used ones.

    Raises BadShard when opened (index, presence, sizes) and when a shard is first mapped (hash, header).
    """

    def __init__(self, directory: Path, max_mapped: int = 64):
        self.directory, self.max_mapped = directory, max_mapped
        self.shards = read_index(directory)
        self.shard_samples = [shard.num_samples for shard in self.shards]
        self.num_samples = sum(self.shard_samples)
        self._verified: set[int] = set()
        self._mapped: OrderedDict[int, tuple[np.ndarray, list[int]]] = OrderedDict()

    def _map(self, number: int) -> tuple[np.ndarray, list[int]]:
        shard = self.shards[number]
        data: np.ndarray = np.memmap(shard.path, np.uint8, "r").view(np.ndarray)
        if number not in self._verified:
            found = xxhash.xxh64(data.data).hexdigest()
            if found != shard.xxh64:
                given = f"{shard.path} has the hash xxh64 {found}"
                raise BadShard(given, f"index.json promises xxh64 {shard.xxh64}", REPAIR)
        num_samples = int(data[:4].view("<u4")[0])
        offsets = data[4 : 4 + 4 * (shard.num_samples + 1)].view("<u4")
        if num_samples != shard.num_samples or int(offsets[-1]) != shard.num_bytes:
            given = f"{shard.path} holds {num_samples} samples up to byte {int(offsets[-1])}"
            raise BadShard(given, f"index.json promises {shard.num_samples} in {shard.num_bytes} bytes", REPAIR)
        sizes_N2 = data[offsets[:-1, None] + np.arange(8)].view("<u4")
        if (sizes_N2[:, 0] != sizes_N2[:, 1]).any() or (8 + sizes_N2.sum(1) != np.diff(offsets)).any():
            raise BadShard(f"{shard.path} has samples with labels of another length", "each id has one label", REPAIR)
        self._verified.add(number)
        self._mapped[number] = (data, offsets.tolist())
        while len(self._mapped) > self.max_mapped:
            self._mapped.popitem(last=False)
        return self._mapped[number]

    def read(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `row` of shard `number` -> (input_ids [L], labels [L]), int32 views into the mapped file."""
        mapped = self._mapped.get(number)
        if mapped is None:
            mapped = self._map(number)
        else:
            self._mapped.move_to_end(number)
        data, offsets = mapped
        sample = data[offsets[row] : offsets[row + 1]]
        head_bytes = 1 + (1 << (int(sample[8]) & 3))
        column_bytes = (len(sample) - 8) // 2
        ids = sample[8 + head_bytes : 8 + column_bytes].view("<i4")
        return ids, sample[8 + column_bytes + head_bytes :].view("<i4")

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, num_samples in enumerate(self.shard_samples):
            for row in range(num_samples):
                yield self.read(number, row)
