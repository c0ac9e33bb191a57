import math
import pickle

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.checkpoint import cases
from tests.checkpoint.cases import blank, is_state_of, make_run, make_tensors, save_steps
from tests.checkpoint.test_grid import layouts
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.grid import Box, Grid, RankPart
from windlass.checkpoint.hashed_file import PieceReader
from windlass.checkpoint.index import read_tensor_index
from windlass.checkpoint.restore import read_tensors
from windlass.checkpoint.save import HeldTensor, Plan, TensorWriter, choose_writers, join_held, plan_save, write_planned
from windlass.checkpoint.staging import DTYPES, raw_bytes
from windlass.checkpoint.verify import Checkpoint
from windlass.ranks.owned_part import local_part
from windlass.ranks.tree import children_of


def read(run, tensors):
    checkpoint = Checkpoint.open(run / "checkpoints/step-00000100")
    return read_tensors(checkpoint, tensors, read_tensor_index(checkpoint))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(3, 5)
    tensor = tensor[:, ::2] if dtype != torch.bool else tensor  # not contiguous; NaNs with any payload
    writer, exchange, plan = (
        TensorWriter(tmp_path / "checkpoints", 100, "run", lambda token: {}),
        Exchange(0, 1, None),
        Plan(),
    )
    plan_save({"x": tensor}, exchange, plan)
    write_planned({"x": tensor}, writer, exchange, plan)
    loaded = torch.zeros_like(tensor)
    assert read(tmp_path, {"x": loaded}) == tensor.numel() * dtype.itemsize
    assert raw_bytes(loaded) == raw_bytes(tensor)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a", "b"}, "scheduler is not a tensor; put it into the trainer state"),
        (torch.zeros(2, dtype=torch.complex64), "scheduler is torch.complex64, which no checkpoint holds"),
    ],
)
def test_what_is_no_tensor_or_of_another_dtype_is_refused_by_name(tmp_path, value, words):
    checkpoints = make_run(tmp_path)
    with pytest.raises(TypeError, match=words):
        checkpoints.save(1, {"scheduler": value}, {}, {})
    assert not (tmp_path / "checkpoints").exists()


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("pickle")

    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    save_steps(tmp_path, 100)
    state = blank()
    assert make_run(tmp_path).restore(state) is not None and is_state_of(state, 100)
    for path in (tmp_path / "checkpoints/step-00000100").rglob("*.json"):
        assert path.read_bytes()[:1] == b"{"


def test_a_rank_reads_its_own_share_and_no_file_twice(tmp_path, ranks):
    """2 ranks save 12 MiB in rows; bytes read per rank, in the layout that saved and in others."""
    ranks.run(2, cases.save_big, tmp_path / "checkpoints")
    mib = 1 << 20
    for world, share in ((1, 12 * mib), (2, 6 * mib), (4, 3 * mib)):
        found = ranks.run(world, cases.bytes_read, tmp_path / "checkpoints")
        assert all(asked == share and share <= read <= share + 2 * 4 * mib for asked, read in found)


def test_columns_of_rows_are_read(tmp_path, ranks):
    ranks.run(2, cases.save_big, tmp_path / "checkpoints")
    assert all(ranks.run(3, cases.load_columns, tmp_path / "checkpoints"))


def test_tensors_of_one_step_only(tmp_path):
    """Weights alone: a part of the checkpoint is read, the rest is not."""
    save_steps(tmp_path, 100)
    only = {"model.bias": torch.zeros(7, dtype=torch.bfloat16)}
    assert read(tmp_path, only) == 14
    assert torch.equal(only["model.bias"], make_tensors(100)["model.bias"])


def test_a_part_is_read_in_blocks_and_a_file_from_its_beginning_to_its_end(tmp_path, ranks, monkeypatch):
    """Rows and columns in blocks that are no whole rows of 4 KiB."""
    ranks.run(2, cases.save_big, tmp_path / "checkpoints")
    assert all(ranks.run(3, cases.load_columns, tmp_path / "checkpoints", 10_000))
    read_piece, read_at = PieceReader.read, []

    def spy(self, at, length):
        read_at.append((self._path.name, at))
        return read_piece(self, at, length)

    monkeypatch.setattr(PieceReader, "read", spy)
    save_steps(tmp_path / "one", 100)
    state = dict(reversed(blank().items()))
    assert make_run(tmp_path / "one").restore(state) is not None and is_state_of(state, 100)
    of_tensors = [at for name, at in read_at if name == "rank-00000.bin"]
    assert len(of_tensors) > 5 and of_tensors == sorted(of_tensors)


