"""Host copies of a rank's shards: made ahead, and through pinned buffers where the tensors are on a device."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.checkpoint import cases
from windlass.checkpoint import staging
from windlass.checkpoint.staging import Bounce, Staging


def tensors():
    return {
        "matrix": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "scalar": torch.tensor(7.0),
        "none": torch.empty(0),
        "large": torch.arange(3 * staging.PAGE_BYTES // 8),
    }


def test_a_copy_uses_the_memory_that_was_made_ahead():
    given, buffers = tensors(), Staging()
    with ThreadPoolExecutor(1) as thread:
        buffers.make_ready(given, thread)
        thread.submit(lambda: None).result()
        made = {name: buffer.data_ptr() for name, buffer in buffers._buffers.items()}
        copies = buffers.copy(given)
    assert list(copies) == list(given) == list(made)
    for name, tensor in given.items():
        assert copies[name].data_ptr() == made[name] and torch.equal(copies[name], tensor), name


def test_every_page_is_touched():
    pages = torch.full((3 * staging.PAGE_BYTES,), 9, dtype=torch.uint8)
    staging.touch(pages)
    assert (pages == 0).nonzero().flatten().tolist() == [0, staging.PAGE_BYTES, 2 * staging.PAGE_BYTES]


def test_what_could_not_be_made_is_said_by_the_save():
    class Refusing(torch.Tensor):
        @property
        def shape(self):
            raise RuntimeError("no memory")

    buffers = Staging()
    with ThreadPoolExecutor(1) as thread:
        buffers.make_ready({"one": torch.ones(1).as_subclass(Refusing)}, thread)
        with pytest.raises(RuntimeError, match="no memory"):
            buffers.copy({})


@pytest.mark.parametrize("piece_bytes", [8, 24, 64, 1 << 20])
def test_bytes_pass_through_two_buffers_one_after_the_other(piece_bytes):
    given = tensors() | {"rows apart": torch.arange(20.0).reshape(4, 5).T}
    targets = {name: torch.full(tensor.shape, 3, dtype=tensor.dtype) for name, tensor in given.items()}
    said = []

    def fence(source):
        number = len([one for one in said if one[0] == "begun"])
        said.append(("begun", number))
        return lambda: said.append(("ended", number))

    Bounce(piece_bytes, pinned=False, fence=fence).copy((targets[name], tensor) for name, tensor in given.items())
    for name, tensor in given.items():
        assert torch.equal(targets[name], tensor), name
    pieces = len(said) // 2
    expected = [("begun", 0)]
    for number in range(1, pieces):
        expected += [("begun", number), ("ended", number - 1)]
    assert said == [*expected, ("ended", pieces - 1)]
    assert pieces >= sum(-(-tensor.numel() * tensor.element_size() // piece_bytes) for tensor in given.values())


def made_ahead(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0)
    given = {"cut": distribute_tensor(whole, mesh, [Shard(0)]), "alike": distribute_tensor(whole, mesh, [Replicate()])}
    checkpoints = cases.make_checkpoints(Path(path), asynchronous=True)
    checkpoints.make_ready(given | {"plain": whole})
    checkpoints._staging._made.result()
    return {name: tuple(buffer.shape) for name, buffer in checkpoints._staging._buffers.items()}


def test_what_ranks_hold_alike_takes_no_memory_before_it_is_saved(ranks, tmp_path):
    assert ranks.run(2, made_ahead, str(tmp_path)) == [{"cut": (3,)}] * 2
