"""Each fault, planted on one rank, is one named error on every rank; a sound run is not disturbed."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parallel.tiny import MODEL, Operators, batch, make_program
from windlass.errors import OutOfSync
from windlass.optim.config import OptimConfig
from windlass.optim.optimizer import make_optimizer
from windlass.parallel.runtime_checks import Checked, Replicas, hash_of

MUON = OptimConfig.model_validate({"kind": "muon"})
FOUR = {**MODEL, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SPARSE = {**FOUR, "family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LAYOUTS = {
    "one rank": (1, {}),
    "ddp2": (2, {"zero": 0, "replicate": 2}),
    "ddp3": (3, {"zero": 0, "replicate": 3}),
    "zero3 x 2": (2, {"shard": 2}),
    "hsdp": (4, {"shard": 2, "replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2 x replicate2": (4, {"tp": 2, "replicate": 2}),
    "pp2": (2, {"pp": 2, "zero": 1}),
    "pp2 x replicate2": (4, {"pp": 2, "zero": 0, "replicate": 2}),
    "zbv x shard2": (4, {"pp": 2, "zero": 1, "shard": 2, "schedule": "zbv"}),
}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def built(world, parallel, policy="fp32", optim=None):
    """On one rank: a program, its optimizer, and the comparison of what the ranks hold."""
    parallel = dict(parallel)
    program = make_program(world, model=parallel.pop("model", FOUR), policy=policy, **parallel)
    optimizer = make_optimizer(program.records(), optim or OptimConfig())
    return program, optimizer, Replicas(held(program, optimizer), "cpu")


def held(program, optimizer):
    """As training/start/restore names them."""
    weights = {f"model.{record.name}": record.tensor.detach() for record in program.records()}
    states = {f"optimizer.{name}": value for name, value in optimizer.state_tensors().items()}
    return weights | states | {f"program.{name}": value for name, value in program.state_tensors().items()}


def flip(tensor):
    with torch.no_grad():
        local(tensor).view(-1).view(torch.int32)[-1] ^= 1


def train(program, optimizer, steps=2):
    optimizer.set_learning_rate(1e-3)
    losses = []
    for step in range(steps):
        batches = [batch(7 * step + program.mesh.batch_rank), batch(90 + step)]
        losses.append(program.run(batches, torch.tensor(32.0)).item())
        optimizer.step(torch.tensor(0.5))
        program.adapt(torch.tensor(1.0))
    return losses


def compare(world, parallel, faults, policy="fp32", optim=None):
    """After two updates: `faults`, (rank, end of a tensor's name), befall their ranks -> what the comparison raises."""
    program, optimizer, replicas = built(world, parallel, policy, optim)
    train(program, optimizer)
    replicas.compare(held(program, optimizer), 2)
    for rank, name in faults:
        if torch.distributed.get_rank() == rank:
            tensors = held(program, optimizer)
            flip(next(tensors[full] for full in tensors if full.endswith(name)))
    try:
        replicas.compare(held(program, optimizer), 2)
    except OutOfSync as error:
        return str(error)


def all_raise(ranks, layout, faults, *more):
    world, parallel = LAYOUTS[layout]
    raised = ranks.run(world, compare, world, parallel, faults, *more)
    assert all(one == raised[0] for one in raised), raised
    return raised[0]


FLIPPED = {
    "ddp2": [
        (1, "model.norm.weight", "model.model.norm.weight differs between ranks 0 and 1"),
        (0, "0.mlp.up_proj.weight.exp_avg_sq", "0.mlp.up_proj.weight.exp_avg_sq differs between ranks 0 and 1"),
        (1, "model.norm.weight.step", "model.norm.weight.step differs between ranks 0 and 1"),
    ],
    "ddp3": [(2, "layers.1.input_layernorm.weight", "on rank 2 differs from ranks 0 and 1")],
    "hsdp": [
        (3, "2.mlp.up_proj.weight", "differs between ranks 1 and 3"),
        (2, "2.mlp.up_proj.weight.exp_avg", "differs between ranks 0 and 2"),
        (2, "model.norm.weight.step", "on rank 2 differs from ranks 0, 1 and 3"),
    ],
    "tp2": [
        (1, "layers.1.input_layernorm.weight", "differs between ranks 0 and 1"),
        (0, "layers.2.self_attn.q_norm.weight.exp_avg", "differs between ranks 0 and 1"),
    ],
    "tp2 x replicate2": [
        (2, "layers.3.self_attn.q_proj.weight", "differs between ranks 0 and 2"),
        (3, "model.norm.weight", "on rank 3 differs from ranks 0, 1 and 2"),
    ],
    "pp2 x replicate2": [
        (1, "embed_tokens.weight", "differs between ranks 0 and 1"),
        (3, "model.norm.weight.exp_avg", "differs between ranks 2 and 3"),
    ],
}


def flip_each(world, parallel, faults):
    """After two updates: what the comparison raises with one bit flipped, for each fault alone; the bit is turned back."""
    program, optimizer, replicas = built(world, parallel)
    train(program, optimizer)
    raised = []
    for rank, name, _ in faults:
        tensors = held(program, optimizer)
        at_fault = next((tensors[full] for full in tensors if full.endswith(name)), None)
        if torch.distributed.get_rank() == rank:
            flip(at_fault)
        try:
            replicas.compare(tensors, 2)
            raised.append(None)
        except OutOfSync as error:
            raised.append(str(error))
        if torch.distributed.get_rank() == rank:
            flip(at_fault)
    replicas.compare(held(program, optimizer), 2)
    return raised


@pytest.mark.parametrize("layout", FLIPPED)
def test_one_bit_that_several_ranks_hold_is_named(ranks, layout):
    world, parallel = LAYOUTS[layout]
    raised = ranks.run(world, flip_each, world, parallel, FLIPPED[layout])
    assert all(one == raised[0] for one in raised), raised
    for (_, name, expected), said in zip(FLIPPED[layout], raised[0], strict=True):
        given = said.splitlines()[0]
        assert given.endswith(" after step 2") and f"{name} " in given and expected in given, said


def test_the_loss_scale_is_compared_over_all_stages(ranks):
    raised = all_raise(ranks, "pp2", [(1, "program.scale")], "fp16")
    assert raised.startswith("program.scale differs between ranks 0 and 1 after step 2\n")


def test_a_master_weight_of_bf16_and_the_momentum_of_muon_are_compared(ranks):
    master = all_raise(ranks, "ddp2", [(0, "layers.0.mlp.down_proj.weight")], "bf16")
    assert master.startswith("model.model.layers.0.mlp.down_proj.weight differs between ranks 0 and 1 after step 2")
    momentum = all_raise(ranks, "hsdp", [(1, "layers.0.mlp.down_proj.weight.momentum")], "fp32", MUON)
    assert "down_proj.weight.momentum differs between ranks 1 and 3 after step 2" in momentum


def test_the_first_of_several_is_named_and_the_rest_counted(ranks):
    faults = [(1, "model.norm.weight"), (0, "2.mlp.up_proj.weight.exp_avg"), (1, "2.mlp.up_proj.weight.exp_avg_sq")]
    given = all_raise(ranks, "ddp2", faults).splitlines()[0]
    assert given == "model.model.norm.weight differs between ranks 0 and 1 after step 2, and 2 more tensors differ"


@pytest.mark.parametrize("layout", ["zero3 x 2", "pp2"])
@pytest.mark.parametrize("name", ["layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight.exp_avg"])
def test_what_one_rank_holds_alone_is_not_compared(ranks, layout, name):
    assert all_raise(ranks, layout, [(0, name)]) is None


ALIKE = {
    "ddp2": (2, {"zero": 0, "replicate": 2}, "bf16"),
    "zero1 x 2, accumulated": (2, {"zero": 1, "shard": 2}, "fp32"),
    "zero2 x 2": (2, {"zero": 2, "shard": 2}, "bf16"),
    "hsdp": (4, {"shard": 2, "replicate": 2}, "fp16"),
    "hsdp, offloaded": (4, {"shard": 2, "replicate": 2, "offload": True}, "fp32"),
    "tp2 x replicate2": (4, {"tp": 2, "replicate": 2, "zero": 0}, "bf16"),
    "tp2 x shard2": (4, {"tp": 2, "shard": 2}, "bf16"),
    "context2 x replicate2": (4, {"context": 2, "zero": 0, "replicate": 2}, "fp32"),
    "context2 x shard2": (4, {"context": 2, "shard": 2, "context_kind": "ulysses"}, "fp32"),
    "expert2 x replicate2": (4, {"expert": 2, "shard": 2, "replicate": 2, "model": SPARSE}, "fp32"),
    "expert2 x tp2": (4, {"expert": 2, "shard": 2, "tp": 2, "model": SPARSE}, "fp32"),
    "gpipe x replicate2": (4, {"pp": 2, "zero": 0, "replicate": 2, "schedule": "gpipe"}, "bf16"),
    "1f1b x shard2": (4, {"pp": 2, "zero": 1, "shard": 2}, "bf16"),
    "zbv x shard2": (4, {"pp": 2, "zero": 1, "shard": 2, "schedule": "zbv"}, "fp32"),
}
ROUNDED = {"hsdp": MUON, "ddp2": MUON, "tp2 x shard2": MUON}


SLOW = ("hsdp", "hsdp, offloaded", "tp2 x shard2", "expert2 x tp2", "zbv x shard2")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in ALIKE]
)
def test_no_layout_raises_by_itself(ranks, layout):
    world, parallel, policy = ALIKE[layout]
    for optim in filter(None, (OptimConfig(), ROUNDED.get(layout))):
        assert ranks.run(world, compare, world, parallel, [], policy, optim) == [None] * world


