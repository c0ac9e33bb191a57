"""index.json: what every shard file of a dataset must be, checked down to each key that decides how bytes are read.

An index may come from anywhere, and it names files. So nothing of it is believed: a file is directly beside the index,
sizes are whole numbers that fit the format (offsets have 32 bits: below 4 GiB), columns are those that are read here
(never pickled objects), compression is one of two, and a hash is there. What else it asks for is refused by name.

A shard may be stored compressed, as MosaicML's writer does with `compression`: then the index promises size and hash of
both forms, and both are verified. Unpacking stops at the promised size, so no small file becomes a large one.
"""

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import xxhash

from windlass.data.shards.columns import ShardColumns, shard_columns
from windlass.errors import BadShard

INDEX_NAME = "index.json"
MAX_BYTES = (1 << 32) - 1
REPAIR = "prepare the data again into this directory (delete it first), or copy it again from where it is whole"

# in the order of preference, where an index gives several; by the names that MosaicML's library gives them
HASHES: dict[str, Callable[[], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "xxh128": xxhash.xxh128,
    "xxh64": xxhash.xxh64,
    "xxh3_64": xxhash.xxh3_64,
    "sha256": hashlib.sha256,
    "sha1": hashlib.sha1,
    "md5": hashlib.md5,
}
PIECE_BYTES = 1 << 20  # of a file that is verified; small, to stay in the processor's cache
COMPRESSIONS = ("zstd", "gz")


class File(NamedTuple):
    """A file as index.json promises it. `algorithm`: a key of HASHES."""

    name: str
    num_bytes: int
    algorithm: str
    digest: str


class Shard(NamedTuple):
    """One line of index.json. `stored`: the file beside the index; it is `raw` itself, or `raw` compressed."""

    raw: File
    stored: File
    compression: str | None
    num_samples: int
    columns: ShardColumns = ShardColumns()

    @property
    def num_bytes(self) -> int:
        return self.raw.num_bytes


def parse_shard_index(data: bytes, where: str) -> list[Shard]:
    """The shards that index.json at `where` (a path or URL, for messages) promises. Raises BadShard."""
    try:
        index = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadShard(f"{where} is not JSON: {error}", "index.json lists the shards of a dataset", REPAIR) from None
    if not isinstance(index, dict) or index.get("version") != 2 or not isinstance(index.get("shards"), list):
        raise BadShard(f"{where} is not an MDS index", "it is an object with version 2 and a list `shards`", REPAIR)
    shards = [_shard(f"shard {number} in {where}", entry) for number, entry in enumerate(index["shards"])]
    if not shards or len({shard.raw.name for shard in shards}) != len(shards):
        raise BadShard(
            f"{where} lists {len(shards)} shards, or one twice", "shards are at least one, each once", REPAIR
        )
    return shards


def _shard(given: str, entry: Any) -> Shard:
    if not isinstance(entry, dict) or not isinstance(entry.get("raw_data"), dict):
        raise BadShard(f"{given} is not an entry of an MDS index", "an entry is an object with `raw_data`", REPAIR)
    columns = shard_columns(entry)
    encodings = columns.encodings
    wanted: dict[str, Any] = {"format": "mds", "version": 2, "column_names": list(encodings)}
    wanted |= {"column_encodings": list(encodings.values()), "column_sizes": [None] * len(encodings)}
    for key, value in wanted.items():
        if entry.get(key) != value:
            raise BadShard(f"{given} has {key} {entry.get(key)!r}", f"{key} must be {value!r} to be read here", REPAIR)
    compression = entry.get("compression")
    kind = compression.partition(":")[0] if isinstance(compression, str) else compression  # "zstd:3": the level
    if kind is not None and kind not in COMPRESSIONS:
        change = f"write it again uncompressed, or with compression {' or '.join(COMPRESSIONS)}"
        rule = f"shards are plain or compressed with {' or '.join(COMPRESSIONS)}"
        raise BadShard(f"{given} has compression {compression!r}", rule, change)
    if (kind is None) != (entry.get("zip_data") is None):
        rule = "a compressed shard has `zip_data`, another one has none"
        raise BadShard(f"{given} has compression {compression!r} and zip_data {entry.get('zip_data')!r}", rule, REPAIR)
    raw = _file(given, entry["raw_data"])
    samples = entry.get("samples")
    if type(samples) is not int or not 1 <= samples <= raw.num_bytes // 4:
        rule = "a shard holds at least one sample, and each takes more than four bytes"
        raise BadShard(f"{given} has {samples!r} samples in {raw.num_bytes} bytes", rule, REPAIR)
    stored = raw if kind is None else _file(given, entry["zip_data"])
    return Shard(raw, stored, kind, samples, columns)


def _file(given: str, entry: Any) -> File:
    if not isinstance(entry, dict):
        raise BadShard(f"{given} has {type(entry).__name__} for a file", "a file is an object with `basename`", REPAIR)
    name, size, hashes = entry.get("basename"), entry.get("bytes"), entry.get("hashes")
    if not isinstance(name, str) or name in ("", ".", "..", INDEX_NAME) or "/" in name or "\0" in name:
        raise BadShard(f"{given} names the file {name!r}", "a shard is directly beside its index.json", REPAIR)
    if type(size) is not int or not 1 <= size <= MAX_BYTES:
        rule = f"a size is a whole number from 1 to {MAX_BYTES} bytes (offsets in a shard have 32 bits)"
        raise BadShard(f"{given} names {name} of {size!r} bytes", rule, REPAIR)
    for algorithm in HASHES:
        digest = hashes.get(algorithm) if isinstance(hashes, dict) else None
        if isinstance(digest, str):
            return File(name, size, algorithm, digest)
    change = "write it again with hashes=['xxh64']"
    raise BadShard(f"{given} has no hash of {name}", f"a file has one of {', '.join(HASHES)}, to be verified", change)


def check_file_size(file: File, found_bytes: int, where: str, change: str = REPAIR) -> None:
    """Raises BadShard when `where`, which should be `file`, has another size."""
    if found_bytes != file.num_bytes:
        given = f"{where} has {found_bytes} bytes (truncated, or of another preparation)"
        raise BadShard(given, f"index.json promises {file.num_bytes} bytes", change)


def verify_bytes(file: File, data: Any, where: str, change: str = REPAIR) -> None:
    """Raises BadShard, with both sizes or both hashes, when `data` (a buffer), read from `where`, is not `file`."""
    check_file_size(file, memoryview(data).nbytes, where, change)
    digest = HASHES[file.algorithm]()
    digest.update(data)
    _check_digest(file, digest.hexdigest(), where, change)


def verify_file(file: File, opened: io.FileIO, where: str, change: str = REPAIR) -> None:
    """Verifies an open file, which is read and not mapped: a bad block of a disk is an error then, and no SIGBUS."""
    digest, piece = HASHES[file.algorithm](), memoryview(bytearray(PIECE_BYTES))
    try:
        check_file_size(file, os.fstat(opened.fileno()).st_size, where, change)
        while count := opened.readinto(piece):
            digest.update(piece[:count])
    except OSError as error:
        rule = f"index.json promises {file.num_bytes} bytes, {file.algorithm} {file.digest}"
        raise BadShard(f"{where} cannot be read: {error.strerror}", rule, change) from None
    _check_digest(file, digest.hexdigest(), where, change)


def _check_digest(file: File, found: str, where: str, change: str) -> None:
    if found != file.digest:
        given = f"{where} has the hash {file.algorithm} {found}"
        raise BadShard(given, f"index.json promises {file.algorithm} {file.digest}", change)


def unpack_shard(shard: Shard, data: bytes, where: str, change: str = REPAIR) -> bytes:
    """The shard's raw bytes from its stored ones, both verified. Raises BadShard."""
    verify_bytes(shard.stored, data, where, change)
    if shard.compression is None:
        return data
    limit = shard.raw.num_bytes + 1  # one more than promised shows that there is more
    try:
        if shard.compression == "zstd":
            import zstandard

            raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read(limit)
        else:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                raw = file.read(limit)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        rule = f"index.json calls it compressed with {shard.compression}"
        raise BadShard(f"{where} cannot be unpacked: {error}", rule, change) from None
    verify_bytes(shard.raw, raw, f"{where}, unpacked,", change)
    return raw
