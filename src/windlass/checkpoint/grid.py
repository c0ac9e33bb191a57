"""Boxes of a tensor, and grids of them: which rank holds which part, in a few numbers for any number of ranks. No torch.

Layouts cut regularly: each rank holds the rows behind those of the rank before it. A grid says so once, as a box, its rank, and
axes along which both repeat:

    14336 x 4096 in rows over 8 ranks    the box 1792 x 4096 at (0, 0) of rank 0, 8 times: 1,792 rows and 1 rank further each time

Nothing here knows of layouts. Each rank gives the box that it holds, and `join` makes one grid of two where the second goes on as
the first ends. The ranks of a run join theirs two at a time along their tree (ranks/tree.py), so that no rank ever sees more than
a few grids per tensor, and 16,384 ranks are 14 joins. What is cut irregularly stays in several grids. On its way so does what the
ranks of an axis of 3, 6 or 12 hold whole, since subtrees are powers of two: a grid per group of them.

Where ranks hold the same box (DDP, the replicas of HSDP), an axis has step 0, until one of them is chosen to write.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=0, lt=1 << 48, strict=True)]
Ranks = Annotated[int, Field(ge=0, lt=10**7)]
"""A rank, or a number of them: what a file's name has room for."""
Shape = Annotated[tuple[Size, ...], Field(max_length=16, strict=False)]
MOST_COMPARED: Final = 1 << 17
"""Parts that `overlap` compares, a second or two; an index of a few hundred bytes can ask for any number."""


class JsonRecord(BaseModel):
    """An object in the JSON of a checkpoint: strict, and with no other keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def changed(self, **updates: Any) -> Self:
        """A copy with `updates`, validated as a new record is. Raises pydantic's ValidationError."""
        return type(self)(**(dict(self) | updates))


