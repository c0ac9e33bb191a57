"""What other rooms know of a parameter."""

import dataclasses

import pytest
import torch

from windlass.parallel.records import Record


def test_a_record_is_counted_unless_said_otherwise_and_never_changes():
    record = Record("lm_head.weight", torch.nn.Parameter(torch.ones(2, 3)), torch.Size([2, 3]))
    assert record.counted
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.counted = False
