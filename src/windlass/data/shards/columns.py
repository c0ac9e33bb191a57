"""The columns of a shard: which are stored, and a sample's bytes.

    input_ids      ndarray:uint16, or int32 where the vocabulary has more than 2**16 ids
    labels         int32; stored where they are other ids, and by MosaicML's users
    loss_mask      uint8: 1 where the label is the id, 0 where it is none (-100)
    document_ends  uint8: 1 where an EOS ends a document; stored where others end turns
    percent        uint8: how much each label weighs; stored where not all weigh 100

A shard without `labels` and `loss_mask` counts every id. So a token of text takes two bytes, one with a mask three, and one of a
conversation four, or five with weights. All columns of a sample have one length; a sample holds one u32 size per column, then per
column one byte (ndim << 2 | w), the shape in unsigned integers of 2**w bytes, and the values.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED
from windlass.errors import BadShard

TYPES: Final = {"ndarray:int32": "<i4", "ndarray:uint16": "<u2", "ndarray:uint8": "u1"}
IDS: Final = {"<i4": "ndarray:int32", "<u2": "ndarray:uint16"}
NARROW_IDS: Final = 1 << 16
TARGETS: Final = ("labels", "loss_mask", "")


@dataclass(frozen=True, slots=True)
class SampleTable:
    """The samples of a shard: views of its bytes, [N, L] each."""

    ids: np.ndarray
    """int32 or uint16"""
    target: np.ndarray | None
    """int32 labels, or uint8 where `is_mask`; None: every id counts."""
    is_mask: bool
    ends: np.ndarray | None
    percent: np.ndarray | None

    def read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (input_ids [L], labels [L]), int32; views or copies."""
        ids = self.ids[row]
        if ids.itemsize == 2:
            ids = ids.astype(np.int32)
        if self.target is None:
            return ids, ids
        target = self.target[row]
        return ids, np.where(target != 0, ids, np.int32(NOT_COUNTED)) if self.is_mask else target


class ShardColumns(NamedTuple):
    """`target`: the column that says what counts; "" where every id does."""

    id_type: str = "<i4"
    target: str = "labels"
    has_ends: bool = False
    has_percent: bool = False

    @property
    def encodings(self) -> dict[str, str]:
        found = {"input_ids": IDS[self.id_type]}
        if self.target:
            found[self.target] = "ndarray:int32" if self.target == "labels" else "ndarray:uint8"
        found |= {"document_ends": "ndarray:uint8"} if self.has_ends else {}
        return found | ({"percent": "ndarray:uint8"} if self.has_percent else {})

    @property
    def types(self) -> tuple[np.dtype, ...]:
        return _types(self)

    def records(self, columns: list[np.ndarray]) -> np.ndarray:
        """The samples' bytes, [N, bytes of a sample], from one array [N, L] per column."""
        num_ids = columns[0].shape[1]
        width = 0 if num_ids < 1 << 8 else 1 if num_ids < 1 << 16 else 2
        head = bytes([1 << 2 | width]) + num_ids.to_bytes(1 << width, "little")
        sizes = [len(head) + one.itemsize * num_ids for one in self.types]
        records = np.empty((len(columns[0]), 4 * len(sizes) + sum(sizes)), np.uint8)
        records[:, : 4 * len(sizes)] = np.frombuffer(np.array(sizes, "<u4").tobytes(), np.uint8)
        begin = 4 * len(sizes)
        for size, dtype, column in zip(sizes, self.types, columns, strict=True):
            records[:, begin : begin + len(head)] = np.frombuffer(head, np.uint8)
            values = np.ascontiguousarray(column, dtype).view(np.uint8)
            records[:, begin + len(head) : begin + size] = values
            begin += size
        return records

    def table(self, data: np.ndarray, offsets: np.ndarray, where: str, repair: str) -> SampleTable:
        """The samples in a shard's bytes. Raises BadShard where one is not rows of equally many values, as many as in the others:
        a right hash says only that the bytes are the writer's. offsets: [N + 1]."""
        widths = [one.itemsize for one in self.types]
        num_columns, sizes_N, first = len(widths), np.diff(offsets), int(offsets[0])
        if first < 4 + 4 * len(offsets) or int(sizes_N.min()) < num_columns * (4 + 2):
            raise BadShard(f"{where} has samples that overlap or are empty", "samples follow one another", repair)
        if (sizes_N != sizes_N[0]).any():
            raise BadShard(f"{where} has samples of several lengths", "those of a shard have one length", repair)
        records_NB = data[first:].reshape(len(sizes_N), -1)
        heads_N = 1 + (1 << (records_NB[:, 4 * num_columns].astype(np.int64) & 3))
        sizes_NC = np.ascontiguousarray(records_NB[:, : 4 * num_columns]).view("<u4").astype(np.int64)
        num_ids, left = divmod(int(sizes_NC[0, 0] - heads_N[0]), widths[0])
        wanted_NC = heads_N[:, None] + num_ids * np.array(widths)
        if left or (sizes_NC != wanted_NC).any() or 4 * num_columns + int(wanted_NC[0].sum()) != int(sizes_N[0]):
            raise BadShard(f"{where} has samples with labels of another length", "each id has one label", repair)
        ends_C = 4 * num_columns + np.cumsum(wanted_NC[0])
        found = [records_NB[:, end - width * num_ids : end] for end, width in zip(ends_C.tolist(), widths, strict=True)]
        columns = [one.view(dtype) for one, dtype in zip(found, self.types, strict=True)]
        ids, percent = columns.pop(0), columns.pop() if self.has_percent else None
        ends = columns.pop() if self.has_ends else None
        return SampleTable(ids, columns[0] if columns else None, self.target == "loss_mask", ends, percent)


@functools.cache
def _types(columns: ShardColumns) -> tuple[np.dtype, ...]:
    return tuple(np.dtype(TYPES[encoding]) for encoding in columns.encodings.values())


def narrowest(input_ids_NL: np.ndarray, labels_NL: np.ndarray, has_ends: bool, vocab_size: int) -> ShardColumns:
    """The fewest bytes that hold these samples."""
    id_type = "<u2" if vocab_size <= NARROW_IDS else "<i4"
    is_same_NL = labels_NL == input_ids_NL
    if is_same_NL.all():
        return ShardColumns(id_type, "", has_ends)
    return ShardColumns(id_type, "loss_mask" if (is_same_NL | (labels_NL == NOT_COUNTED)).all() else "labels", has_ends)


def shard_columns(entry: dict[str, Any]) -> ShardColumns:
    """The columns of an entry of index.json, by their names and encodings; where none have both, those of these names, or the
    plain ones."""
    known = [ShardColumns(*of) for of in itertools.product(IDS, TARGETS, (False, True), (False, True))]
    named = [found for found in known if entry.get("column_names") == list(found.encodings)]
    exact = [found for found in named if entry.get("column_encodings") == list(found.encodings.values())]
    return (exact + named + [ShardColumns()])[0]
