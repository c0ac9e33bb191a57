import copy
import json

import pytest

from tests.checkpoint import cases
from tests.checkpoint.cases import save_steps
from windlass.checkpoint.grid import Box, Grid, RankPart
from windlass.checkpoint.hashed_file import PieceWriter
from windlass.checkpoint.index import SavedTensor, pack_boxes, parse_boxes, parse_tensor_index, read_tensor_index
from windlass.checkpoint.manifest import HEADER_BYTES, INDEX, index_bytes_of, rank_header
from windlass.checkpoint.sealed_json import seal, unseal
from windlass.checkpoint.stream import TensorSource
from windlass.checkpoint.verify import Checkpoint
from windlass.errors import BadCheckpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    save_steps(run, 100)
    return Checkpoint.open(run / "checkpoints/step-00000100")


def test_the_index_says_where_the_bytes_of_each_tensor_are(checkpoint):
    tensors = read_tensor_index(checkpoint)
    assert {name: (one.dtype, one.shape) for name, one in tensors.items()} == {
        "model.big": ("float32", (1100, 1000)),
        "model.bias": ("bfloat16", (7,)),
        "model.empty": ("float32", (0, 3)),
        "optimizer.step": ("float32", ()),
        "optimizer.mask": ("bool", (13,)),
    }
    with TensorSource(checkpoint, tensors) as source:
        parts = [(name, part) for name, one in tensors.items() for part in one.parts()]
        spans = sorted((source.offset(name, part), tensors[name].num_bytes_of(part.box)) for name, part in parts)
    header = (checkpoint.directory / "rank-00000.bin").read_bytes()[:HEADER_BYTES]
    end = HEADER_BYTES + index_bytes_of(header)
    for at, length in spans:
        assert at == end
        end += length
    assert end == checkpoint.manifest.files["rank-00000.bin"].size  # the parts tile the file behind its index


def test_the_index_is_as_long_for_eight_ranks_as_for_two(tmp_path, ranks):
    """Sizes that 2 and 8 divide: a grid per tensor, and one for what every rank holds."""
    lengths = {}
    for world in (2, 8):
        ranks.run(world, cases.save_values, tmp_path / str(world), [1])
        found = Checkpoint.open(tmp_path / str(world) / "step-00000001")
        tensors = read_tensor_index(found)
        assert {name: len(one.grids) for name, one in tensors.items()} == dict.fromkeys(tensors, 1)
        assert sum(1 for _ in tensors["shard0"].parts()) == world == found.manifest.world
        lengths[world] = len(found.read(INDEX))
    assert abs(lengths[2] - lengths[8]) < 20


def grid_of(body, name="model.bias"):
    return body["tensors"][name]["grids"][0]


def axis(**changes):
    return {"count": 2, "dim": 0, "step": 7, "ranks": 1, **changes}


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda b: b.update(schema_version=9), "schema_version is 9"),
        (lambda b: b.update(token="0" * 16), "stale: it belongs to the save 0000"),
        (lambda b: b.update(more=1), "more: Extra inputs"),
        (lambda b: b.pop("tensors"), "tensors: Field required"),
        (lambda b: b["tensors"]["model.bias"].update(dtype="object"), "dtype: String should match"),
        (lambda b: b["tensors"]["model.bias"].update(dtype="float32\n"), "dtype: String should match"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[-7]), "shape.0: Input should be greater"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[1 << 60]), "shape.0: Input should be less"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[7.0]), "shape.0: Input should be a valid integer"),
        (lambda b: b["tensors"]["model.bias"].update(shape=["7"]), "shape.0: Input should be a valid integer"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[8]), "do not make up its shape"),
        (lambda b: b["tensors"]["model.bias"].update(shape=[7] * 17), "shape: Tuple should have at most 16"),
        (lambda b: b["tensors"]["model.bias"].update(grids=[]), "do not make up its shape"),
        (lambda b: b["tensors"]["model.bias"]["grids"].append(dict(grid_of(b))), "do not make up its shape"),
        (lambda b: grid_of(b).update(rank=-1), "rank: Input should be greater"),
        (lambda b: grid_of(b).update(rank=1), "is in the file of rank 1"),
        (lambda b: grid_of(b).update(offsets=[1]), "is not in"),
        (lambda b: grid_of(b).update(offsets=[0, 0]), "is not in"),
        (lambda b: grid_of(b).update(axes=[axis()]), "is not in"),
        (lambda b: grid_of(b).update(axes=[axis(dim=1)]), "is not in"),
        (lambda b: grid_of(b).update(axes=[axis(step=0)]), "an axis of step 0"),
        (lambda b: grid_of(b).update(axes=[axis(count=1)]), "count: Input should be greater"),
        (lambda b: grid_of(b).update(axes=[axis(ranks=0)]), "ranks: Input should be greater"),
        (lambda b: grid_of(b).update(axes=[axis(count=10**4299)]), "count: Input should be"),
        (lambda b: grid_of(b).update(axes=[axis(ranks=10**4299)]), "ranks: Input should be"),
        (lambda b: grid_of(b).update(axes=[axis(step=10**4299)]), "step: Input should be"),
        (lambda b: grid_of(b).update(rank=10**7), "rank: Input should be less"),
        (lambda b: grid_of(b).update(axes=[axis()] * 17), "axes: Tuple should have at most 16"),
    ],
)
def test_a_hostile_index_is_refused_though_its_hash_fits(checkpoint, change, why):
    body = copy.deepcopy(unseal(checkpoint.read(INDEX), INDEX))
    change(body)
    with pytest.raises(BadCheckpoint, match=f"index.json: .*{why}"):
        parse_tensor_index(seal(body), checkpoint.manifest)