def held(shape, kinds, sizes, rank=0):
    """What a rank's subtree gives of one tensor."""
    boxes = layouts(shape, kinds, sizes)
    box = boxes[rank]
    mine = {"x": HeldTensor("float32", shape, [Grid.of(RankPart(rank, box))] if box.num_elements else [])}
    for child in children_of(rank, len(boxes)):
        mine = join_held(mine, held(shape, kinds, sizes, child))
    return mine


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ((None,), (6,)),  # DDP
        ((0,), (8,)),  # ZeRO
        ((None, 0), (4, 8)),  # HSDP
        ((0, None), (4, 2)),  # what tensor ranks hold whole
        ((0, None), (4, 3)),  # the same on three, whose replicas are no axis
        ((None, 0, 1), (2, 4, 3)),
        ((None, 0, 0), (3, 5, 2)),
    ],
)
def test_each_part_has_one_writer_that_holds_it(kinds, sizes):
    boxes = layouts((40, 12), kinds, sizes)
    tensor = choose_writers(held((40, 12), kinds, sizes), len(boxes))["x"]
    found = {part.box: part.rank for part in tensor.parts()}
    assert sum(1 for _ in tensor.parts()) == len(found) and set(found) == set(boxes)
    assert all(boxes[rank] == box for box, rank in found.items())


def test_ranks_that_hold_the_same_write_equal_shares():
    """Of 100 tensors of two sizes on 8 replicas each writes an eighth of the bytes, to within one small tensor; beside what only
    the first four hold."""
    everywhere = held((40, 12), (None,), (8,))["x"]
    small, large = everywhere, everywhere._replace(shape=(400, 12), grids=[
        everywhere.grids[0].model_copy(update={"sizes": (400, 12)})
    ])  # fmt: skip
    four = HeldTensor("float32", (400, 12), held((400, 12), (0,), (4,))["x"].grids)
    tensors = {f"t{number}": large if number % 10 == 0 else small for number in range(100)} | {"four": four}
    written = np.zeros(8)
    for tensor in choose_writers(tensors, 8).values():
        for part in tensor.parts():
            written[part.rank] += part.box.num_elements
    assert written.sum() == 10 * 400 * 12 + 90 * 40 * 12 + 400 * 12
    assert written.max() - written.min() <= 40 * 12


@pytest.mark.parametrize(
    ("kinds", "sizes"), [((0, None), (4, 3)), ((0, None), (4, 6)), ((0, None), (8, 2)), ((None, 0), (3, 4))]
)
def test_replicas_of_parts_write_equal_shares_too(kinds, sizes):
    """60 equal tensors; with three tensor ranks their replicas are no axis of a grid."""
    one = held((48, 12), kinds, sizes)["x"]
    written = np.zeros(math.prod(sizes))
    for tensor in choose_writers({f"t{number}": one for number in range(60)}, len(written)).values():
        for part in tensor.parts():
            written[part.rank] += 1
    assert written.sum() == 60 * sizes[kinds.index(0)] and written.max() - written.min() <= 1


def outside_of_a_mesh(directory):
    tensor = distribute_tensor(torch.arange(8.0).view(4, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    checkpoints = cases.make_checkpoints(directory)
    checkpoints.save(1, {"x": tensor, "y": torch.ones(3)}, {}, {})
    with torch.no_grad():
        tensor.mul_(0)
    assert checkpoints.restore({"x": tensor, "y": torch.zeros(3)}) is not None
    return local_part(tensor).tolist()


def test_ranks_outside_of_a_tensors_mesh_write_nothing_of_it(ranks, tmp_path):
    found = ranks.run(3, outside_of_a_mesh, tmp_path / "checkpoints")
    assert found[:2] == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]


def cut_twice(directory, rows):
    """FSDP2's placement: rows by two tensor ranks, then by three others, where neither divides them."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(2.0 * rows).view(rows, 2)
    by_tensor_ranks = distribute_tensor(whole, mesh["tp"], [Shard(0)]).to_local()
    parts = torch.chunk(by_tensor_ranks, 3)
    own = parts[mesh.get_local_rank("dp")] if mesh.get_local_rank("dp") < len(parts) else whole[:0]
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    tensor = DTensor.from_local(
        own.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    checkpoints = cases.make_checkpoints(directory)
    checkpoints.save(1, {"x": tensor}, {}, {})
    back = torch.zeros_like(whole)
    assert checkpoints.restore({"x": back}) is not None
    return torch.equal(back, whole)


@pytest.mark.parametrize("rows", [7, 10, 13])
def test_rows_that_tensor_ranks_do_not_divide_come_back(ranks, tmp_path, rows):
    assert all(ranks.run(6, cut_twice, tmp_path / "checkpoints", rows))


def test_what_ranks_do_not_agree_on_is_named():
    one = {"x": HeldTensor("float32", (4,), [Grid.of(RankPart(0, Box((0,), (2,))))])}
    with pytest.raises(ValueError, match=r"x is float32 \(4,\) on one rank and bfloat16 \(4,\) on another"):
        join_held(one, {"x": one["x"]._replace(dtype="bfloat16")})
    hole = [*one["x"].grids, Grid.of(RankPart(1, Box((1,), (2,))))]  # two and two, and the last row is nobody's
    for grids in (one["x"].grids, hole):
        with pytest.raises(ValueError, match=r"the parts of x that ranks hold do not make up its shape \(4,\)"):
            choose_writers({"x": one["x"]._replace(grids=grids)}, 2)
