"""Rows of a vocabulary that its file has not."""

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from windlass.model import slices
from windlass.model.slices import GrownRows


def test_every_box_of_a_grown_tensor_is_that_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "ROWS_AT_ONCE", 3)  # the mean is summed in several pieces
    save_file({"x": torch.randn(7, 4, generator=torch.Generator().manual_seed(1))}, tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as file:
        grown, old = GrownRows(file.get_slice("x"), 9), file.get_tensor("x")
        whole = torch.cat((old, old.mean(0).expand(2, -1)))
        assert grown.get_shape() == [9, 4] and grown.get_dtype() == "F32"
        for start in range(10):
            for stop in range(start, 10):
                for columns in (slice(0, 4), slice(1, 3)):
                    torch.testing.assert_close(grown[start:stop, columns], whole[start:stop, columns])
                torch.testing.assert_close(grown[start:stop], whole[start:stop])