class Box(NamedTuple):
    """A part of a tensor: where it begins and how long it is, per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

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


class RankPart(NamedTuple):
    """A box of a tensor, and the rank whose file holds it."""

    rank: int
    box: Box


class Axis(JsonRecord):
    """`count` times; each time `step` elements further along `dim`, and `ranks` ranks further."""

    count: Annotated[Ranks, Field(ge=2)]
    dim: Annotated[int, Field(ge=0, lt=16)]
    step: Size
    ranks: Annotated[Ranks, Field(ge=1)]


class Grid(JsonRecord):
    """Boxes of one size and their ranks: the first is given, the others are those that the axes repeat. The first axis changes
    fastest."""

    offsets: Shape
    sizes: Shape
    rank: Ranks
    axes: Annotated[tuple[Axis, ...], Field(max_length=16, strict=False)] = ()

    @staticmethod
    def of(part: RankPart) -> "Grid":
        return Grid.model_construct(offsets=part.box.offsets, sizes=part.box.sizes, rank=part.rank, axes=())

    @property
    def num_parts(self) -> int:
        return math.prod(axis.count for axis in self.axes)

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes) * self.num_parts

    @property
    def last_rank(self) -> int:
        return self.rank + sum((axis.count - 1) * axis.ranks for axis in self.axes)

    def ends(self) -> list[int]:
        """Behind its last element, per dim."""
        return [offset + self.extent(dim, self.axes) for dim, offset in enumerate(self.offsets)]

    def extent(self, dim: int, axes: Iterable[Axis]) -> int:
        """From the first element to behind the last along `dim`, of the parts that `axes` make."""
        return self.sizes[dim] + sum((axis.count - 1) * axis.step for axis in axes if axis.dim == dim)

    def parts(self) -> Iterator[RankPart]:
        """All of them, the first axis fastest."""
        return self._parts(self.offsets, self.rank, len(self.axes))

    def _parts(self, offsets: tuple[int, ...], rank: int, num_axes: int) -> Iterator[RankPart]:
        if num_axes == 0:
            yield RankPart(rank, Box(offsets, self.sizes))
            return
        axis = self.axes[num_axes - 1]
        for index in range(axis.count):
            moved = _moved(offsets, axis.dim, index * axis.step) if axis.step else offsets
            yield from self._parts(moved, rank + index * axis.ranks, num_axes - 1)

    def meeting(self, box: Box) -> Iterator[RankPart]:
        """The parts that share elements with `box`, without looking at the others. For a grid without replicas."""
        return self._meeting(box, self.offsets, self.rank, len(self.axes))

    def _meeting(self, box: Box, offsets: tuple[int, ...], rank: int, num_axes: int) -> Iterator[RankPart]:
        if num_axes == 0:
            part = RankPart(rank, Box(offsets, self.sizes))
            if part.box.common(box).num_elements:
                yield part
            return
        inner, axis = self.axes[: num_axes - 1], self.axes[num_axes - 1]
        dim, step = axis.dim, axis.step
        start, end, extent = box.offsets[dim], box.offsets[dim] + box.sizes[dim], self.extent(dim, inner)
        first = max(0, (start - extent - offsets[dim]) // step + 1)
        behind = min(axis.count, -((offsets[dim] - end) // step))  # rounded up
        for index in range(first, behind):
            moved = _moved(offsets, dim, index * step)
            yield from self._meeting(box, moved, rank + index * axis.ranks, num_axes - 1)


def _moved(offsets: tuple[int, ...], dim: int, step: int) -> tuple[int, ...]:
    return (*offsets[:dim], offsets[dim] + step, *offsets[dim + 1 :])


def join(one: Grid, two: Grid) -> Grid | None:
    """One grid of both; None where they are no grid. `two`'s ranks come behind `one`'s."""
    moved = [(dim, b - a) for dim, (a, b) in enumerate(zip(one.offsets, two.offsets)) if a != b]
    ranks = two.rank - one.rank
    if one.sizes != two.sizes or len(moved) > 1 or ranks < 1:
        return None
    dim, step = moved[0] if moved else (0, 0)
    if step < 0:
        return None
    if both := _as_one_axis(one, two, dim, step, ranks):
        return both
    if one.axes == two.axes:
        return one.changed(axes=(*one.axes, Axis.model_construct(count=2, dim=dim, step=step, ranks=ranks)))
    return None


def _as_one_axis(one: Grid, two: Grid, dim: int, step: int, ranks: int) -> Grid | None:
    """Both as one longer axis: `one`'s last continued by `two`, or `two`'s last begun by `one`. dim, step, ranks: how much
    further `two` is."""
    for grid, other in ((one, two), (two, one)):
        if not grid.axes:
            continue
        *inner, last = grid.axes
        count = _count_along(other, tuple(inner), last)
        before = last.count if grid is one else count
        if count and dim == last.dim and (step, ranks) == (last.step * before, last.ranks * before):
            return one.changed(axes=(*inner, last.changed(count=last.count + count)))
    return None


def _count_along(grid: Grid, inner: tuple[Axis, ...], last: Axis) -> int:
    """How often `grid` repeats what `inner` makes along an axis like `last`; 0 where it is something else."""
    if grid.axes == inner:
        return 1
    same = grid.axes[:-1] == inner and grid.axes[-1].changed(count=last.count) == last
    return grid.axes[-1].count if same else 0


def join_all(ours: Iterable[Grid], theirs: Iterable[Grid]) -> list[Grid]:
    """The grids of lower ranks and those of higher ranks, joined where two of one size that follow each other make one."""
    joined: dict[tuple[int, ...], list[Grid]] = {}
    for grid in ours:
        joined.setdefault(grid.sizes, []).append(grid)
    for grid in theirs:
        before = joined.setdefault(grid.sizes, [])
        while before and (both := join(before[-1], grid)):
            before.pop()
            grid = both
        before.append(grid)
    return [grid for grids in joined.values() for grid in grids]


class TooIrregular(ValueError):
    """Grids whose parts meet too often to be compared."""


def overlap(grids: Sequence[Grid]) -> Box | None:
    """A part that shares elements with another one of these grids; None where there is none. Raises TooIrregular where that takes
    more than MOST_COMPARED comparisons, which no layout's grids do.

    Grids are compared where they meet along one dim: the dim along which fewest do.
    """
    for grid in grids:
        if repeated := _overlap_within(grid):
            return repeated
    dims = range(len(grids[0].sizes)) if grids else ()
    pairs = min((list(islice(_meeting_along(dim, grids), MOST_COMPARED + 1)) for dim in dims), key=len, default=[])
    num_compared = 0
    for one, two in pairs:
        fewer, more = sorted((one, two), key=lambda grid: grid.num_parts)
        num_compared += fewer.num_parts
        if num_compared > MOST_COMPARED:
            raise TooIrregular(f"{len(grids)} grids meet in more than {MOST_COMPARED} parts")
        for part in fewer.parts():
            if next(more.meeting(part.box), None) is not None:
                return part.box
    return None


def _meeting_along(dim: int, grids: Iterable[Grid]) -> Iterator[tuple[Grid, Grid]]:
    """Pairs whose extents along `dim` share an index."""
    reaching: list[tuple[int, Grid]] = []  # of those that begin before, with their ends: what reaches this far
    for grid in sorted(grids, key=lambda one: one.offsets[dim]):
        reaching = [(end, other) for end, other in reaching if end > grid.offsets[dim]]
        yield from ((other, grid) for _, other in reaching)
        reaching.append((grid.ends()[dim], grid))


def _overlap_within(grid: Grid) -> Box | None:
    """The first part, unless along each dim the parts of the axis with the smaller step end before the next of the larger, as
    those of every layout do."""
    for dim in {axis.dim for axis in grid.axes}:
        extent = grid.sizes[dim]
        for axis in sorted((axis for axis in grid.axes if axis.dim == dim), key=lambda axis: axis.step):
            if axis.step < extent:
                return Box(grid.offsets, grid.sizes)
            extent += (axis.count - 1) * axis.step
    return None
