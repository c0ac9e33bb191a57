"""What other rooms know of a parameter."""

import dataclasses

import pytest
import torch

from windlass.parallel.records import Record, in_buckets
from windlass.units import MIB


def test_a_record_is_counted_unless_said_otherwise_and_never_changes():
    record = Record("lm_head.weight", torch.nn.Parameter(torch.ones(2, 3)), torch.Size([2, 3]))
    assert record.counted
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.counted = False


def test_a_gradient_ends_the_bucket_that_it_fills_and_none_is_cut():
    assert [*in_buckets([], 25)] == []
    assert [*in_buckets([MIB // 2, MIB // 2, MIB, 3 * MIB, MIB], 2)] == [slice(0, 3), slice(3, 4), slice(4, 5)]
    assert [*in_buckets([40 * MIB, 40 * MIB], 0.25)] == [slice(0, 1), slice(1, 2)]
    assert [*in_buckets([MIB, MIB - 1], 2)] == [slice(0, 2)]