def flip_the_mirror(world, parallel, is_flipped):
    """Two steps, a flipped bit in the head's mirror of the embedding, and two more -> the losses."""
    program, optimizer, replicas = built(world, parallel)
    losses = train(program, optimizer)
    mirror = dict(program.parts[-1].named_parameters()).get("lm_head.weight")
    assert (mirror is None) == (torch.distributed.get_rank() == 0)
    if is_flipped and mirror is not None:
        flip(mirror)
    replicas.compare(held(program, optimizer), 2)
    return losses + train(program, optimizer)


def test_the_mirror_of_a_tied_embedding_is_overwritten_before_it_is_used(ranks):
    world, parallel = LAYOUTS["pp2"]
    sound, flipped = (ranks.run(world, flip_the_mirror, world, parallel, one) for one in (False, True))
    assert sound == flipped and len(sound[0]) == 4


def sent(world, parallel):
    """What one comparison sends, and how often it reads a tensor that is shared."""
    program, optimizer, replicas = built(world, parallel)
    with Operators() as mode:
        replicas.compare(held(program, optimizer), 1)
    return mode.collectives(), len(replicas._names), mode.calls["_local_scalar_dense"], len(held(program, optimizer))


@pytest.mark.parametrize(
    ("layout", "shared"),
    [("ddp2", lambda all_: all_), ("zero3 x 2", lambda all_: all_ // 4), ("one rank", lambda _: 0)],
)
def test_one_save_sends_one_message_and_reads_one_flag(ranks, layout, shared):
    """Under ZeRO-3 the counters of the parameters alone are shared: one of the four tensors of each."""
    world, parallel = LAYOUTS[layout]
    for messages, num_shared, reads, num_tensors in ranks.run(world, sent, world, parallel):
        assert num_shared == shared(num_tensors)
        assert messages == ({"allgather": 1} if num_shared else {})
        assert reads == (1 if num_shared else 0)


def checked_steps(world, parallel, fault, rank, at_step):
    """Three steps with `parallel.check`; before step `at_step`, `fault` befalls `rank` -> what was raised, or the losses."""
    program, optimizer, _ = built(world, parallel)
    program = Checked(program)
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
        try:
            losses.append(program.run(batches, torch.tensor(32.0)).item())
            optimizer.step(torch.tensor(0.5))
        except OutOfSync as error:
            return str(error)
    return losses


def all_end(ranks, layout, fault, rank, at_step):
    world, parallel = LAYOUTS[layout]
    ends = ranks.run(world, checked_steps, world, parallel, fault, rank, at_step)
    assert all(one == ends[0] for one in ends), ends
    return ends[0]


QUICK = ("hsdp", "tp2 x replicate2", "zbv x shard2")


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_a_sound_run_passes(ranks, layout):
    losses = all_end(ranks, layout, "nothing", 9, 9)
    assert isinstance(losses, list) and len(losses) == 3


@pytest.mark.parametrize(
    ("layout", "pair"), [("tp2", (0, 1)), ("pp2", (0, 1)), ("tp2 x replicate2", (0, 1)), ("zbv x shard2", (1, 3))]
)
def test_ranks_of_one_group_with_different_batches_are_named(ranks, layout, pair):
    end = all_end(ranks, layout, "batch", 1, 2)
    assert "were given different batches at step 2 since this start" in end and f"ranks {pair[0]} and {pair[1]}" in end


@pytest.mark.parametrize("layout", ["ddp2", "hsdp"])
def test_ranks_of_other_places_have_other_batches(ranks, layout):
    assert len(all_end(ranks, layout, "batch", 1, 2)) == 3


@pytest.mark.parametrize("layout", ["ddp2", "zero3 x 2", "tp2", "pp2"])
def test_a_gradient_that_was_left_is_named_with_its_rank_and_step(ranks, layout):
    end = all_end(ranks, layout, "gradient", 1, 3)
    name = end.partition(" on rank 1 has a gradient before step 3 since this start")[0]
    assert name.startswith("model.layers.") and name.endswith(".weight")


def sent_per_step(world, parallel):
    plain, _, _ = built(world, parallel)
    counts = []
    for one in (Checked(plain), plain):
        for _ in range(2):
            one.run([batch()], torch.tensor(16.0))
            for record in one.records():
                record.tensor.grad = None
        with Operators() as mode:
            one.run([batch()], torch.tensor(16.0))
        for record in one.records():
            record.tensor.grad = None
        counts.append(mode.collectives())
    return {name: counts[0][name] - counts[1].get(name, 0) for name in counts[0]}


def test_a_checked_step_sends_one_message_more(ranks):
    for more in ranks.run(2, sent_per_step, 2, {"zero": 0, "replicate": 2}):
        assert {name: count for name, count in more.items() if count} == {"allgather": 1}


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


@pytest.mark.parametrize("bit", [0, 22, 30, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_flips_of_opposite_sign_do_not_cancel(dtype, bit):
    """Distances that are powers of two are those where a multiple of 2^64 is nearest."""
    words = torch.zeros(1 << 17, dtype=torch.int32)
    words[0] = 1 << bit if bit < 31 else -(1 << 31)
    seen = {int(hash_of(words.view(dtype)))}
    for power in range(17):
        moved = torch.zeros_like(words)
        moved[1 << power] = words[0]
        seen.add(int(hash_of(moved.view(dtype))))
    assert len(seen) == 18
