"""A box of a saved tensor, block by block, from whichever parts hold it: what restore, reshard and diff read. No torch.

A checkpoint's parts are boxes, cut as the ranks that saved it were. A box that is asked for is walked in row-major order in
blocks of at most BLOCK_BYTES; for each, the rows it needs of every part it overlaps are read (one contiguous range each) and
verified piece by piece before a byte of them is handed out. In memory: a block, the rows being read for it, and where the parts
of the files begin that were read. Read: a piece at a block's border twice; of a part cut by columns, whole rows.
"""

import math
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from windlass.checkpoint.grid import Box, RankPart
from windlass.checkpoint.hashed_file import PieceReader
from windlass.checkpoint.index import ITEM_BYTES, SavedTensor, parse_boxes
from windlass.checkpoint.manifest import HEADER_BYTES, index_bytes_of, rank_name
from windlass.checkpoint.sealed_json import MAX_SEALED_BYTES, bad
from windlass.checkpoint.verify import Checkpoint

BLOCK_BYTES = 32 << 20  # 8 pieces: the one at its border that is read twice costs an eighth more
OPEN_FILES = 64


def cut_box(box: Box, most_elements: int) -> Iterator[Box]:
    """`box` in row-major order, in boxes of at most `most_elements` that are each contiguous in it. Empty boxes have no parts."""
    if box.num_elements == 0:
        return
    if box.num_elements <= most_elements:
        yield box
        return
    dim = next(index for index, size in enumerate(box.sizes) if size > 1)
    step = max(1, most_elements // math.prod(box.sizes[dim + 1 :]))
    for start in range(0, box.sizes[dim], step):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, min(step, sizes[dim] - start)
        yield from cut_box(Box(tuple(offsets), tuple(sizes)), most_elements)


class _Offsets(NamedTuple):
    """Where the boxes of a rank's file begin."""

    data_at: int
    """The first byte behind the file's index."""
    starts: dict[str, int]


class TensorSource:
    """A checkpoint's tensors as streams. Holds at most OPEN_FILES open; use it in a `with`."""

    def __init__(self, checkpoint: Checkpoint, tensors: Mapping[str, SavedTensor]):
        self.checkpoint, self.tensors = checkpoint, tensors
        self._open: dict[int, PieceReader] = {}
        self._offsets: dict[int, _Offsets] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1].__exit__(kind, error, trace)

    def blocks(self, name: str, box: Box, most_bytes: int = BLOCK_BYTES) -> Iterator[tuple[Box, Any]]:
        """(part of `box`, its bytes as a uint8 array [*sizes, bytes per element]), in row-major order. Raises BadCheckpoint."""
        import numpy

        tensor = self.tensors[name]
        item, held = ITEM_BYTES[tensor.dtype], list(tensor.meeting(box))
        for part in cut_box(box, max(1, most_bytes // item)):
            block = numpy.empty((*part.sizes, item), numpy.uint8)
            for one in held:
                shared = part.common(one.box)
                if shared.num_elements:
                    block[shared.within(part)] = self.read(name, one, shared)
            yield part, block

    def read(self, name: str, part: RankPart, wanted: Box) -> Any:
        """`wanted`, a box inside of the part's: read from its first row to its last, then narrowed -> as in `blocks`."""
        import numpy

        at, reader, item = self.offset(name, part), self._reader(part.rank), ITEM_BYTES[self.tensors[name].dtype]
        held = part.box
        if not held.sizes:
            return numpy.frombuffer(reader.read(at, item), numpy.uint8)
        where, last = wanted.within(held), len(held.sizes) - 1
        dim = next((index for index, size in enumerate(wanted.sizes) if size > 1), last)
        strides = [math.prod(held.sizes[index + 1 :]) * item for index in range(last + 1)]  # in bytes
        first = sum(where[index].start * strides[index] for index in range(dim + 1))
        data = reader.read(at + first, wanted.sizes[dim] * strides[dim])
        array = numpy.frombuffer(data, numpy.uint8).reshape(*wanted.sizes[: dim + 1], *held.sizes[dim + 1 :], item)
        return array[(*(slice(None),) * (dim + 1), *where[dim + 1 :])]

    def offset(self, name: str, part: RankPart) -> int:
        """The byte of its file at which a part begins."""
        if part.rank not in self._offsets:
            self._reader(part.rank)
        offsets = self._offsets[part.rank]
        if name not in offsets.starts:
            raise bad(f"{rank_name(part.rank)} has no part of {name[:80]!r}", "index.json says who holds what")
        return offsets.data_at + offsets.starts[name]

    def _reader(self, rank: int) -> PieceReader:
        reader = self._open.pop(rank, None)
        if reader is None:
            while len(self._open) >= OPEN_FILES:
                oldest = next(iter(self._open))
                self._open.pop(oldest).__exit__(None, None, None)
            reader = self.checkpoint.reader(rank_name(rank))
            self._open[rank] = reader
            if rank not in self._offsets:
                self._offsets[rank] = self._read_offsets(rank, reader)
        self._open[rank] = reader  # the newest is the last
        return reader

    def _read_offsets(self, rank: int, reader: PieceReader) -> _Offsets:
        file = rank_name(rank)
        reader.check_size()
        size = self.checkpoint.manifest.files[file].size
        length = index_bytes_of(bytes(reader.read(0, HEADER_BYTES))) if size > HEADER_BYTES else None
        if not length or length > min(size - HEADER_BYTES, MAX_SEALED_BYTES):
            raise bad(
                f"{file} begins with no header of a rank's file", "the header says how long the index behind it is"
            )
        data_at = HEADER_BYTES + length
        index = bytes(reader.read(HEADER_BYTES, length))
        return _Offsets(data_at, parse_boxes(index, rank, file, size - data_at, self.tensors))


def as_bytes(array: Any) -> memoryview:
    """The bytes of an array in row-major order; a copy where it is not contiguous."""
    import numpy

    view: memoryview = numpy.ascontiguousarray(array).reshape(-1).data
    return view
