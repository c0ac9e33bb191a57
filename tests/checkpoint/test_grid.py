"""Grids against lists of parts: nothing is lost or made up, however ranks hold a tensor, and regular cuts are few numbers."""

import itertools
import math
import random

import pytest
from pydantic import ValidationError

from windlass.checkpoint.grid import Axis, Box, Grid, RankPart, join, join_all, overlap
from windlass.ranks.tree import children_of


def cut(length, pieces):
    """(start, size) of each, as torch.chunk cuts: of one size, the last less, some empty."""
    step = math.ceil(length / pieces)
    return [(min(at * step, length), min(step, max(0, length - at * step))) for at in range(pieces)]


def layouts(shape, kinds, sizes):
    """rank -> its box, for a mesh of `sizes`, the last fastest. A kind: the dim that the axis cuts, or None for replicas. Of two
    axes that cut one dim the later cuts first, as tensor ranks do before FSDP2."""
    boxes = []
    for place in itertools.product(*map(range, sizes)):
        offsets, lengths = [0] * len(shape), list(shape)
        for axis in reversed(range(len(sizes))):
            dim = kinds[axis]
            if dim is not None:
                start, length = cut(lengths[dim], sizes[axis])[place[axis]]
                offsets[dim], lengths[dim] = offsets[dim] + start, length
        boxes.append(Box(tuple(offsets), tuple(lengths)))
    return boxes


def along_the_tree(boxes, rank=0):
    """What rank's subtree gives, joined as ranks/tree.py joins."""
    grids = [Grid.of(RankPart(rank, boxes[rank]))] if boxes[rank].num_elements else []
    for child in children_of(rank, len(boxes)):
        grids = join_all(grids, along_the_tree(boxes, child))
    return grids


CASES = [
    ((64, 12), (0,), (8,), 1),
    ((64, 12), (0,), (16,), 1),
    ((7,), (0,), (4,), 2),
    ((3,), (0,), (8,), 1),  # empty on five
    ((1000, 8), (0,), (12,), 2),
    ((64, 12), (None,), (6,), 1),
    ((64, 12), (None, 0), (4, 8), 1),
    ((64, 12), (0, None), (4, 2), 1),
    ((64, 12), (0, 0), (4, 2), 1),  # rows by tensor ranks, then by FSDP
    ((64, 12), (0, 1), (4, 2), 1),
    ((64, 12), (None, 0, 1), (2, 4, 4), 1),
    ((64, 16), (0, None, 1), (8, 2, 2), 1),
    ((40, 12), (None, 0, 0), (3, 4, 2), 1),
    ((), (None, None), (4, 2), 1),
    ((5, 0), (0,), (4,), 0),
]


@pytest.mark.parametrize(("shape", "kinds", "sizes", "most"), CASES)
def test_what_ranks_hold_is_few_grids(shape, kinds, sizes, most):
    boxes = layouts(shape, kinds, sizes)
    grids = along_the_tree(boxes)
    found = sorted(part for grid in grids for part in grid.parts())
    assert found == [RankPart(rank, box) for rank, box in enumerate(boxes) if box.num_elements]
    assert len(grids) == most


def test_16_384_ranks_are_one_grid_of_one_axis():
    boxes = [Box((8 * rank, 0), (8, 4096)) for rank in range(16384)]
    (grid,) = along_the_tree(boxes)
    assert grid.axes == (Axis(count=16384, dim=0, step=8, ranks=1),) and grid.last_rank == 16383
    assert [part.rank for part in grid.meeting(Box((80_001, 7), (16, 1)))] == [10000, 10001, 10002]


@pytest.mark.parametrize("seed", range(200))
def test_any_boxes_of_any_ranks_stay_what_they_are(seed):
    """Also meshes of three and five ranks, and ranks that hold nothing, whose grids are many."""
    draw = random.Random(seed)
    dims = draw.randint(1, 3)
    shape = tuple(draw.randint(1, 24) for _ in range(dims))
    sizes = tuple(draw.choice([1, 2, 3, 4, 5]) for _ in range(draw.randint(1, 3)))
    kinds = tuple(draw.choice([None, *range(dims)]) for _ in sizes)
    boxes = layouts(shape, kinds, sizes)
    if draw.random() < 0.3:
        boxes = [box if draw.random() < 0.8 else Box(box.offsets, (0,) * dims) for box in boxes]
    found = sorted(part for grid in along_the_tree(boxes) for part in grid.parts())
    assert found == [RankPart(rank, box) for rank, box in enumerate(boxes) if box.num_elements]


