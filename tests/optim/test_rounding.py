"""Stochastic rounding: right in the mean, exact where nothing is lost, and the same noise for an element wherever it is."""

from functools import partial

import pytest
import torch

from tests.parallel.tiny import each, make_program
from windlass.optim.rounding import Numbering, hash32, numbering_of, rounded_to, step_keys, stream_keys, two_noises

N = 1 << 16


def keys(name="w", seed=3, step=1):
    return step_keys(torch.tensor([stream_keys(seed, name)], dtype=torch.int32), torch.tensor(float(step)))[0]


def numbers(count=N):
    return Numbering(0, 1, 1).numbers(0, count, torch.device("cpu"))


@pytest.mark.parametrize("value", [1.0 + 2**-9, -(1.0 + 2**-10), 3.14159e-7, 1.0 + 2**-16, -6.02e23])
def test_the_mean_is_the_number_itself(value):
    low, high = two_noises(numbers(), keys())
    for noise in (low, high):
        rounded = rounded_to(torch.full((N,), value), torch.bfloat16, noise).double()
        gap = rounded.max() - rounded.min()
        assert len(rounded.unique()) == 2 and rounded.min() <= value <= rounded.max()
        assert abs(rounded.mean() - value) <= 5 * gap / 2 / N**0.5, "five standard deviations of a fair coin"


def test_what_bf16_holds_stays_and_what_is_no_number_too():
    held = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), 2.0**-133]).repeat(100)
    noise = two_noises(numbers(len(held)), keys())[0]
    assert torch.equal(rounded_to(held, torch.bfloat16, noise).float(), held)
    assert rounded_to(torch.full((100,), float("nan")), torch.bfloat16, noise[:100]).isnan().all()


def test_without_noise_it_is_the_nearest_and_other_dtypes_take_no_noise():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded_to(values, torch.bfloat16, None), values.bfloat16())
    assert rounded_to(values, torch.float32, numbers(1000)) is values


def test_noise_is_uniform_and_another_for_every_step_name_seed_and_half():
    draws = [half for k in (keys(), keys(step=2), keys("v"), keys(seed=4)) for half in two_noises(numbers(), k)]
    for one in draws:
        assert one.min() >= 0 and one.max() <= 65535
        counts = torch.bincount(one // 256, minlength=256).double()
        assert ((counts - N / 256).square() / (N / 256)).sum() < 361, "chi-square of 255 degrees: p > 1e-5"
    for first in range(len(draws)):
        for second in range(first):
            pair = torch.stack((draws[first], draws[second])).double()
            assert abs(torch.corrcoef(pair)[0, 1]) < 5 / N**0.5
    neighbours = torch.stack((draws[0][1:], draws[0][:-1])).double()
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 5 / N**0.5


def test_the_hash_loses_no_bit():
    assert len(hash32(numbers(), keys()[0]).unique()) == N


def sharded_noise(layout):
    """{name: numbers of this rank's elements, gathered into the whole tensor}."""
    from torch.distributed.tensor import DTensor

    program = make_program(*layout)
    found = {}
    for record in program.records():
        tensor = record.tensor.detach()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        mine = numbering_of(tensor).numbers(0, local.numel(), local.device).view(local.shape)
        if isinstance(tensor, DTensor):
            mine = DTensor.from_local(
                mine, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
            ).full_tensor()
        found[record.name] = torch.equal(mine.view(-1).long(), torch.arange(mine.numel()))
    return found


@pytest.mark.parametrize("layout", [(2, 0, 2, 1), (2, 3, 1, 2), (4, 3, 1, 4), (4, 3, 2, 2)])
def test_elements_have_the_numbers_of_the_whole_tensor(ranks, layout):
    for found in ranks.run(layout[0], sharded_noise, layout):
        assert all(found.values()), found


def cut_along(dims):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = torch.arange(5 * 7 * 3).view(5, 7, 3)
    tensor = distribute_tensor(whole, mesh, [Shard(dim) for dim in dims])
    local = tensor.to_local()
    return torch.equal(numbering_of(tensor).numbers(0, local.numel(), local.device).view(local.shape).long(), local)


def test_a_part_that_is_cut_along_other_dims_too(ranks):
    dims = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 2))
    assert ranks.run(4, each, *(partial(cut_along, pair) for pair in dims)) == [[True] * len(dims)] * 4


def test_numbers_beyond_32_bits_wrap():
    at = Numbering(2**32 + 5, 1, 1).numbers(0, 2, torch.device("cpu"))
    assert at.tolist() == [5, 6] and at.dtype == torch.int32
