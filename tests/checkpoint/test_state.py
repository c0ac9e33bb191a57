import pytest
import torch

from tests.checkpoint import cases


def assert_equal(one, two):
    assert set(one) == set(two)
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saved_by_two_ranks_loads_bit_equal_into_any_layout(ranks, tmp_path, asynchronous):
    saved = ranks.run(2, cases.save_sharded, tmp_path / "checkpoints", asynchronous)[0]
    for world, sharded in ((1, False), (1, True), (2, True), (4, True), (2, False)):
        for capsule, loaded in ranks.run(world, cases.load_sharded, tmp_path / "checkpoints", sharded):
            assert capsule == {"position": 17, "step": 5}
            assert_equal(saved, loaded)
