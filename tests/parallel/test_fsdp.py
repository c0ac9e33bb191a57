"""ZeRO-2, ZeRO-3 and HSDP: what is sent per step, counted to the call, and what is kept gathered."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.tiny import BLOCKS, Operators, assert_equal, batch, gradients, make_program
from windlass.parallel.fsdp import fsdp_units

UNITS = BLOCKS + 1
LAYOUTS = {"zero3": (2, 3, 1, 2), "zero2": (2, 2, 1, 2), "hsdp": (4, 3, 2, 2), "hsdp-zero2": (4, 2, 2, 2)}


def count_step(layout, micro_batches):
    """{collective: calls} of the second step (the first makes buffers), on this rank."""
    program = make_program(*layout)
    count = torch.tensor(8.0 * micro_batches * layout[0])
    for _ in range(2):
        program.model.zero_grad()
        with Operators() as mode:
            program.run([batch(i) for i in range(micro_batches)], count)
    return mode.collectives()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fsdp_sends_what_its_docstring_says(ranks, layout, micro_batches):
    world, zero, replicate, _ = LAYOUTS[layout]
    for counts in ranks.run(world, count_step, LAYOUTS[layout], micro_batches):
        assert counts == {
            "allgather_base": UNITS if zero == 2 else micro_batches * (UNITS + BLOCKS),
            "reduce_scatter_base": micro_batches * UNITS,
            "allreduce": (UNITS if replicate > 1 else 0) + 1,  # and the loss
        }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sharding_gives_the_gradient_of_ddp(ranks, layout):
    world = LAYOUTS[layout][0]
    assert_equal(
        ranks.run(world, gradients, world, 0, world, 1)[0], ranks.run(world, gradients, *LAYOUTS[layout])[0], 1e-12
    )


def gathered_after(layout):
    """(after a step, after an evaluation, after a step that an evaluation preceded): units left gathered on this rank, and
    whether that step saw the weights of its own time."""
    program = make_program(*layout, "fp64")
    count = torch.tensor(8.0 * layout[0])

    def gathered():
        return sum(not isinstance(next(unit.parameters()), DTensor) for unit in fsdp_units(program.model))

    left, losses = [], []
    for _ in range(2):
        losses.append(program.run([batch(0), batch(1)], count).item())
        left.append(gathered())
        with torch.no_grad():
            for record in program.records():
                record.tensor.mul_(0.5)
        losses.append(program.evaluate([batch(0), batch(1)]).item() / count.item())
        left.append(gathered())
    return left, losses


@pytest.mark.parametrize("layout", ["zero3", "zero2"])
def test_nothing_stays_gathered_between_steps_and_no_weight_is_stale(ranks, layout):
    for left, losses in ranks.run(2, gathered_after, LAYOUTS[layout]):
        assert left == [0, 0, 0, 0]
        assert losses[1] == pytest.approx(losses[2], rel=1e-12), "evaluation and the step after it see the same weights"
        assert abs(losses[1] - losses[0]) > 1e-4, "the weights were changed in between"


def units_of(policy):
    return len(fsdp_units(make_program(1, 3, 1, 1, policy).model))


def test_one_process_is_wrapped_only_where_it_computes_in_another_dtype(ranks):
    assert ranks.run(1, units_of, "fp32") == [0]
    assert ranks.run(1, units_of, "bf16") == [UNITS]
