"""The one door: the loss is the global mean whatever the masks, on every rank the same number."""

import pytest
import torch

from tests.parallel.tiny import MODEL, Operators, batch, make_program

LAYOUTS = {"ddp": (2, 0, 2, 1), "zero3": (2, 3, 1, 2), "hsdp": (4, 3, 2, 2)}


def masked(seed):
    """Micro-batches with 0 to 8 counted targets."""
    made = batch(seed)
    made["targets"] = made["targets"].clone()
    made["targets"][:, : (3 * seed) % 9] = -100
    return made


def run_and_evaluate(layout, seeds):
    """On one rank: loss of run, sum of evaluate, whether the model trains afterwards; `seeds`: all micro-batches."""
    program = make_program(*layout, "fp64")
    share = len(seeds) // layout[0]
    mine = [masked(seed) for seed in seeds[program.mesh.batch_rank * share :][:share]]
    count = program.mesh.sum_over_batch(torch.stack([(b["targets"] != -100).sum() for b in mine]).sum())
    loss = program.run(mine, count)
    nats = program.evaluate(mine)
    assert not loss.requires_grad and not nats.requires_grad and loss.dim() == nats.dim() == 0
    return loss.item(), nats.item(), count.item(), program.model.training


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_mean_over_all_ranks_targets(ranks, layout):
    seeds = [0, 3, 1, 2, 6, 5, 4, 8]  # rank 0's share counts other numbers of targets than rank 1's; 3 counts none
    loss, nats, count, _ = ranks.run(1, run_and_evaluate, (1, 3, 1, 1), seeds)[0]
    results = ranks.run(LAYOUTS[layout][0], run_and_evaluate, LAYOUTS[layout], seeds)
    assert count == sum(8 - (3 * seed) % 9 for seed in seeds)
    assert nats == pytest.approx(loss * count, rel=1e-12), "evaluation sums what the step averages"
    assert {result[0] for result in results} == {results[0][0]}, "the same number on every rank"
    for result in results:
        assert result == (pytest.approx(loss, rel=1e-12), pytest.approx(nats, rel=1e-12), count, True)


def count_alone():
    program = make_program(1)
    with Operators() as mode:
        program.run([batch(), batch()], torch.tensor(16.0))
        program.evaluate([batch()])
    return mode.collectives(), mode.calls["_local_scalar_dense"]


def test_one_process_sends_nothing_and_reads_nothing_on_the_host(ranks):
    assert ranks.run(1, count_alone) == [({}, 0)]


def a_step_without_micro_batches():
    try:
        make_program(1).run([], torch.tensor(1.0))
    except AssertionError as error:
        return str(error)
    return "nothing was said"


def test_a_step_has_a_micro_batch(ranks):
    assert ranks.run(1, a_step_without_micro_batches) == ["a global batch has at least one micro-batch"]


EVEN = {**MODEL, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
BY_SOURCE = {
    "ddp": (2, {"zero": 0, "replicate": 2}),
    "zero3": (2, {"shard": 2}),
    "tp": (2, {"tp": 2}),
    "context": (2, {"context": 2}),
    "pp": (2, {"pp": 2, "zero": 1}),
    "zbv": (2, {"pp": 2, "zero": 1, "schedule": "zbv"}),
}


def losses_by_source(world, layout):
    """On one rank: the figures before a global batch of twelve rows of three sources, after it, after evaluation, and after a
    batch that does not say its sources."""
    program = make_program(world, policy="fp64", model=EVEN, **layout)
    share = 12 // program.mesh.layout.batch_ranks
    mine = range(program.mesh.batch_rank * share, (program.mesh.batch_rank + 1) * share)
    of = {seed: torch.tensor([[seed % 5 == 0, seed % 5 > 0, False]]) for seed in mine}
    count = torch.tensor(float(sum(8 - (3 * seed) % 9 for seed in range(12))))
    found = [program.figures()]
    program.run([{**masked(seed), "sources": of[seed]} for seed in mine], count)
    found.append(program.figures())
    program.evaluate([masked(seed) for seed in mine])
    found.append(program.figures())
    program.run([masked(seed) for seed in mine], count)
    found.append(program.figures())
    return [{name: value.tolist() for name, value in one.items()} for one in found]


def losses_one_by_one():
    """The mean loss of the rows of sources 0 and 1, each run alone."""
    program, sums = make_program(1, policy="fp64", model=EVEN), [[0.0, 0], [0.0, 0]]
    for seed in range(12):
        sums[seed % 5 > 0][0] += program.evaluate([masked(seed)]).item()
        sums[seed % 5 > 0][1] += 8 - (3 * seed) % 9
    return [nats / count for nats, count in sums]


@pytest.mark.parametrize("layout", BY_SOURCE)
def test_the_loss_of_each_source_is_one_number_in_every_layout(ranks, layout):
    (expected,) = ranks.run(1, losses_one_by_one)
    assert abs(expected[0] - expected[1]) > 1e-3
    for before, after, evaluated, without in ranks.run(BY_SOURCE[layout][0], losses_by_source, *BY_SOURCE[layout]):
        assert before == without == {}
        means = [nats / count for nats, count in after["source_losses"][:2]]
        assert means == pytest.approx(expected, rel=1e-12) and after["source_losses"][2] == [0, 0]
        assert evaluated == after, "evaluation adds nothing"
