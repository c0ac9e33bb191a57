"""Frozen parameters: what is not computed, not kept and not sent, counted; and what stays as it was."""

from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.tiny import BLOCKS, MODEL, Operators, batch, each, full
from windlass.model.architecture import parameter_shapes
from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.optim.clip import gradient_norm
from windlass.optim.config import OptimConfig
from windlass.optim.optimizer import make_optimizer
from windlass.parallel import ddp
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.fsdp import fsdp_units
from windlass.parallel.invariants import check_optimizer
from windlass.parallel.mesh import make_mesh
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of

LAYOUTS = {"ddp": (2, 0, 2, 1), "zero2": (2, 2, 1, 2), "zero3": (2, 3, 1, 2), "hsdp": (4, 3, 2, 2)}
BOTTOM = ("model.embed_tokens.weight", "model.layers.[01].*")
MIDDLE = ("model.layers.1.*",)


def make(layout, patterns, policy="fp32", tied=False, **parallel):
    world, zero, replicate, shard = layout
    config = ParallelConfig(zero=zero, replicate=replicate, shard=shard, **parallel)
    architecture = ModelConfig.model_validate({**MODEL, "tie_word_embeddings": tied}).architecture()

    names = [n for n in parameter_shapes(architecture) if any(fnmatchcase(n, pattern) for pattern in patterns)]
    precision = precision_of(PrecisionConfig(policy=policy))

    def fill(named):
        initialise(named.items(), architecture, 3)

    mesh = make_mesh(config.layout(world), "cpu")
    return build_program(architecture, Parallelism(config, precision, mesh, torch.device("cpu")), fill, names)


def counted(layout, patterns, micro_batches=1):
    """{collective: calls}, DDP's bucket elements, and what is gathered afterwards, in the second step."""
    program = make(layout, patterns)
    buckets, send = [], ddp.dist.all_reduce
    ddp.dist.all_reduce = lambda t, *args, **kwargs: (buckets.append(t.numel()), send(t, *args, **kwargs))[1]
    try:
        for _ in range(2):
            program.model.zero_grad()
            buckets.clear()
            with Operators() as mode:
                program.run([batch(i) for i in range(micro_batches)], torch.tensor(8.0 * micro_batches * layout[0]))
    finally:
        ddp.dist.all_reduce = send
    trained = sum(r.tensor.numel() for r in program.records() if r.tensor.requires_grad)
    gathered = sum(not isinstance(next(u.parameters()), DTensor) for u in fsdp_units(program.model))
    return mode.collectives(), sum(buckets) - 1, trained, gathered


@pytest.mark.parametrize("layout", ["zero2", "zero3", pytest.param("hsdp", marks=pytest.mark.long)])
def test_a_frozen_block_is_not_reduced(ranks, layout):
    units_of = {
        (): BLOCKS + 2,
        MIDDLE: BLOCKS + 1,
        BOTTOM: BLOCKS - 1,
    }  # two are of the ends, one of them frozen in BOTTOM
    cases = [(patterns, micro_batches) for patterns in units_of for micro_batches in (1, 2)]
    for found in ranks.run(LAYOUTS[layout][0], each, *(partial(counted, LAYOUTS[layout], *case) for case in cases)):
        for (patterns, micro_batches), (calls, _, _, gathered) in zip(cases, found, strict=True):
            assert calls["reduce_scatter_base"] == micro_batches * units_of[patterns]
            assert calls["allreduce"] == (units_of[patterns] if layout == "hsdp" else 0) + 1, "and the loss"
            assert gathered == 0, "frozen units are freed too"
            if layout == "zero2":
                assert calls["allgather_base"] == BLOCKS + 2, "gathered once, kept over the micro-batches"
            elif patterns != BOTTOM:
                assert calls["allgather_base"] == micro_batches * (BLOCKS + 2 + BLOCKS)
            else:  # backward stops above block 1, which torch has prefetched by then; the next micro-batch's forward uses that
                assert calls["allgather_base"] == micro_batches * (BLOCKS + 2 + 1) + 1


def test_ddps_buckets_hold_only_what_is_trained(ranks):
    for _, sent, trained, _ in ranks.run(2, counted, LAYOUTS["ddp"], BOTTOM, 2):
        assert sent == trained
    whole = ranks.run(2, counted, LAYOUTS["ddp"], (), 2)[0][1]
    assert trained < whole / 2


def frozen_step(layout, patterns, parallel):
    """What a step leaves: gradients and states by name, the frozen weights unchanged, and the loss before and after."""
    program = make(layout, patterns, "fp64", **parallel)
    records = program.records()
    optimizer = make_optimizer(records, OptimConfig(learning_rate=1e-2, weight_decay=0.5))
    check_optimizer(optimizer.param_groups, records)
    before = {record.name: full(record.tensor) for record in records}
    losses = []
    for _ in range(3):
        losses.append(program.run([batch(0), batch(1)], torch.tensor(16.0 * layout[0])).item())
        with_gradient = {record.name for record in records if record.tensor.grad is not None}
        optimizer.step(gradient_norm(records, program.mesh.pp_group))
    frozen = {record.name for record in records if not record.tensor.requires_grad}
    same = {record.name for record in records if torch.equal(before[record.name], full(record.tensor))}
    states = {name.rpartition(".")[0] for name in optimizer.state_tensors()}
    return frozen, with_gradient, same, states, losses


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("ddp", {"recompute": "full"}),
        ("zero2", {"recompute": "selective"}),
        ("zero3", {"recompute": "full"}),
        pytest.param("hsdp", {}, marks=pytest.mark.long),
        pytest.param("zero3", {"compile": True}, marks=pytest.mark.long),
    ],
)
def test_what_is_frozen_has_neither_gradient_nor_state_and_does_not_move(ranks, layout, parallel):
    calls = [partial(frozen_step, LAYOUTS[layout], patterns, parallel) for patterns in (BOTTOM, MIDDLE)]
    for results in ranks.run(LAYOUTS[layout][0], each, *calls, timeout_s=480):
        for (frozen, with_gradient, same, states, losses), count in zip(results, (1 + 2 * 11, 11), strict=True):
            assert len(frozen) == count
            assert same == frozen, "not even decay moves it"
            assert with_gradient == states and not with_gradient & frozen and len(with_gradient | frozen) == 3 + 3 * 11
            assert losses[2] < losses[0]


def test_a_tied_embedding_is_frozen_with_its_head(ranks):
    (result,) = ranks.run(1, tied_gradient)
    assert result == (False, True)


def tied_gradient():
    program = make((1, 0, 1, 1), ("model.embed_tokens.weight",), tied=True)
    program.run([batch()], torch.tensor(8.0))
    return program.model.lm_head.weight.requires_grad, program.model.lm_head.weight.grad is None


def products_of_backward(patterns):
    program = make((1, 0, 1, 1), patterns)
    with Operators() as mode:
        program.run([batch()], torch.tensor(8.0))
    return mode.calls["mm"] + mode.calls["addmm"]


def test_backward_does_not_run_through_a_frozen_bottom(ranks):
    """A block has 7 products forward and 14 backward; below block 2, whose first norm is trained too, there are none backward."""
    calls = (partial(products_of_backward, patterns) for patterns in ((), BOTTOM, MIDDLE))
    ((everything, bottom, middle),) = ranks.run(1, each, *calls)
    assert everything - middle == 7, "through a frozen block in the middle: its inputs' gradients, not its weights'"
    assert everything - bottom == 2 * 14
