"""Muon against torch's own on one process, every layout against one process, steps that are skipped, and its state."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.parallel.tiny import MODEL, Operators, batch, full, make_program
from windlass.optim.clip import gradient_norm
from windlass.optim.config import GroupConfig, OptimConfig
from windlass.optim.muon import newton_schulz
from windlass.optim.optimizer import is_hidden, make_optimizer
from windlass.optim.rules import NO_RULES
from windlass.parallel.records import Record

LAYOUTS = {"one": (1, 3, 1, 1), "ddp2": (2, 0, 2, 1), "zero2-2": (2, 2, 1, 2), "zero3-2": (2, 3, 1, 2)}
LAYOUTS |= {"zero3-4": (4, 3, 1, 4), "hsdp2x2": (4, 3, 2, 2)}
HSDP = pytest.param("hsdp2x2", marks=pytest.mark.long)
MUON = OptimConfig(kind="muon", learning_rate=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (8, 8), (1, 6)])
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_is_torchs_in_bf16(shape, steps):
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    theirs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), steps, 1e-7)
    assert torch.equal(newton_schulz(matrix.bfloat16(), steps), theirs)


def test_newton_schulz_brings_singular_values_near_one():
    matrix = torch.randn(40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    before, after = torch.linalg.svdvals(matrix), torch.linalg.svdvals(newton_schulz(matrix, 5))
    assert before.max() / before.min() > 3 and after.min() > 0.6 and after.max() < 1.25


def test_one_process_is_torchs_muon_and_adamw():
    draw = torch.Generator().manual_seed(4)
    shapes = {
        "model.layers.0.a.weight": (6, 10),
        "model.layers.0.norm.weight": (6,),
        "model.embed_tokens.weight": (9, 6),
    }
    starts = {name: torch.randn(shape, dtype=torch.float64, generator=draw) for name, shape in shapes.items()}
    rules = {"model.layers.0.a.weight": GroupConfig(names=["*"], learning_rate_scale=0.5, weight_decay=0.3)}
    records = [Record(name, torch.nn.Parameter(w.clone()), w.shape) for name, w in starts.items()]
    config = OptimConfig(kind="muon", muon={"momentum": 0.9, "nesterov": False, "steps": 3}, weight_decay=0.2)
    ours = make_optimizer(records, config, rules, torch.float64)
    matrix, norm, embedding = plain = [torch.nn.Parameter(w.clone()) for w in starts.values()]
    settings = {"momentum": 0.9, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}
    theirs = [torch.optim.Muon([matrix], weight_decay=0.3, **settings)]
    theirs += [torch.optim.AdamW([embedding], weight_decay=0.2, betas=(0.9, 0.95))]
    theirs += [torch.optim.AdamW([norm], weight_decay=0.0, betas=(0.9, 0.95))]
    for rate in (1e-2, 3e-2, 2e-2):
        for record, parameter in zip(records, plain, strict=True):
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=draw)
            record.tensor.grad = parameter.grad.clone()
        ours.set_learning_rate(rate)
        ours.step(torch.nn.utils.clip_grad_norm_(plain, config.max_norm))
        with mock.patch.object(
            torch.Tensor, "bfloat16", torch.Tensor.clone
        ):  # torch's iterates in bf16 whatever it is given
            for optimizer in theirs:
                optimizer.param_groups[0]["lr"] = rate * (0.5 if optimizer is theirs[0] else 1.0)
                optimizer.step()
    for record, parameter in zip(records, plain, strict=True):
        assert (record.tensor - parameter).abs().max() <= 1e-14, record.name


def test_hidden_matrices_are_those_of_the_blocks():
    (program,) = [dict(model.named_parameters()) for model in [_decoder()]]
    hidden = {name for name, parameter in program.items() if is_hidden(name, parameter.dim())}
    assert hidden == {name for name in program if name.endswith("_proj.weight")} and len(hidden) == 3 * 7


def _decoder():
    from tests.parallel.tiny import MODEL
    from windlass.model.config import ModelConfig
    from windlass.model.transformer import Decoder

    with torch.device("meta"):
        return Decoder(ModelConfig.model_validate(MODEL).architecture())


def steps(program, optimizer, numbers, spoil=None):
    """Steps over batches of these numbers, each rank its own part; `spoil`: the step whose gradient gets a nan on shard 0."""
    world = program.mesh.layout.batch_ranks
    for number in numbers:
        program.run(
            [batch(4 * number + program.mesh.batch_rank + world * m) for m in range(4 // world)], torch.tensor(32.0)
        )
        if number == spoil and program.mesh.coordinate["shard"] == 0:
            gradient = next(r.tensor.grad for r in program.records() if "q_proj" in r.name)
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = float("nan")
        optimizer.step(gradient_norm(program.records(), program.mesh.pp_group))


def state_of(program, optimizer):
    return {one.name: full(one.tensor) for one in program.records()} | {
        name: full(value) for name, value in optimizer.state_tensors().items()
    }


def cut_unevenly(world):
    """Matrices whose rows do not divide, or are fewer than the ranks, stepped twice -> name: whole weight."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    draw = torch.Generator().manual_seed(6)
    records = []
    for index, shape in enumerate([(5, 7), (7, 5), (3, 4), (2, 9), (5, 7)]):
        whole = torch.randn(shape, dtype=torch.float64, generator=draw)
        tensor = distribute_tensor(whole, mesh, [Shard(0)]) if world > 1 else whole
        records.append(Record(f"model.layers.{index}.weight", torch.nn.Parameter(tensor), whole.shape))
    optimizer = make_optimizer(records, MUON, NO_RULES, torch.float64)
    for _ in range(2):
        for record in records:
            whole = torch.randn(record.logical_shape, dtype=torch.float64, generator=draw)
            record.tensor.grad = distribute_tensor(whole, mesh, [Shard(0)]) if world > 1 else whole
        optimizer.step(torch.tensor(0.5))
    return {record.name: full(record.tensor) for record in records}


