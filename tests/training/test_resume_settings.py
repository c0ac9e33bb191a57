"""A run goes on with other settings of compile, offload, recomputation and sharding than its checkpoint was made with, as if
it had always had them: no name, no shape and no dtype in a checkpoint depends on them."""

import pytest

from tests import tiny
from windlass.checkpoint.keep import diff
from windlass.proof.pool import RankFailed

WORLD = 2
CHANGES = {
    "compiled": ({}, {"compile": True}),
    "no longer compiled": ({"compile": True}, {}),
    "offloaded": ({}, {"offload": True}),
    "no longer offloaded": ({"offload": True, "zero": 2}, {}),
    "zero 1 and a budget": ({"zero": 1}, {"recompute": "selective", "activation_gib": 3e-5}),
    "larger units": ({}, {"blocks_per_unit": 2, "prefetch": 1}),
    "buckets": ({"blocks_per_unit": 2}, {"zero": 0, "bucket_mib": 1}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("settings")


@pytest.fixture(scope="module")
def whole(base, ranks):
    """The run that was never stopped, with no setting but the defaults."""
    config = tiny.recipe(base, "whole")
    ranks.run(WORLD, tiny.train, config)
    return config.run.directory


QUICK = {"zero 1 and a budget", "buckets"}


@pytest.mark.parametrize("change", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in CHANGES])
def test_a_run_goes_on_with_other_settings(base, ranks, whole, change):
    before, after = CHANGES[change]
    with pytest.raises(RankFailed, match="died with exit code -9"):
        ranks.run(WORLD, tiny.train, tiny.recipe(base, change, parallel=before), (1, 8), timeout_s=300)
    config = tiny.recipe(base, change, parallel=after)
    ranks.run(WORLD, tiny.train, config, timeout_s=300)
    directory = config.run.directory
    assert [kind for kind, _ in tiny.kinds(directory)].count("resume") == 1
    expected, got = tiny.losses(whole), tiny.losses(directory)
    assert got.keys() == expected.keys()
    for step, numbers in expected.items():
        assert got[step] == pytest.approx(numbers, abs=1e-5), step
    difference = diff(*(run / "checkpoints" / f"step-{tiny.STEPS:08d}" for run in (whole, directory)))
    assert (difference.only_first, difference.only_second, difference.form) == ([], [], []), difference
    assert difference.same + len(difference.bytes) > 20
