"""Rows of ids in MosaicML's MDS format as other tools write it (LLM Foundry's column `tokens`): of any columns one is read.

The column is an `ndarray:TYPE`, with a shape or without, or `bytes`, whose type no file says. Their index may have no hash: then
the hash of our own, taken when the file is first seen, is the only one (token_files). Format: see windlass.data.shards.mds.

    sample = u32 size of each column that has no fixed one, then the columns' values
    value  = of a fixed shape the ids alone; else one byte (dimensions << 2 | w), the shape in integers of 2**w bytes, the ids
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np

from windlass.data.shards.index import COMPRESSIONS, HASHES, INDEX_NAME
from windlass.data.sources import compression
from windlass.data.tokens.stored_row import StoredRow, damaged_tokens
from windlass.errors import UserError

COLUMNS: Final = ("tokens", "input_ids")  # where the recipe names none
MASKS: Final = ("labels", "loss_mask", "document_ends", "percent")
"""Columns that ids alone do not keep."""
TYPES: Final = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8")
LIST_RULE: Final = "index.json of MDS lists shards: `raw_data` with a file beside it and its size, columns, and samples"


class MosaicShard(NamedTuple):
    file: str
    """The name of the file that is there: the raw one, or a compressed one."""
    file_bytes: int
    hashes: dict[str, str]
    raw_bytes: int
    compression: str | None
    num_samples: int
    columns: dict[str, tuple[str, int | None]]
    """Name -> encoding, and the size where it is fixed; in the order of their values."""


def read_mosaic_index(path: Path) -> list[MosaicShard]:
    """The shards that index.json lists. Raises UserError."""
    try:
        listed = json.loads(path.read_bytes())["shards"]
        shards = [_shard(entry) for entry in listed]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged_tokens(path, f"cannot be read as an index of MDS: {error!r}", LIST_RULE) from None
    for shard in shards:
        if shard.file in ("", ".", "..", INDEX_NAME) or "/" in shard.file or "\0" in shard.file:
            raise damaged_tokens(path, f"names the file {shard.file!r}", "a shard is directly beside its index.json")
        if shard.compression not in (None, *COMPRESSIONS):
            rule = f"shards are plain, or compressed with {' or '.join(COMPRESSIONS)}"
            raise damaged_tokens(path, f"has shards compressed with {shard.compression}", rule)
    return shards


def _shard(entry: dict[str, Any]) -> MosaicShard:
    if entry["format"] != "mds":
        raise ValueError(f"format {entry['format']!r}")
    kind = entry["compression"].partition(":")[0] if entry.get("compression") else None
    file = entry["raw_data"] if kind is None else entry["zip_data"]
    sizes = [None if size is None else int(size) for size in entry["column_sizes"]]
    described = zip(map(str, entry["column_encodings"]), sizes, strict=True)
    return MosaicShard(
        str(file["basename"]),
        int(file["bytes"]),
        {str(name): str(digest) for name, digest in (file.get("hashes") or {}).items()},
        int(entry["raw_data"]["bytes"]),
        kind,
        int(entry["samples"]),
        dict(zip(map(str, entry["column_names"]), described, strict=True)),
    )


def verify_shard(path: Path, shard: MosaicShard) -> None:
    """Raises UserError where the file has another size than its index promises, or another hash, where that has one."""
    if path.stat().st_size != shard.file_bytes:
        raise damaged_tokens(path, f"has {path.stat().st_size} bytes", f"{INDEX_NAME} promises {shard.file_bytes}")
    for name in HASHES:
        if name in shard.hashes:
            digest = HASHES[name]()
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            if digest.hexdigest() != shard.hashes[name]:
                given = f"has the hash {name} {digest.hexdigest()}"
                raise damaged_tokens(path, given, f"{INDEX_NAME} promises {name} {shard.hashes[name]}")
            return


def mosaic_rows(path: Path, shard: MosaicShard, column: str | None, id_type: str | None) -> Iterator[StoredRow]:
    """The rows of a shard. Raises UserError where it has no such column of integers, or is damaged."""
    name = column or next((name for name in COLUMNS if name in shard.columns), None)
    if name not in shard.columns:
        given = f"{path} has the columns {', '.join(shard.columns)}"
        rule = f"ids are in the column {name or ' or '.join(COLUMNS)}"
        raise UserError(given, rule, "name the column of ids in `text` of the source")
    masks = [one for one in MASKS if one in shard.columns]
    if masks and column is None:
        raise UserError(
            f"{path} has {' and '.join(f'`{one}`' for one in masks)} beside its ids",
            "such a column says which ids are learned, or where documents end, and a source of tokens learns every id",
            f"prepare its conversations from their texts; or set `text: {name}` of the source to learn every id",
        )
    encoding, fixed = shard.columns[name]
    dtype = _type_of(path, name, encoding, id_type)
    before = list(shard.columns)[: list(shard.columns).index(name)]
    sized = [one for one, (_, size) in shard.columns.items() if size is None]
    with open(path, "rb") as file:
        data = _unpacked(file, path, shard)
    if len(data) != shard.raw_bytes or len(data) < 4:
        raise damaged_tokens(path, f"holds {len(data)} bytes, unpacked", f"{INDEX_NAME} promises {shard.raw_bytes}")
    count = int(np.frombuffer(data, "<u4", 1)[0])
    if count != shard.num_samples or len(data) < 8 + 4 * count:
        raise damaged_tokens(path, f"holds {count} samples", f"{INDEX_NAME} promises {shard.num_samples}")
    offsets = np.frombuffer(data, "<u4", count + 1, 4).tolist()
    for row, (begin, end) in enumerate(pairwise(offsets)):
        where = f"{path}, row {row},"
        if not 8 + 4 * count <= begin <= end - 4 * len(sized) <= len(data) - 4 * len(sized):
            raise damaged_tokens(path, f"has row {row} outside of it", "rows follow one another")
        sizes = dict(zip(sized, np.frombuffer(data, "<u4", len(sized), begin).tolist()))
        widths = [size if size is not None else sizes[one] for one, (_, size) in shard.columns.items()]
        first = begin + 4 * len(sized) + sum(widths[: len(before)])
        value = data[first : first + widths[len(before)]]
        if len(value) != widths[len(before)] or first + len(value) > end:
            raise damaged_tokens(path, f"has row {row} that is shorter than it says", "a row holds all its columns")
        if encoding.startswith("ndarray") and fixed is None:
            head = 1 + (value[0] >> 2) * (1 << (value[0] & 3)) if value else 0
            value = value[head:]
        if len(value) % dtype.itemsize:
            raise damaged_tokens(path, f"has row {row} of {len(value)} bytes", f"a row is whole ids of {dtype.name}")
        yield StoredRow(np.frombuffer(value, dtype), where)


def _type_of(path: Path, name: str, encoding: str, id_type: str | None) -> np.dtype:
    kind, _, rest = encoding.partition(":")
    said = rest.partition(":")[0]
    if kind == "bytes":
        return np.dtype(id_type or "int64").newbyteorder("<")  # LLM Foundry's own default
    if kind != "ndarray" or said not in TYPES:
        rule = f"ids are bytes, or an ndarray of {', '.join(TYPES)}"
        raise damaged_tokens(path, f"has the column {name} as {encoding}", rule)
    if id_type not in (None, said):
        given = f"`id_type: {id_type}` with the column {name} of {path}, which is {encoding}"
        raise UserError(given, "an ndarray says how wide an id is", "leave `id_type` out")
    return np.dtype(said).newbyteorder("<")


def _unpacked(file: IO[bytes], path: Path, shard: MosaicShard) -> bytes:
    """One byte more than promised shows that there is more."""
    if shard.compression is None:
        return file.read(shard.raw_bytes + 1)
    name = f"{path}.{'zst' if shard.compression == 'zstd' else 'gz'}"
    try:
        return compression.unpacked_stream(file, name, str(path)).read(shard.raw_bytes + 1)
    except compression.broken() as error:
        raise damaged_tokens(
            path, f"cannot be unpacked: {error}", f"{INDEX_NAME} calls it {shard.compression}"
        ) from None
