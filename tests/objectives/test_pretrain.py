"""How many targets count: summed over ranks and micro-batches, ignored ones left out; and weights, in every layout."""

import pytest
import torch

from tests.parallel.test_program import BY_SOURCE, EVEN, masked
from tests.parallel.tiny import assert_equal, full, make_program
from windlass.objectives.pretrain import Pretrain


def weigh():
    program = make_program(2, 3, 1, 2)
    rank = torch.distributed.get_rank()
    targets = [torch.tensor([[1, -100, 3]]), torch.tensor([[-100, -100, rank]])]
    batches = [{"input_ids": t.clamp(min=0), "targets": t} for t in targets]
    same, count = Pretrain().weigh(batches, program)
    return same is batches, count.item()


def test_counted_targets_are_summed_over_ranks_and_micro_batches(ranks):
    assert ranks.run(2, weigh) == [(True, 6), (True, 6)]


def weighted(world, layout):
    """(loss, gradients) of a global batch of twelve rows whose targets have weights."""
    program = make_program(world, policy="fp64", model=EVEN, **layout)
    share = 12 // program.mesh.layout.batch_ranks
    mine = range(program.mesh.batch_rank * share, (program.mesh.batch_rank + 1) * share)
    batches = [{**masked(seed), "percent": percent(seed)} for seed in mine]
    given, count = Pretrain().weigh(batches, program)
    loss = program.run(given, count)
    grads = {record.name: full(record.tensor.grad) for record in program.records()}
    return (loss.item(), grads), count.item()


def percent(seed):
    return torch.randint(1, 101, (1, 8), generator=torch.Generator().manual_seed(seed))


def by_hand():
    """The same on one process: each row's targets one by one, by evaluation."""
    program, nats, count = make_program(1, policy="fp64", model=EVEN), 0.0, 0.0
    for seed in range(12):
        batch = masked(seed)
        for place in (batch["targets"][0] != -100).nonzero().flatten().tolist():
            alone = torch.full_like(batch["targets"], -100)
            alone[0, place] = batch["targets"][0, place]
            weight = percent(seed)[0, place].item() / 100
            nats += weight * program.evaluate([{**batch, "targets": alone}]).item()
            count += weight
    return nats / count, count


@pytest.mark.parametrize("layout", BY_SOURCE)
def test_a_loss_by_weight_is_one_number_in_every_layout(ranks, layout):
    ((loss, count),) = ranks.run(1, by_hand)
    ((one, _),) = ranks.run(1, weighted, 1, {})
    assert one[0] == pytest.approx(loss, rel=1e-12)
    found = ranks.run(BY_SOURCE[layout][0], weighted, *BY_SOURCE[layout])
    grads = {name: gradient for (_, of_rank), _ in found for name, gradient in of_rank.items()}  # of all stages
    for (rank_loss, _), rank_count in found:
        assert rank_count == pytest.approx(count, rel=1e-12)
        assert_equal((rank_loss, grads), one, 1e-9)
