"""Samples -> the bytes of one shard file, and its entry in index.json. Whoever has the samples can make them."""

import json
from typing import Any, NamedTuple

import numpy as np
import xxhash

from windlass.data.shards.columns import ShardColumns, narrowest


class ShardFormat(NamedTuple):
    """The format of a set's shards: samples of `num_ids` ids; the other fields are mds.Writer's."""

    num_ids: int
    shard_bytes: int
    has_ends: bool = False
    vocab_size: int | None = None
    compression: str | None = None

    @property
    def plain(self) -> ShardColumns:
        """The columns that samples come in."""
        return ShardColumns(has_ends=self.has_ends)

    @property
    def samples_per_shard(self) -> int:
        plain = self.plain
        record_bytes = plain.records([np.zeros((1, self.num_ids), np.uint8)] * len(plain.types)).shape[1]
        room_bytes = self.shard_bytes - len(json.dumps(self._config(plain, None), sort_keys=True)) - 8
        return max(1, room_bytes // (record_bytes + 4))

    def _config(self, columns: ShardColumns, compression: str | None) -> dict[str, Any]:
        return {
            "column_encodings": list(columns.encodings.values()),
            "column_names": list(columns.encodings),
            "column_sizes": [None] * len(columns.encodings),
            "compression": compression,
            "format": "mds",
            "hashes": ["xxh64"],
            "size_limit": self.shard_bytes,
            "version": 2,
        }

    def encoded(
        self, number: int, columns_NL: list[np.ndarray], percent_NL: np.ndarray | None = None
    ) -> tuple[dict[str, Any], list[Any]]:
        """(entry, bytes in pieces) of shard `number`. columns_NL: input_ids, labels, and document_ends where `has_ends`.
        percent_NL: how much labels weigh, where they do not all weigh 100."""
        ids, labels, *ends = columns_NL
        columns = self.plain
        if self.vocab_size is not None:
            columns = narrowest(ids, labels, self.has_ends, self.vocab_size)
        if percent_NL is not None:
            columns = columns._replace(has_percent=True)
            ends.append(percent_NL)
        targets = {"labels": [labels], "loss_mask": [labels == ids], "": []}[columns.target]
        records = columns.records([ids, *targets, *ends])
        config = self._config(columns, self.compression)
        config_data = json.dumps(config, sort_keys=True).encode()
        start = 4 + 4 * (len(ids) + 1) + len(config_data)
        offsets = start + records.shape[1] * np.arange(len(ids) + 1, dtype=np.uint64)
        header = np.uint32(len(ids)).tobytes() + offsets.astype("<u4").tobytes() + config_data
        basename = f"shard.{number:05}.mds"
        stored = raw = [header, records.reshape(-1).data]
        entry = {**config, "raw_data": _file(basename, raw), "samples": len(ids), "zip_data": None}
        if self.compression is not None:
            stored = [_compressed(b"".join(raw))]
            entry["zip_data"] = _file(f"{basename}.{self.compression}", stored)
        return entry, stored


def stored_name(entry: dict[str, Any]) -> str:
    """The name of the file that an entry of index.json is of."""
    name: str = (entry["zip_data"] or entry["raw_data"])["basename"]
    return name


def _file(basename: str, parts: list[Any]) -> dict[str, Any]:
    digest = xxhash.xxh64()
    for part in parts:
        digest.update(part)
    return {"basename": basename, "bytes": sum(map(len, parts)), "hashes": {"xxh64": digest.hexdigest()}}


def _compressed(data: bytes) -> bytes:
    import zstandard

    packed: bytes = zstandard.ZstdCompressor().compress(data)
    return packed