def test_parts_that_share_elements_are_refused_though_their_sizes_add_up(checkpoint):
    body = copy.deepcopy(unseal(checkpoint.read(INDEX), INDEX))
    half = {"offsets": [0, 0], "sizes": [550, 1000], "rank": 0, "axes": []}
    body["tensors"]["model.big"]["grids"] = [half, {**half, "offsets": [549, 0]}]
    with pytest.raises(BadCheckpoint, match=r"'model.big': \[0, 0\] \+ \[550, 1000\] is in two parts|in two parts"):
        parse_tensor_index(seal(body), checkpoint.manifest)


ROWS = tuple(Grid.of(RankPart(rank, Box((2 * rank, 0), (2, 2)))) for rank in range(2))
TENSORS = {
    "a": SavedTensor(dtype="float32", shape=(4, 2), grids=ROWS),
    "b": SavedTensor(dtype="bool", shape=(), grids=(Grid.of(RankPart(1, Box((), ()))),)),
}


def test_a_files_index_is_read_back():
    index = pack_boxes({"b": Box((), ()), "a": Box((2, 0), (2, 2))})
    assert parse_boxes(index, 1, "rank-00001.bin", 17, TENSORS) == {"b": 0, "a": 1}, "in the order of the file"


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ({"c": [[2, 0], [2, 2]]}, "'c' at .2, 0. is of another rank"),
        ({"a": [[0, 0], [2, 2]]}, "'a' at .0, 0. is of another rank"),
        ({"a": [[2, 0], [1, 2]]}, "'a' at .2, 0. is of another rank"),
        ({"a": [[2], [2, 2]]}, "'a' at .2. is of another rank"),
        ({"a": [[2, 0], [2]]}, "'a' at .2, 0. is of another rank"),
        ({"a": [[2, 0]]}, "a: 1: Field required"),
        ({"a": [[2, 0], [2, 2], [0]]}, "a: : Tuple should have at most 2"),
        ({"a": [[2, -1], [2, 2]]}, "a: 0.1: Input should be greater"),
        ({"a": [[2, 0], [2, 10**4299]]}, "a: 1.1: Input should be"),
        ({"a": [[2, 0], [2, 2.0]]}, "a: 1.1: Input should be a valid integer"),
        ({"a": {}}, "a: : Input should be a valid tuple"),
        ({"a": [[2, 0], [2, 2]]}, "its boxes have 16 bytes"),
        ({}, "its boxes have 0 bytes"),
    ],
)
def test_a_hostile_index_of_a_file_is_refused(boxes, why):
    with pytest.raises(BadCheckpoint, match=f"rank-00001.bin: .*{why}"):
        parse_boxes(json.dumps(boxes).encode(), 1, "rank-00001.bin", 17, TENSORS)


def test_grids_of_too_many_parts_are_refused_and_soon(checkpoint):
    """Two grids of 2^22 parts each whose parts alternate: not compared one by one."""
    body, count = copy.deepcopy(unseal(checkpoint.read(INDEX), INDEX)), 1 << 22
    one = {"offsets": [0], "sizes": [1], "rank": 0, "axes": [axis(count=count, step=2)]}
    body["tensors"]["model.bias"].update(shape=[2 * count], grids=[one, {**one, "offsets": [1]}])
    manifest = checkpoint.manifest.model_copy(update={"world": 10**7})
    with pytest.raises(BadCheckpoint, match=r"'model\.bias': 2 grids meet in more than 131072 parts"):
        parse_tensor_index(seal(body), manifest)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"windlass".ljust(64), "begins with no header"),
        (rank_header("0" * 16, 1 << 30), "begins with no header"),
        (rank_header("0" * 16, 0), "begins with no header"),
        (rank_header("0" * 16, 2), "its boxes have 0 bytes"),
        (rank_header("0" * 16, 4), "cannot be read"),
    ],
)
def test_a_file_that_does_not_say_what_it_holds_is_refused(checkpoint, tmp_path, header, why):
    with PieceWriter(tmp_path / "rank-00000.bin") as writer:
        writer.write(memoryview(header + b"{}" + bytes(100)))
        entry = writer.close()
    manifest = checkpoint.manifest.model_copy(update={"files": {"rank-00000.bin": entry}})
    other, tensors = Checkpoint(tmp_path, manifest, b""), read_tensor_index(checkpoint)
    with pytest.raises(BadCheckpoint, match=f"rank-00000.bin.* {why}"), TensorSource(other, tensors) as source:
        source.read("model.bias", RankPart(0, Box((0,), (7,))), Box((0,), (7,)))
