"""One trial: on a mesh that sends nothing, of any rank alone, with nothing left behind."""

import gc

import pytest
import torch
import torch.distributed as dist

from tests import tiny
from windlass.parallel.ddp import OverlappedSums
from windlass.parallel.mesh import make_silent_mesh
from windlass.parallel.program import ShardedProgram
from windlass.plan.sizes import StepSize
from windlass.runtime import start_runtime
from windlass.training.parts.device_memory import Room
from windlass.training.sizing.probe import _step, step_fits
from windlass.training.start.model_plan import ModelPlan, plan_of
from windlass.training.start.parameter_rules import rules_of


def planned(config, runtime):
    architecture = config.model.shape(300)
    rules = rules_of(config, architecture)
    return ModelPlan(architecture, None, rules, plan_of(config, architecture, rules, runtime))


def silent_mesh(config, runtime):
    return make_silent_mesh(config.parallel.layout(runtime.world), "cpu")


def alone(config):
    """On rank 0 of two: a whole trial, while rank 1 does nothing -> programs and buckets that are left."""
    with start_runtime() as runtime:
        mesh, plan = silent_mesh(config, runtime), planned(config, runtime)
        if runtime.rank == 0:
            _step(config, runtime, plan, mesh)
        dist.barrier()
        gc.collect()
        return sum(isinstance(one, ShardedProgram | OverlappedSums) for one in gc.get_objects())


@pytest.mark.parametrize(
    "parallel", [{"shard": 2}, {"zero": 2}, {"zero": 1}, {"zero": 0}, {"replicate": 2, "shard": 1}], ids=str
)
def test_a_rank_tries_alone(base, ranks, parallel):
    config = tiny.recipe(base, "alone", parallel=parallel, precision={"policy": "bf16"})
    assert ranks.run(2, alone, config) == [0, 0]


SETTINGS = {
    "isolated documents": {"data": {"isolate": True}},
    "dropout": {"model": {"attention_dropout": 0.1}},
    "recomputed": {"parallel": {"recompute": "full"}},
    "bf16": {"precision": {"policy": "bf16"}},
    "muon": {"optim": {"kind": "muon"}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_trial_runs_what_the_recipe_asks_for_and_draws_nothing(base, name):
    config = tiny.recipe(base, "setting", **SETTINGS[name])
    before = torch.get_rng_state()
    with start_runtime() as runtime:
        mesh, size = silent_mesh(config, runtime), StepSize(2, "none")
        assert step_fits(config, runtime, planned(config, runtime), mesh, size, Room(1, lambda size: 1))
        assert not step_fits(config, runtime, planned(config, runtime), mesh, size, Room(0, lambda size: 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_error_than_out_of_memory_is_none_of_a_trial(base):
    def broken(_size):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    config = tiny.recipe(base, "broken")
    with start_runtime() as runtime, pytest.raises(RuntimeError, match="shapes"):
        step_fits(
            config,
            runtime,
            planned(config, runtime),
            silent_mesh(config, runtime),
            StepSize(2, "none"),
            Room(1, broken),
        )