@pytest.mark.parametrize("world", [2, 4])
def test_uneven_and_empty_shards(ranks, world):
    (alone,) = ranks.run(1, cut_unevenly, 1)
    for weights in ranks.run(world, cut_unevenly, world):
        assert all((weights[name] - value).abs().max() <= 1e-12 for name, value in alone.items())


def test_under_fp16_small_gradients_count():
    """Elements of 1e-9 are zero in fp16."""
    records = [Record("model.layers.0.a.weight", torch.nn.Parameter(torch.zeros(4, 6)), torch.Size([4, 6]))]
    records[0].tensor.grad = torch.eye(4, 6) * 1e-9
    make_optimizer(records, MUON, NO_RULES, torch.float16).step(torch.tensor(0.5))
    assert records[0].tensor.diagonal().abs().min() > 1e-3


def losses_in_bf16(layout):
    program = make_program(*layout, "bf16")
    optimizer = make_optimizer(program.records(), MUON, NO_RULES, torch.bfloat16)
    losses = []
    for number in range(4):
        losses.append(program.run([batch(4 * number + program.mesh.batch_rank)], torch.tensor(8.0 * layout[0])).item())
        optimizer.step(gradient_norm(program.records(), program.mesh.pp_group))
    return losses


def test_bf16_iterates_and_sends_in_bf16_and_gives_about_the_same(ranks):
    sharded, replicated = (ranks.run(2, losses_in_bf16, LAYOUTS[layout]) for layout in ("zero3-2", "ddp2"))
    assert sharded[0] == sharded[1] and replicated[0] == replicated[1]
    assert max(abs(a - b) for a, b in zip(sharded[0], replicated[0], strict=True)) <= 3e-3