@pytest.mark.parametrize("seed", range(100))
def test_the_parts_that_meet_a_box_are_those_of_a_search_through_all(seed):
    draw = random.Random(seed)
    shape, sizes = (48, 36), (draw.choice([1, 2, 3, 4]), draw.choice([1, 2, 3, 4]))
    kinds = draw.choice([(0, 0), (0, 1), (1, 0), (1, 1)])
    for grid in along_the_tree(layouts(shape, kinds, sizes)):
        for _ in range(20):
            starts = [draw.randint(0, size - 1) for size in shape]
            box = Box(tuple(starts), tuple(draw.randint(1, size - at) for at, size in zip(starts, shape)))
            expected = [part for part in grid.parts() if part.box.common(box).num_elements]
            assert sorted(grid.meeting(box)) == sorted(expected)


def one(offsets, sizes, rank=0, *axes):
    return Grid(offsets=offsets, sizes=sizes, rank=rank, axes=axes)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (one((0,), (4,)), one((4,), (3,), 1)),  # another size
        (one((4,), (4,)), one((0,), (4,), 1)),  # backwards
        (one((0, 0), (4, 4)), one((4, 4), (4, 4), 1)),  # along two dims
        (one((0,), (4,), 1), one((4,), (4,), 0)),  # of lower ranks
        (one((0,), (4,), 0, Axis(count=2, dim=0, step=4, ranks=1)), one((8,), (4,), 3)),  # a rank left out
    ],
)
def test_what_does_not_go_on_is_not_joined(first, second):
    assert join(first, second) is None


def test_parts_that_meet_are_found():
    rows = one((0, 0), (4, 8), 0, Axis(count=4, dim=0, step=4, ranks=1))
    assert overlap([rows]) is None and overlap([rows, one((16, 0), (2, 8), 4)]) is None
    assert overlap([rows, one((14, 2), (4, 1), 4)]) == Box((14, 2), (4, 1))
    assert overlap([one((0, 0), (4, 8), 0, Axis(count=4, dim=0, step=3, ranks=1))]) is not None
    later = one((18, 0), (2, 8), 9, Axis(count=2, dim=0, step=4, ranks=1))
    assert overlap([later, one((22, 3), (2, 1), 3)]) == Box((22, 3), (2, 1)), "its second part"
    assert overlap([one((18, 0), (1, 1)), later, rows]) == Box((18, 0), (1, 1))
    apart = one((0, 0), (2, 8), 0, Axis(count=2, dim=0, step=10, ranks=1))
    assert overlap([apart, one((8, 0), (4, 8), 2, Axis(count=4, dim=0, step=4, ranks=1))]) == Box((10, 0), (2, 8))
    many = [one((0, 2 * column), (16, 2), column) for column in range(2000)]
    assert overlap(many) is None and overlap([*many, one((3, 401), (1, 1), 2000)]) == Box((0, 400), (16, 2))
    columns = one((0, 0), (16, 2), 0, Axis(count=4, dim=1, step=2, ranks=1))
    assert overlap([rows, columns]) is not None
    woven = one((0,), (2,), 0, Axis(count=4, dim=0, step=8, ranks=1), Axis(count=4, dim=0, step=2, ranks=4))
    assert overlap([woven]) is None and sorted(part.box.offsets[0] for part in woven.parts()) == list(range(0, 32, 2))


def test_a_changed_copy_is_validated_and_the_first_stays():
    axis = Axis(count=2, dim=0, step=3, ranks=1)
    assert axis.changed(count=4) == Axis(count=4, dim=0, step=3, ranks=1) and axis.count == 2
    with pytest.raises(ValidationError, match="count"):
        axis.changed(count=1)
