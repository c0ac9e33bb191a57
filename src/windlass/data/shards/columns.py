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
from typing import Any, Final, NamedTuple

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED
from windlass.errors import BadShard

TYPES: Final = {"ndarray:int32": "<i4", "ndarray:uint16": "<u2", "ndarray:uint8": "u1"}
IDS: Final = {"<i4": "ndarray:int32", "<u2": "ndarray:uint16"}
NARROW_IDS: Final = 1 << 16
TARGETS: Final = ("labels", "loss_mask", "")


class StoredSample(NamedTuple):
    input_ids: np.ndarray
    """[L] int32"""
    labels: np.ndarray
    """[L] int32"""
    ends: np.ndarray | None
    """Which ids end documents, [L] bool; None: every EOS does."""
    percent: np.ndarray | None
    """How much each label weighs, [L] uint8; None: all weigh 100."""


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

    def sample(self, sample: np.ndarray) -> "StoredSample":
        """Of its bytes; views or copies."""
        types = self.types
        begin = 4 * len(types)
        head_bytes = 1 + (1 << (int(sample[begin]) & 3))
        num_ids = (int(sample[:4].view("<u4")[0]) - head_bytes) // types[0].itemsize
        found = []
        for dtype in types:
            end = begin + head_bytes + dtype.itemsize * num_ids
            found.append(sample[begin + head_bytes : end].view(dtype))
            begin = end
        ids = found[0] if self.id_type == "<i4" else found[0].astype(np.int32)
        labels = ids if not self.target else found[1]
        if self.target == "loss_mask":
            labels = np.where(found[1] != 0, ids, np.int32(NOT_COUNTED))
        percent = found.pop() if self.has_percent else None
        return StoredSample(ids, labels, found[-1] != 0 if self.has_ends else None, percent)

    def check(self, data: np.ndarray, offsets: np.ndarray, where: str, repair: str) -> None:
        """Raises BadShard where a sample is not rows of equally many values: a right hash says only that the bytes are the
        writer's. offsets: [N + 1]."""
        widths_C = np.array([one.itemsize for one in self.types])
        num_columns, sizes_N = len(widths_C), np.diff(offsets)
        if int(offsets[0]) < 4 + 4 * len(offsets) or int(sizes_N.min()) < num_columns * (4 + 2):
            raise BadShard(f"{where} has samples that overlap or are empty", "samples follow one another", repair)
        sizes_NC = data[offsets[:-1, None] + np.arange(4 * num_columns)].view("<u4").astype(np.int64)
        heads_N = 1 + (1 << (data[offsets[:-1] + 4 * num_columns].astype(np.int64) & 3))
        values_NC = sizes_NC - heads_N[:, None]  # bytes of each column's values
        is_whole = (values_NC % widths_C == 0).all() and (
            values_NC // widths_C == values_NC[:, :1] // widths_C[0]
        ).all()
        if not is_whole or (4 * num_columns + sizes_NC.sum(1) != sizes_N).any():
            raise BadShard(f"{where} has samples with labels of another length", "each id has one label", repair)


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


def columns_of(entry: dict[str, Any]) -> ShardColumns:
    """Those of an entry of index.json, by their names and encodings; where there are no such, those of these names, or the plain
    ones."""
    known = [ShardColumns(*of) for of in itertools.product(IDS, TARGETS, (False, True), (False, True))]
    named = [found for found in known if entry.get("column_names") == list(found.encodings)]
    exact = [found for found in named if entry.get("column_encodings") == list(found.encodings.values())]
    return (exact + named + [ShardColumns()])[0]
