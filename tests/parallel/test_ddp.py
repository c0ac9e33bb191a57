"""DDP: every gradient sent once however many micro-batches, and summed, not averaged."""

import pytest
import torch

from tests.parallel.tiny import Operators, assert_equal, batch, gradients, make_program


def count_ddp(micro_batches):
    """All-reduce calls of a step under DDP: through the hook, and with the loss's."""
    from windlass.parallel import ddp

    program = make_program(2, 0, 2, 1)
    calls = []
    send = ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), send(*args, **kwargs))[1]
    try:
        count = torch.tensor(8.0 * micro_batches * 2)
        for _ in range(2):
            calls.clear()
            program.run([batch(i) for i in range(micro_batches)], count)
    finally:
        ddp.dist.all_reduce = send
    return calls, sum(record.tensor.numel() for record in program.records())


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ddp_sends_each_gradient_once_however_many_micro_batches(ranks, micro_batches):
    for calls, parameters in ranks.run(2, count_ddp, micro_batches):
        assert sum(calls) == parameters + 1, "every gradient once, and the loss"
        assert len(calls) == 1 + 1, "the model fits one bucket of 25 MiB"


def plain_gradients():
    """One process over the same four micro-batches as two ranks of two."""
    program = make_program(1, 0, 1, 1, "fp64")
    loss = program.run([batch(i) for i in range(4)], torch.tensor(32.0))
    return loss.item(), {record.name: record.tensor.grad for record in program.records()}


def test_gradients_are_the_sum_over_ranks(ranks):
    assert_equal(ranks.run(1, plain_gradients)[0], ranks.run(2, gradients, 2, 0, 2, 1)[0], 1e-12)


def count_alone():
    program = make_program(1, 0, 1, 1)
    with Operators() as mode:
        program.run([batch(), batch()], torch.tensor(16.0))
    return program.caller is program.model, mode.collectives()


def test_one_process_is_not_wrapped_and_sends_nothing(ranks):
    assert ranks.run(1, count_alone) == [(True, {})]
