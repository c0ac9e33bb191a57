"""Boxes of tensors out of files that hold it any way: the same numbers, in order, in blocks of a bounded size, verified."""

import itertools
import math
import random

import numpy
import pytest

from tests.checkpoint.cases import make_run, make_tensors, save_steps
from windlass.checkpoint.grid import Box, Grid, RankPart
from windlass.checkpoint.hashed_file import PieceReader, PieceWriter
from windlass.checkpoint.index import SavedTensor, pack_boxes, read_tensor_index
from windlass.checkpoint.keep import largest_difference
from windlass.checkpoint.manifest import rank_header, rank_name
from windlass.checkpoint.stream import TensorSource, cut_box
from windlass.checkpoint.verify import Checkpoint
from windlass.errors import BadCheckpoint

SHAPES = [(), (7,), (5, 6), (3, 4, 5), (2, 1, 3, 4), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, 3, 11, 1000])
def test_parts_are_contiguous_bounded_and_in_order(shape, most):
    whole = Box((0,) * len(shape), shape)
    numbers = numpy.arange(math.prod(shape)).reshape(shape)
    parts = list(cut_box(whole, most))
    found = [numbers[part.within(whole)].reshape(-1) for part in parts]
    assert all(0 < part.num_elements <= most for part in parts)
    assert numpy.array_equal(numpy.concatenate([numpy.empty(0, int), *found]), numbers.reshape(-1))


def tiles(shape, draw):
    """A random grid over `shape`, its boxes in random order."""
    if 0 in shape:
        return []
    borders = [sorted({0, size, *(draw.randint(0, size) for _ in range(2))}) for size in shape]
    spans = [list(itertools.pairwise(border)) for border in borders]
    boxes = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in itertools.product(*spans)]
    draw.shuffle(boxes)
    return boxes


class Files:
    """Stands for a committed checkpoint: each box in the file of a rank of its own."""

    def __init__(self, directory, numbers, boxes):
        self.directory, self.manifest = directory, self
        self.files = {rank_name(rank): self._write(rank, numbers, box) for rank, box in enumerate(boxes)}
        grids = tuple(Grid.of(RankPart(rank, box)) for rank, box in enumerate(boxes))
        self.tensors = {"x": SavedTensor(dtype="int32", shape=numbers.shape, grids=grids)}

    def _write(self, rank, numbers, box):
        whole = Box((0,) * numbers.ndim, numbers.shape)
        data = numpy.ascontiguousarray(numbers[box.within(whole)]).tobytes()
        index = pack_boxes({"x": box})
        with PieceWriter(self.directory / rank_name(rank)) as writer:
            for each in (rank_header("0" * 16, len(index)), index, data):
                writer.write(memoryview(each))
            return writer.close()

    def reader(self, name):
        return PieceReader(self.directory / name, self.files[name])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_any_box_out_of_any_parts_in_blocks_of_any_size(tmp_path, shape, seed):
    draw = random.Random(seed)
    numbers = numpy.arange(math.prod(shape), dtype=numpy.int32).reshape(shape)
    boxes = [box for box in tiles(shape, draw) if box.num_elements]
    files = Files(tmp_path, numbers, boxes)
    whole = Box((0,) * len(shape), shape)
    with TensorSource(files, files.tensors) as source:
        for box in [whole, *tiles(shape, draw)]:
            for most in (4, 20, 4096):
                found = numpy.full(box.sizes, -1, numpy.int32)
                for part, block in source.blocks("x", box, most):
                    assert block.nbytes <= most
                    found[part.within(box)] = block.view(numpy.int32)[..., 0]
                assert numpy.array_equal(found, numbers[box.within(whole)])


def test_few_files_are_open_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("windlass.checkpoint.stream.OPEN_FILES", 2)
    numbers = numpy.arange(40, dtype=numpy.int32).reshape(10, 4)
    files, opened = Files(tmp_path, numbers, [Box((row, 0), (1, 4)) for row in range(10)]), []
    reader = files.reader

    def spy(name):
        opened.append(reader(name))
        return opened[-1]

    monkeypatch.setattr(files, "reader", spy)
    with TensorSource(files, files.tensors) as source:
        for _ in range(2):
            ((_, block),) = source.blocks("x", Box((0, 0), (10, 4)))
            assert numpy.array_equal(block.view(numpy.int32)[..., 0], numbers) and len(source._open) == 2
    assert len(opened) == 20, "opened again, with what its index says kept"


def test_a_flipped_bit_is_named_and_not_handed_out(tmp_path):
    save_steps(tmp_path, 10)
    directory = tmp_path / "checkpoints/step-00000010"
    path = directory / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    checkpoint = Checkpoint.open(directory)
    tensors = read_tensor_index(checkpoint)
    with TensorSource(checkpoint, tensors) as source:
        last = max(
            tensors, key=lambda name: max((source.offset(name, part) for part in tensors[name].parts()), default=0)
        )
        with pytest.raises(BadCheckpoint, match=r"rank-00000\.bin: hash differs in bytes"):
            list(source.blocks(last, tensors[last].whole))


def test_the_largest_difference_is_that_of_the_values(tmp_path):
    for step, change in ((10, 0.0), (20, 0.25), (30, math.nan)):
        tensors = make_tensors(10)
        tensors["model.big"][1099, 999] -= change
        tensors["optimizer.mask"][3] ^= step == 20
        make_run(tmp_path).save(step, tensors, {}, {})
    ten, twenty, thirty = (tmp_path / f"checkpoints/step-{step:08d}" for step in (10, 20, 30))
    assert largest_difference(ten, twenty, "model.big") == pytest.approx(0.25, rel=1e-6)
    assert largest_difference(ten, twenty, "optimizer.mask") == 1 and largest_difference(ten, twenty, "model.bias") == 0
    assert math.isnan(largest_difference(ten, thirty, "model.big"))
