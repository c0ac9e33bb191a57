"""What fills a device, in step lines; and what of it may be used."""

import pytest
import torch

from tests import tiny
from windlass.runtime import start_runtime
from windlass.training.parts.device_memory import MemoryParts, device_room
from windlass.training.start.open_saved import open_saved

SIZE = 4  # of fp32


def parts_of(directory):
    return [(line["memory_parts"], line["memory_bytes"]) for line in tiny.lines(directory) if line["kind"] == "step"]


@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {"shard": 2})])
def test_the_parts_are_of_the_ranks_tensors_and_add_up_to_the_peak(ranks, tmp_path, world, parallel):
    config = tiny.recipe(tmp_path, run={"steps": 2}, report={"every_steps": 1}, parallel=parallel)
    ranks.run(world, tiny.train, config)
    lines = parts_of(config.run.directory)
    assert len(lines) == 2
    whole = sum(p.numel() for p in open_saved(config.run.directory).model.parameters()) * SIZE
    for parts, peak in lines:
        assert list(parts) == ["parameters", "gradients", "states", "process"] and sum(parts.values()) == peak
        # a rank may hold a row more of a tensor than its share
        assert whole / world <= parts["parameters"] <= whole / world * 1.25
        assert parts["gradients"] == parts["parameters"]
        counters = parts["states"] - 2 * parts["parameters"]  # a step for each tensor
        assert 0 < counters < 200 * SIZE


class Ranks:
    """A runtime of two ranks on GPUs, of which this is the first: the other's peak is larger."""

    device = torch.device("cuda")

    def gathered(self, own):
        return [own, (own[0] + 1, 5, 6, 7)]

    def memory_bytes(self):
        return 100.0

    def max_over_ranks(self, value):
        return value + 1


def test_the_rank_is_the_one_with_the_largest_peak_and_the_allocator_has_a_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 130)
    parts = MemoryParts(Ranks(), lambda: (1, 2, 3))
    assert parts.of(101.0) == {"parameters": 5, "gradients": 6, "states": 7, "activations": 83, "cache": 31}
    assert parts.of(15.0)["activations"] == 0, "a peak from before the states were there"


def test_a_cpu_has_no_room():
    with start_runtime() as runtime:
        assert device_room(runtime) is None
