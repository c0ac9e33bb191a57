"""Host copies of a rank's shards: made ahead, and through pinned buffers where the tensors are on a device."""

from pathlib import Path

import pytest
import torch

from tests.checkpoint import cases
from windlass.checkpoint import staging
from windlass.checkpoint.staging import BounceBuffers, Staging
from windlass.ranks.owned_part import local_part


def tensors():
    return {
        "matrix": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "scalar": torch.tensor(7.0),
        "none": torch.empty(0),
        "large": torch.arange(3 * staging.PAGE_BYTES // 8),
    }


def test_a_copy_uses_the_memory_that_was_made_ahead():
    given, buffers = tensors(), Staging()
    buffers.make(given)
    made = {name: buffer.data_ptr() for name, buffer in buffers._buffers.items()}
    copies = buffers.copy(given)
    assert list(copies) == list(given) == list(made)
    for name, tensor in given.items():
        assert copies[name].data_ptr() == made[name] and torch.equal(copies[name], tensor), name


def test_every_page_is_touched():
    pages = torch.full((3 * staging.PAGE_BYTES,), 9, dtype=torch.uint8)
    staging.touch(pages)
    assert (pages == 0).nonzero().flatten().tolist() == [0, staging.PAGE_BYTES, 2 * staging.PAGE_BYTES]


def test_the_memory_of_what_is_not_copied_again_is_given_back():
    given, buffers = tensors(), Staging()
    buffers.copy(given)
    buffers.copy({"scalar": given["scalar"]})
    assert list(buffers._buffers) == ["scalar"]


def test_what_could_not_be_made_is_said_by_the_save(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(staging, "touch", refuse)
    checkpoints = cases.make_run(tmp_path, **{"async": True})
    checkpoints.make_ready(tensors())
    with pytest.raises(RuntimeError, match="no memory"):
        checkpoints.save(1, tensors(), {}, {})
    assert checkpoints.save(1, tensors(), {}, {}, final=True)


@pytest.mark.parametrize("piece_bytes", [8, 24, 64, 1 << 20])
def test_bytes_pass_through_two_buffers_one_after_the_other(piece_bytes):
    given = tensors() | {"rows apart": torch.arange(20.0).reshape(4, 5).T}
    targets = {name: torch.full(tensor.shape, 3, dtype=tensor.dtype) for name, tensor in given.items()}
    said = []

    def fence(source):
        number = len([one for one in said if one[0] == "begun"])
        said.append(("begun", number))
        return lambda: said.append(("ended", number))

    BounceBuffers(piece_bytes, pinned=False, fence=fence).copy(
        (targets[name], tensor) for name, tensor in given.items()
    )
    for name, tensor in given.items():
        assert torch.equal(targets[name], tensor), name
    pieces = len(said) // 2
    expected = [("begun", 0)]
    for number in range(1, pieces):
        expected += [("begun", number), ("ended", number - 1)]
    assert said == [*expected, ("ended", pieces - 1)]
    assert pieces >= sum(-(-tensor.numel() * tensor.element_size() // piece_bytes) for tensor in given.values())


def made_ahead(path, is_async, is_ahead):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0)
    given = {
        "cut": distribute_tensor(whole, mesh, [Shard(0)]),
        "alike": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": whole.clone(),
    }
    checkpoints = cases.make_checkpoints(Path(path), asynchronous=is_async)
    if is_ahead:
        checkpoints.make_ready(given)
        checkpoints._made.result()
    held = [{name: tuple(buffer.shape) for name, buffer in checkpoints._staging._buffers.items()}]
    for step in (1, 2):
        checkpoints.save(step, given, {}, {})
        for tensor in given.values():
            tensor.add_(1)  # what training does next must not reach the checkpoint
    checkpoints.wait()
    held.append({name: tuple(buffer.shape) for name, buffer in checkpoints._staging._buffers.items()})
    for tensor in given.values():
        tensor.zero_()
    assert checkpoints.restore(given) is not None
    return held, checkpoints._plan.times_made, [local_part(tensor).tolist() for tensor in given.values()]


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_of_what_ranks_hold_alike_each_copies_and_holds_its_part(ranks, tmp_path, is_async, is_ahead):
    (one, first, mine), (two, second, others) = ranks.run(
        2, made_ahead, str(tmp_path / "checkpoints"), is_async, is_ahead
    )
    assert (first, second) == (1, 1), "planned once"
    assert mine == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    assert others == [[4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]]
    parts = [one[1], two[1]]
    if not is_async:
        assert (one, two) == ([{}, {}], [{}, {}])
        return
    assert [one[0], two[0]] == (parts if is_ahead else [{}, {}])
    assert [part["cut"] for part in parts] == [(3,), (3,)]
    assert sorted(name for part in parts for name in part) == ["alike", "cut", "cut", "plain"]
    assert [len(part) for part in parts] == [2, 2]
