"""Rows of several documents in every layout: the loss and gradients of one process, whatever is sharded, recomputed, cast."""

import pytest
import torch

from tests.parallel.tiny import Operators, assert_equal, full, make_program

LENGTH = 12
DOCUMENTS = [[0, 5, 12, 12], [0, 12, 12, 12], [0, 1, 2, 7], [0, 4, 11, 12]]  # of four micro-batches of one row


def micro_batch(index):
    ids = torch.randint(0, 150, (1, LENGTH + 1), generator=torch.Generator().manual_seed(index))
    targets = ids[:, 1:].clone()
    targets[:, : 2 * index] = -100
    return {"input_ids": ids[:, :-1], "targets": targets, "documents": torch.tensor([DOCUMENTS[index]])}


def packed_gradients(world, zero, replicate, shard, policy="fp64", **parallel):
    """(loss, {name: full gradient}) of the same four rows, on one of `world` ranks."""
    program = make_program(world, zero, replicate, shard, policy, **parallel)
    rows = 4 // world
    mine = range(program.mesh.batch_rank * rows, (program.mesh.batch_rank + 1) * rows)
    loss = program.run([micro_batch(index) for index in mine], torch.tensor(36.0))
    return loss.item(), {record.name: full(record.tensor.grad) for record in program.records()}


def with_options(options, *layout):
    return packed_gradients(*layout, **options)


@pytest.mark.parametrize("layout", [(2, 0, 2, 1), (2, 2, 1, 2), (2, 3, 1, 2)])
@pytest.mark.parametrize("options", [{}, {"recompute": "selective"}, {"recompute": "full"}])
def test_every_layout_has_the_gradients_of_one_process(ranks, layout, options):
    one = ranks.run(1, packed_gradients, 1, 3, 1, 1)[0]
    assert_equal(one, ranks.run(2, with_options, options, *layout)[0], 1e-12)


@pytest.mark.parametrize("layout", [(2, 0, 2, 1), (2, 3, 1, 2)])
def test_mixed_precision_reaches_attention_inside_documents(ranks, layout):
    """DDP casts by autocast, FSDP2 by itself."""
    loss, wanted = ranks.run(1, packed_gradients, 1, 3, 1, 1)[0]
    bf16_loss, gradients = ranks.run(2, with_options, {"policy": "bf16"}, *layout)[0]
    assert abs(loss - bf16_loss) <= 3e-3 * loss
    norms = [sum(g.square().sum() for g in each.values()).sqrt().item() for each in (gradients, wanted)]
    assert abs(norms[0] - norms[1]) <= 3e-2 * norms[1]


@pytest.mark.long
def test_compiled_blocks_have_the_gradients_of_one_process(ranks):
    one = ranks.run(1, packed_gradients, 1, 3, 1, 1)[0]
    options = {"compile": True, "recompute": "selective"}
    assert_equal(one, ranks.run(2, with_options, options, 2, 3, 1, 2)[0], 1e-12)


def count_attention(recompute):
    program = make_program(1, recompute=recompute)
    with Operators() as mode:
        program.run([micro_batch(0)], torch.tensor(12.0))
    return {name: calls for name, calls in mode.calls.items() if "flash_by_document" in name}


def test_selective_keeps_what_attention_inside_documents_returns(ranks):
    none, selective, full = (ranks.run(1, count_attention, kind)[0] for kind in ("none", "selective", "full"))
    forward, backward = "windlass::flash_by_document", "windlass::flash_by_document_backward"
    assert none == selective == {forward: 3, backward: 3}
    assert full == {forward: 6, backward: 3}
