"""How many targets count: summed over all ranks and micro-batches, ignored ones left out."""

import torch

from tests.parallel.tiny import make_program
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