def good_bad_good(layout):
    program = make_program(*layout, "fp64")
    optimizer = make_optimizer(program.records(), MUON, NO_RULES, torch.float64)
    states = []
    for number in range(3):
        steps(program, optimizer, [number], spoil=1)
        assert all(one.tensor.grad is None or not one.tensor.grad.any() for one in program.records())
        states.append(state_of(program, optimizer))
    changed = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    moved = [name for name, value in states[1].items() if not torch.equal(value, states[2][name])]
    return changed, len(moved) == len(states[0])


@pytest.mark.parametrize("layout", ["one", "ddp2", "zero3-2", HSDP])
def test_a_non_finite_norm_touches_nothing_on_any_rank(ranks, layout):
    for changed, moved in ranks.run(LAYOUTS[layout][0], good_bad_good, LAYOUTS[layout]):
        assert changed == [] and moved


def calls_of_a_step(layout):
    program = make_program(*layout)
    optimizer = make_optimizer(program.records(), MUON)
    for _ in range(2):
        program.run([batch()], torch.tensor(8.0 * layout[0]))
        norm = gradient_norm(program.records(), program.mesh.pp_group)
        with Operators() as mode:
            optimizer.set_learning_rate(1e-3)
            optimizer.step(norm)
    return mode.calls["_local_scalar_dense"], mode.collectives()


@pytest.mark.parametrize(
    ("layout", "sent"),
    [
        *(("one", {}), ("ddp2", {}), ("zero3-2", 22), ("zero3-4", 12)),
        pytest.param("hsdp2x2", 22, marks=pytest.mark.long),
    ],
)
def test_it_reads_nothing_on_the_host_and_sends_two_all_to_alls_per_round(ranks, layout, sent):
    for reads, collectives in ranks.run(LAYOUTS[layout][0], calls_of_a_step, LAYOUTS[layout]):
        assert reads == 0
        assert collectives == (sent or {} if not sent else {"alltoall_base": sent}), "2 x ceil(21 / S)"


def calls_beside_tensor_ranks(world, **parallel):
    model = {**MODEL, "num_attention_heads": 4, "num_key_value_heads": 2}
    program = make_program(world, model=model, tp=2, **parallel)
    optimizer = make_optimizer(program.records(), MUON)
    ids = batch()["input_ids"].repeat(1, 2)[:, :8]
    program.run([{"input_ids": ids, "targets": ids}], torch.tensor(8.0 * world))
    norm = gradient_norm(program.records(), program.mesh.pp_group)
    with Operators() as mode:
        optimizer.step(norm)
    return mode.collectives()["alltoall_base"]


@pytest.mark.parametrize(
    ("world", "parallel", "sent"),
    [
        *((2, {}, 2 * 11), (4, {"shard": 2}, 4 * 6), (2, {"zero": 0}, 2 * 11)),
        pytest.param(4, {"replicate": 2}, 2 * 11, marks=pytest.mark.long),
    ],
)
def test_beside_tensor_ranks_as_many_matrices_are_dealt_as_ranks_share_them(ranks, world, parallel, sent):
    assert set(ranks.run(world, partial(calls_beside_tensor_ranks, world, **parallel))) == {sent}, "of 21 matrices"


def continued(layout):
    """Six steps at once, and three with the state carried into another program for three more."""
    whole, first, second = (make_program(*layout) for _ in range(3))
    optimizers = [make_optimizer(program.records(), MUON) for program in (whole, first, second)]
    steps(whole, optimizers[0], range(6))
    steps(first, optimizers[1], range(3))
    with torch.no_grad():
        for one, other in zip(second.records(), first.records(), strict=True):
            one.tensor.copy_(other.tensor)
        for name, value in optimizers[2].state_tensors().items():
            value.copy_(optimizers[1].state_tensors()[name])
    steps(second, optimizers[2], range(3, 6))
    return [torch.equal(full(one.tensor), full(other.tensor)) for one, other in zip(whole.records(), second.records())]


@pytest.mark.parametrize("layout", ["one", "zero3-2"])
def test_state_put_back_continues_bit_for_bit(ranks, layout):
    for equal in ranks.run(LAYOUTS[layout][0], continued, LAYOUTS[layout]):
        assert all(equal)
