import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint import cases
from tests.checkpoint.single import blank, is_state_of, make_tensors, save_steps
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.save import write_checkpoint
from windlass.checkpoint.storage import DTYPES, TensorReader, TensorWriter, raw_bytes
from windlass.checkpoint.verify import Checkpoint, verify


def reader_of(run, step=100):
    return TensorReader(Checkpoint.open(run / f"checkpoints/step-{step:08d}"))


def test_dcp_itself_saves_and_loads_through_our_classes(tmp_path, ranks):
    """The classes keep to DCP's public contract, also where its own loop drives them."""
    ranks.run(2, cases.save_and_load_with_dcp, tmp_path)
    assert verify(tmp_path / "checkpoints/step-00000100") == []


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (3, 5, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).reshape(3, 5)
    tensor = tensor[:, ::2] if dtype != torch.bool else tensor  # not contiguous; NaNs with any payload
    writer = TensorWriter(tmp_path / "checkpoints", 100, "run", lambda token: {})
    write_checkpoint({"x": tensor}, {"x": tensor}, writer, Exchange(0, 1, None))
    loaded = torch.zeros_like(tensor)
    with pytest.warns(UserWarning, match="disabled"):
        dcp.load({"x": loaded}, storage_reader=reader_of(tmp_path))
    assert raw_bytes(loaded) == raw_bytes(tensor)


def test_objects_are_refused_by_name_instead_of_being_pickled(tmp_path):
    writer = TensorWriter(tmp_path / "checkpoints", 100, "run", lambda token: {})
    with pytest.raises(TypeError, match="scheduler is not a tensor; put it into the trainer state"):
        write_checkpoint({"scheduler": {"a", "b"}}, {}, writer, Exchange(0, 1, None))
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
    from tests.checkpoint.single import make_run

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
    reader = reader_of(tmp_path)
    with pytest.warns(UserWarning, match="disabled"):
        dcp.load(only, storage_reader=reader)
    assert torch.equal(only["model.bias"], make_tensors(100)["model.bias"]) and reader.num_bytes_read == 14
