"""What routers say of a global batch: the same on every rank and in every layout, and nothing without experts."""

import pytest
import torch

from tests.parallel import tiny
from tests.parallel.test_expert import CHOSEN, EXPERTS, LAYERS, LENGTH, MODEL


def figures(world, model, parallel):
    """On one of `world` ranks, of the same four rows in any layout: before a batch, after it, and after evaluation."""
    program = tiny.make_program(world, policy="fp64", model=model, **parallel)
    before, rows = program.figures(), 4 // program.mesh.layout.batch_ranks
    batches = [tiny.batch(program.mesh.batch_rank * rows + index) for index in range(rows)]
    program.run(batches, torch.tensor(4 * LENGTH))
    after = program.figures()
    program.evaluate(batches)
    return [{name: value.tolist() for name, value in one.items()} for one in (before, after, program.figures())]


@pytest.fixture(scope="module")
def one(ranks):
    return ranks.run(1, figures, 1, MODEL, {})[0][1]


def test_one_process_counts_each_token_once_per_expert(one):
    assert one["router_loss"] >= CHOSEN * 0.99, "K where all experts get alike"
    assert len(one["expert_loads"]) == LAYERS
    for load in one["expert_loads"]:
        tokens = load * 4 * LENGTH * CHOSEN / EXPERTS  # of the busiest
        assert abs(tokens - round(tokens)) < 1e-9 and 1.0 <= load <= EXPERTS / CHOSEN
    in_all = [share * LAYERS * 4 * LENGTH * CHOSEN for share in one["expert_shares"]]  # tokens of each expert
    assert len(in_all) == EXPERTS and sum(in_all) == pytest.approx(LAYERS * 4 * LENGTH * CHOSEN, abs=1e-9)
    assert all(abs(tokens - round(tokens)) < 1e-9 for tokens in in_all)
    assert any(round(tokens) % LAYERS for tokens in in_all), "of all layers, and not of one"


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"expert": 2, "shard": 2}),
        (2, {"context": 2}),
        (2, {"pp": 2, "zero": 1}),
        pytest.param(4, {"pp": 2, "zero": 1, "shard": 2, "schedule": "gpipe"}, marks=pytest.mark.long),
    ],
)
def test_layouts_agree_on_every_rank(ranks, one, world, parallel):
    for before, after, evaluated in ranks.run(world, figures, world, MODEL, parallel):
        assert before == {} and evaluated == after, "evaluation adds nothing"
        assert abs(after["router_loss"] - one["router_loss"]) <= 1e-10
        assert after["expert_loads"] == one["expert_loads"] and after["expert_shares"] == one["expert_shares"]


def test_a_dense_model_has_none_and_one_without_the_loss_has_loads(ranks):
    assert ranks.run(1, figures, 1, tiny.MODEL, {})[0] == [{}, {}, {}]
    (_, after, _) = ranks.run(1, figures, 1, {**MODEL, "output_router_logits": False}, {})[0]
    assert list(after) == ["expert_loads", "expert_shares"]
