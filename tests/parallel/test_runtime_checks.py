"""`parallel.check`: each fault, planted on one rank, is one named error on every rank; a sound run is not disturbed."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.tiny import MODEL, Operators, batch, make_program
from windlass.errors import OutOfSync, UserError
from windlass.optim.config import OptimConfig
from windlass.optim.optimizer import make_optimizer
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.check_layout import check_layout
from windlass.parallel.runtime_checks import Checked, hash_of

FOUR = {**MODEL, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS = {
    "ddp2": (2, {"zero": 0, "replicate": 2}),
    "zero3 x 2": (2, {"shard": 2}),
    "hsdp": (4, {"shard": 2, "replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2 x replicate2": (4, {"tp": 2, "replicate": 2}),
    "pp2": (2, {"pp": 2, "zero": 1}),
    "zbv x shard2": (4, {"pp": 2, "zero": 1, "shard": 2, "schedule": "zbv"}),
}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def checked(world, parallel, every):
    program = make_program(world, model=FOUR, **parallel)
    optimizer = make_optimizer(program.records(), OptimConfig())
    return Checked(program, optimizer.state_tensors, every), optimizer


def steps(world, parallel, fault, rank, at_step, every=1):
    """Three steps on one of `world` ranks; before step `at_step`, `fault` befalls `rank`. -> what was raised, or the losses."""
    program, optimizer = checked(world, parallel, every)
    optimizer.set_learning_rate(1e-3)
    losses = []
    for step in (1, 2, 3):
        batches = [batch(7 * step + program.mesh.batch_rank), batch(90 + step)]
        if step == at_step and torch.distributed.get_rank() == rank:
            if fault == "batch":
                batches[1]["input_ids"] = batches[1]["input_ids"].clone()
                batches[1]["input_ids"][0, 3] += 1
            elif fault == "gradient":
                record = program.records()[2]
                record.tensor.grad = torch.zeros_like(record.tensor)
                local(record.tensor.grad).view(-1)[5] = 1e-30
            elif fault != "nothing":
                held = {record.name: record.tensor for record in program.records()} | optimizer.state_tensors()
                with torch.no_grad():
                    words = local(next(held[name] for name in held if name.endswith(fault))).view(-1).view(torch.int32)
                    words[-1] ^= 1
        try:
            losses.append(program.run(batches, torch.tensor(32.0)).item())
            optimizer.step(torch.tensor(1.0))
        except OutOfSync as error:
            return str(error)
    return losses


def all_say(ranks, layout, fault, rank, at_step, **more):
    world, parallel = LAYOUTS[layout]
    said = ranks.run(world, steps, world, parallel, fault, rank, at_step, *more.values())
    assert all(one == said[0] for one in said), said
    return said[0]


QUICK = ("hsdp", "tp2 x replicate2", "zbv x shard2")


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_a_sound_run_passes(ranks, layout):
    losses = all_say(ranks, layout, "nothing", 9, 9)
    assert isinstance(losses, list) and len(losses) == 3


@pytest.mark.parametrize(
    ("layout", "pair"), [("tp2", (0, 1)), ("pp2", (0, 1)), ("tp2 x replicate2", (0, 1)), ("zbv x shard2", (1, 3))]
)
def test_ranks_of_one_group_with_different_batches_are_named(ranks, layout, pair):
    said = all_say(ranks, layout, "batch", 1, 2)
    assert (
        "were given different batches at step 2 since this start" in said and f"ranks {pair[0]} and {pair[1]}" in said
    )


@pytest.mark.parametrize("layout", ["ddp2", "hsdp"])
def test_ranks_of_other_places_have_other_batches(ranks, layout):
    assert len(all_say(ranks, layout, "batch", 1, 2)) == 3


@pytest.mark.parametrize("layout", ["ddp2", "zero3 x 2", "tp2", "pp2"])
def test_a_gradient_that_was_left_is_named_with_its_rank_and_step(ranks, layout):
    said = all_say(ranks, layout, "gradient", 1, 3)
    name = said.partition(" on rank 1 has a gradient before step 3 since this start")[0]
    assert name.startswith("model.layers.") and name.endswith(".weight")


@pytest.mark.parametrize(
    ("layout", "name", "rank", "pair"),
    [
        ("ddp2", "model.norm.weight", 1, (0, 1)),
        ("hsdp", "model.layers.2.mlp.up_proj.weight", 3, (1, 3)),
        ("tp2", "model.layers.1.input_layernorm.weight", 1, (0, 1)),
        ("tp2 x replicate2", "model.layers.3.self_attn.q_proj.weight", 2, (0, 2)),
        ("ddp2", "model.layers.0.mlp.up_proj.weight.exp_avg_sq", 1, (0, 1)),
        ("hsdp", "model.norm.weight.step", 2, (0, 2)),
        ("tp2", "model.layers.2.self_attn.q_norm.weight.exp_avg", 0, (0, 1)),
        ("tp2 x replicate2", "model.layers.3.self_attn.k_proj.weight.exp_avg", 3, (1, 3)),
    ],
)
def test_one_bit_that_several_ranks_hold_is_named(ranks, layout, name, rank, pair):
    said = all_say(ranks, layout, name, rank, 2)
    assert said.startswith(f"{name} differs between ranks {pair[0]} and {pair[1]} at step 2 since this start")


@pytest.mark.parametrize("layout", ["zero3 x 2", "pp2"])
@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight.exp_avg"])
def test_what_one_rank_holds_alone_is_its_own_affair(ranks, layout, name):
    assert len(all_say(ranks, layout, name, 0, 2)) == 3


def test_what_is_held_is_compared_at_the_first_step_and_every_so_many(ranks):
    assert "at step 3 since" in all_say(ranks, "ddp2", "model.norm.weight", 1, 3, every=2)
    assert "at step 1 since" in all_say(ranks, "ddp2", "model.norm.weight", 0, 1, every=100)
    assert "at step 2 since" in all_say(ranks, "ddp2", "model.norm.weight", 0, 2, every=100), "after the first update"
    assert len(all_say(ranks, "ddp2", "model.norm.weight", 0, 3, every=100)) == 3


def sent(world, parallel, every):
    program, _ = checked(world, parallel, every)
    plain = make_program(world, model=FOUR, **parallel)
    counts = []
    for one in (program, plain):
        for _ in range(2):
            one.run([batch()], torch.tensor(16.0))
            for record in one.records():
                record.tensor.grad = None
        with Operators() as mode:
            one.run([batch()], torch.tensor(16.0))
        counts.append(mode.collectives())
    return {name: counts[0][name] - counts[1].get(name, 0) for name in counts[0]}


@pytest.mark.parametrize(("every", "gathers"), [(100, 1), (1, 2)])
def test_a_step_sends_one_message_more(ranks, every, gathers):
    for more in ranks.run(2, sent, 2, {"zero": 0, "replicate": 2}, every):
        assert {name: count for name, count in more.items() if count} == {"allgather": gathers}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool])
def test_any_flipped_bit_and_any_two_swapped_words_change_the_hash(dtype):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(5, 7, generator=generator).to(dtype)
    seen = {int(hash_of(tensor))}
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    for place in range(35):
        changed = tensor.clone()
        changed.view(-1).view(words)[place] ^= 1
        seen.add(int(hash_of(changed)))
    assert len(seen) == 36
    assert hash_of(tensor) == hash_of(tensor.t().contiguous().t()) and hash_of(tensor[:0]) == 0
    first, second = torch.tensor([1, 2]).to(words), torch.tensor([2, 1]).to(words)
    assert hash_of(first) != hash_of(second)


def test_the_hash_of_pieces_is_that_of_the_whole(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = hash_of(tensor)
    monkeypatch.setattr("windlass.parallel.runtime_checks.PIECE", 7)
    assert hash_of(tensor) == whole


def test_how_often_without_checking_is_refused():
    with pytest.raises(UserError) as caught:
        check_layout(ParallelConfig(check_every=10))
    assert caught.value.given == "parallel.check_every=10 with parallel.check=false"
    assert "parallel.check=true" in caught.value.change
    check_layout(ParallelConfig(check=True, check_every=10))
