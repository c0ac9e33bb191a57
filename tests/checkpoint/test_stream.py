"""Boxes of tensors out of chunks that lie any way: the same numbers, in order, in blocks of a bounded size, verified."""

import itertools
import math
import random

import numpy
import pytest

from tests.checkpoint.single import make_run, make_tensors, save_steps
from windlass.checkpoint.hashed_file import PieceWriter
from windlass.checkpoint.index import Chunk, SavedTensor, read_index
from windlass.checkpoint.keep import largest_difference
from windlass.checkpoint.stream import Box, TensorSource, cut, whole_box
from windlass.checkpoint.verify import Checkpoint
from windlass.errors import BadCheckpoint

SHAPES = [(), (7,), (5, 6), (3, 4, 5), (2, 1, 3, 4), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, 3, 11, 1000])
def test_parts_are_contiguous_bounded_and_in_order(shape, most):
    whole = Box((0,) * len(shape), shape)
    numbers = numpy.arange(math.prod(shape)).reshape(shape)
    parts = list(cut(whole, most))
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
    """Stands for a committed checkpoint of one file."""

    def __init__(self, directory, entry):
        self.directory, self.entry = directory, entry

    def reader(self, name):
        from windlass.checkpoint.hashed_file import PieceReader

        return PieceReader(self.directory / name, self.entry)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_any_box_out_of_any_chunks_in_blocks_of_any_size(tmp_path, shape, seed):
    draw = random.Random(seed)
    numbers = numpy.arange(math.prod(shape), dtype=numpy.int32).reshape(shape)
    chunks = []
    with PieceWriter(tmp_path / "rank-00000.bin") as writer:
        writer.write(memoryview(bytes(64)))
        for box in tiles(shape, draw):
            data = numpy.ascontiguousarray(numbers[box.within(Box((0,) * len(shape), shape))])
            at = writer.write(memoryview(data.tobytes()))
            chunks.append(Chunk(offsets=list(box.offsets), sizes=list(box.sizes), file="rank-00000.bin", at=at))
        entry = writer.close()
    tensor = SavedTensor(dtype="int32", shape=list(shape), chunks=chunks)
    with TensorSource(Files(tmp_path, entry)) as source:
        for box in [whole_box(tensor), *tiles(shape, draw)]:
            for most in (4, 20, 4096):
                found = numpy.full(box.sizes, -1, numpy.int32)
                for part, block in source.blocks(tensor, box, most):
                    assert block.nbytes <= most
                    found[part.within(box)] = block.view(numpy.int32)[..., 0]
                assert numpy.array_equal(found, numbers[box.within(whole_box(tensor))])


def test_a_flipped_bit_is_named_and_not_handed_out(tmp_path):
    save_steps(tmp_path, 10)
    directory = tmp_path / "checkpoints/step-00000010"
    path = directory / "rank-00000.bin"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    checkpoint = Checkpoint.open(directory)
    tensors = read_index(checkpoint)
    last = max(tensors, key=lambda name: max((chunk.at for chunk in tensors[name].chunks), default=0))
    with (
        TensorSource(checkpoint) as source,
        pytest.raises(BadCheckpoint, match=r"rank-00000\.bin: hash differs in bytes"),
    ):
        list(source.blocks(tensors[last], whole_box(tensors[last])))


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
