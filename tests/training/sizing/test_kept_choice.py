"""A checkpoint's sizes are taken where nothing has changed that they depend on; else the reason is the one that holds."""

from types import SimpleNamespace

import pytest

from tests import tiny
from windlass.training.sizing.kept_choice import changes_since


def recipe(base, micro_batch, parallel, run=None, data=None):
    run = {"micro_batch": micro_batch, **(run or {})}
    return tiny.recipe(base, "sizes-why", run=run, parallel=parallel, data=data or {})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"parallel": {"zero": 1}}, "parallel.zero changed from 3 to 1"),
        ({"parallel": {"offload": True}}, "parallel.offload changed from false to true"),
        ({"parallel": {"blocks_per_unit": 2}}, "parallel.blocks_per_unit changed from 1 to 2"),
        ({"parallel": {"prefetch": 1}}, "parallel.prefetch changed from 0 to 1"),
        ({"parallel": {"recompute": "none"}}, "parallel.recompute changed from selective to none"),
        (
            {"parallel": {"recompute": "selective", "activation_gib": 1.5}},
            "parallel.activation_gib changed from None to 1.5",
        ),
        ({"parallel": {"compile": False}}, "parallel.compile changed from true to false"),
        (
            {"parallel": {"shard": 1, "replicate": 2}},
            "parallel.replicate changed from 1 to 2 and parallel.shard changed",
        ),
        ({"run": {"micro_batch": 2}}, "run.micro_batch changed from 4 to 2"),
        ({"data": {"sequence_length": 32}}, "data.sequence_length changed from 16 to 32"),
        (
            {"run": {"tokens_per_step": 96}},
            "run.micro_batch=4 on 2 ranks no longer divides the 6 sequences of run.tokens_per_step=96",
        ),
        ({"then": {"micro_batch": "auto"}}, "the checkpoint itself leaves micro_batch to auto"),
        (
            {"then": {"zero": 0}, "parallel": {"zero": "auto", "shard": 2}},
            "the run had parallel.zero=0, which does not go with",
        ),
        ({"world": 4}, "the checkpoint was written on 4 x CPU and this run has 2 x CPU"),
        ({"device": "H200"}, "the checkpoint was written on 2 x H200 and this run has 2 x CPU"),
    ],
)
def test_the_reason_to_choose_anew_is_the_one_that_holds(base, given, reason):
    asked = {"recompute": "auto", **given.get("parallel", {})}
    sections = {name: given[name] for name in ("run", "data") if name in given}
    config = recipe(base, "auto", asked, **sections)
    chosen = {"micro_batch": 4, "zero": 3, "recompute": "selective", "compile": True} | given.get("then", {})
    began = recipe(base, chosen.pop("micro_batch"), chosen)
    state = {"world": given.get("world", 2), "device": given.get("device", "CPU"), "config": began.model_dump()}
    runtime = SimpleNamespace(world=2, device_name=lambda: "CPU")
    found = changes_since(config, state, runtime)
    assert found == [] if reason is None else reason in " and ".join(found)
