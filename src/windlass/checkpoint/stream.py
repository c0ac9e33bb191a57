"""A box of a saved tensor, block by block, from whichever chunks hold it: what reshard and diff read. No torch.

A checkpoint's chunks are boxes, cut as the ranks that saved it were. A box that is asked for is walked in row-major order in
blocks of at most BLOCK_BYTES; for each, the rows it needs of every chunk it overlaps are read (one contiguous range each) and
verified piece by piece before a byte of them is handed out. In memory: a block, the range being read for it, and nothing that
grows with the tensor. Read: a piece at a block's border twice; where chunks are cut by columns, whole rows of a chunk.
"""

import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from windlass.checkpoint.hashed_file import PieceReader
from windlass.checkpoint.index import ITEM_BYTES, Chunk, SavedTensor
from windlass.checkpoint.manifest import HEADER_BYTES
from windlass.checkpoint.verify import Checkpoint

BLOCK_BYTES = 32 << 20  # 8 pieces: the one at its border that is read twice costs an eighth more
OPEN_FILES = 64


class Box(NamedTuple):
    """A part of a tensor: where it begins and how long it is, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(chunk: Chunk) -> "Box":
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: "Box") -> "Box":
        """What both hold; a size of it is 0 where they hold nothing in common."""
        first = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets))
        ends = ((a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes))
        return Box(first, tuple(max(min(pair) - start, 0) for pair, start in zip(ends, first)))

    def within(self, other: "Box") -> tuple[slice, ...]:
        """This box as slices of an array that holds `other`."""
        starts = (a - b for a, b in zip(self.offsets, other.offsets))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes))


def whole_box(tensor: SavedTensor) -> Box:
    return Box((0,) * len(tensor.shape), tuple(tensor.shape))


def cut(box: Box, most_elements: int) -> Iterator[Box]:
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
        yield from cut(Box(tuple(offsets), tuple(sizes)), most_elements)


class TensorSource:
    """A checkpoint's tensors as streams. Holds at most OPEN_FILES open; use it in a `with`."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self._open: dict[str, PieceReader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1].__exit__(kind, error, trace)

    def blocks(self, tensor: SavedTensor, box: Box, most_bytes: int = BLOCK_BYTES) -> Iterator[tuple[Box, Any]]:
        """(part of `box`, its bytes as a uint8 array [*sizes, bytes per element]), in row-major order. Raises BadCheckpoint."""
        import numpy

        item = ITEM_BYTES[tensor.dtype]
        chunks = [(Box.of(chunk), chunk) for chunk in tensor.chunks]
        for part in cut(box, max(1, most_bytes // item)):
            block = numpy.empty((*part.sizes, item), numpy.uint8)
            for held, chunk in chunks:
                shared = part.common(held)
                if shared.num_elements:
                    block[shared.within(part)] = self._read(chunk, held, shared, item)
            yield part, block

    def _read(self, chunk: Chunk, held: Box, wanted: Box, item: int) -> Any:
        """`wanted`, a box inside of the chunk's: read from its first row to its last, then narrowed."""
        import numpy

        if not held.sizes:
            return numpy.frombuffer(self._reader(chunk.file).read(chunk.at, item), numpy.uint8)
        where, last = wanted.within(held), len(held.sizes) - 1
        dim = next((index for index, size in enumerate(wanted.sizes) if size > 1), last)
        strides = [math.prod(held.sizes[index + 1 :]) * item for index in range(last + 1)]  # in bytes
        first = sum(where[index].start * strides[index] for index in range(dim + 1))
        data = self._reader(chunk.file).read(chunk.at + first, wanted.sizes[dim] * strides[dim])
        array = numpy.frombuffer(data, numpy.uint8).reshape(*wanted.sizes[: dim + 1], *held.sizes[dim + 1 :], item)
        return array[(*(slice(None),) * (dim + 1), *where[dim + 1 :])]

    def _reader(self, file: str) -> PieceReader:
        reader = self._open.pop(file, None)
        if reader is None:
            while len(self._open) >= OPEN_FILES:
                oldest = next(iter(self._open))
                self._open.pop(oldest).__exit__(None, None, None)
            reader = self.checkpoint.reader(file)
            reader.check_size()
            reader.read(0, HEADER_BYTES)  # no tensor is there, but a whole file is whole everywhere
        self._open[file] = reader  # the newest is the last
        return reader


def as_bytes(array: Any) -> memoryview:
    """The bytes of an array in row-major order; a copy where it is not contiguous."""
    import numpy

    view: memoryview = numpy.ascontiguousarray(array).reshape(-1).data
    return view
