"""Documents of Megatron-LM's indexed datasets (megatron/core/datasets/indexed_dataset.py), little-endian:

    x.idx   b"MMIDIDX\\0\\0", u64 version 1, u8 type of an id, u64 sequences S, u64 D
            i32 lengths[S], i64 offsets[S] (bytes in x.bin), i64 first sequence of each document, and S at last [D]
    x.bin   ids

A document is its sequences, joined. Some writers, datatrove's among them, leave out the last S.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from windlass.data.tokens.stored_row import StoredRow, damaged_tokens

MAGIC: Final = b"MMIDIDX\x00\x00"
HEAD_BYTES: Final = len(MAGIC) + 8 + 1 + 8 + 8
TYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronIndex(NamedTuple):
    dtype: np.dtype
    lengths: np.ndarray
    """Ids of each sequence, [S]."""
    offsets: np.ndarray
    """Bytes before each, [S]."""
    borders: np.ndarray
    """First sequence of each document, and S."""


def read_megatron_index(path: Path) -> MegatronIndex:
    """Raises UserError where it is none, or contradicts itself."""
    data = path.read_bytes()
    rule = "an .idx beside a .bin is an index of Megatron-LM, version 1"
    if len(data) < HEAD_BYTES or not data.startswith(MAGIC):
        raise damaged_tokens(path, "is no index of Megatron-LM", rule)
    version, code = int.from_bytes(data[9:17], "little"), data[17]
    if version != 1 or code not in TYPES:
        raise damaged_tokens(
            path, f"has version {version} and ids of type {code}", f"{rule}, of integers {sorted(TYPES)}"
        )
    num_sequences, num_borders = (int.from_bytes(data[at : at + 8], "little") for at in (18, 26))
    if len(data) < HEAD_BYTES + 12 * num_sequences + 8 * num_borders:
        raise damaged_tokens(path, f"is too short for {num_sequences} sequences", rule)
    lengths = np.frombuffer(data, "<i4", num_sequences, HEAD_BYTES)
    offsets = np.frombuffer(data, "<i8", num_sequences, HEAD_BYTES + 4 * num_sequences)
    borders = np.frombuffer(data, "<i8", num_borders, HEAD_BYTES + 12 * num_sequences)
    if num_borders and borders[-1] < num_sequences:
        borders = np.append(borders, num_sequences)
    rises = num_borders > 0 and borders[0] == 0 and borders[-1] == num_sequences and (np.diff(borders) >= 0).all()
    if not rises or (lengths < 0).any() or (offsets < 0).any():
        raise damaged_tokens(path, "contradicts itself", "its documents are rising ranges of all its sequences")
    return MegatronIndex(np.dtype(TYPES[code]).newbyteorder("<"), lengths, offsets, borders)


def megatron_rows(path: Path, index: MegatronIndex) -> Iterator[StoredRow]:
    """Every document in `path`, the .bin. Raises UserError where it is shorter than the index promises."""
    width = index.dtype.itemsize
    needed = int((index.offsets + index.lengths.astype(np.int64) * width).max(initial=0))
    if needed > path.stat().st_size:
        raise damaged_tokens(path, f"has {path.stat().st_size} bytes", f"its .idx promises {needed}")
    with open(path, "rb") as file:
        for number, (first, end) in enumerate(zip(index.borders[:-1].tolist(), index.borders[1:].tolist())):
            parts = []
            for offset, length in zip(index.offsets[first:end].tolist(), index.lengths[first:end].tolist()):
                file.seek(offset)
                parts.append(np.frombuffer(file.read(length * width), index.dtype))
            ids = np.concatenate(parts) if parts else np.empty(0, index.dtype)
            yield StoredRow(ids, f"{path}, document {number},")
