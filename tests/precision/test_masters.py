"""Masters in bf16: FSDP2's numbers on one rank, bit for bit, without its copies; and none that is left behind."""

import threading
from functools import partial
from unittest import mock

import pytest
import torch

from tests.parallel.tiny import MODEL, batch, each, full, make_program
from windlass.optim.clip import gradient_norm
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.optim.groups import write_copies
from windlass.optim.optimizer import make_optimizer
from windlass.parallel import build
from windlass.parallel.fsdp import fsdp_units
from windlass.precision import masters as room
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of

BF16 = torch.bfloat16
UNTIED = {**MODEL, "tie_word_embeddings": False}
HEADED = {**MODEL, "num_attention_heads": 4, "num_key_value_heads": 2}
DEEP = {**MODEL, "num_hidden_layers": 4}
ADAPTER = {"rank": 2}
PLAIN = Storage()


def trained(through_fsdp=False, steps=3, storage=PLAIN, kind="adamw", world=1, **settings):
    """{name: weight after `steps` of two micro-batches}, losses, norms; of a rank in bf16."""
    chosen = (lambda *_: False) if through_fsdp else build.has_masters
    settings |= {"zero": 3} if through_fsdp and settings.get("zero") == 0 else {}
    with mock.patch.object(build, "has_masters", chosen):
        program = make_program(world, policy=settings.pop("policy", "bf16"), **settings)
    parts = program.parts if "pp" in settings else [program.model]
    assert all(bool(fsdp_units(part)) == through_fsdp for part in parts)
    optimizer = make_optimizer(program.records(), OptimConfig(kind=kind), compute=BF16, storage=storage)
    losses, norms = [], []
    for step in range(steps):
        optimizer.set_learning_rate(1e-2)
        losses.append(program.run([batch(2 * step), batch(2 * step + 1)], torch.tensor(16.0)).item())
        norms.append(gradient_norm(program.records(), program.mesh.pp_group).item())
        optimizer.step(torch.tensor(norms[-1]))
    weights = {}
    for record in program.records():
        weights[record.name] = full(record.tensor)
        if record.copy is not None:
            assert torch.equal(full(record.copy), full(record.tensor).to(record.copy.dtype)), record.name
    return weights, losses, norms


def pair(**settings):
    return trained(True, **dict(settings)), trained(**dict(settings))


CASES = {
    "tied": {},
    "untied": {"model": UNTIED},
    "fp16": {"policy": "fp16"},
    "selective": {"recompute": "selective"},
    "frozen embedding": {"model": UNTIED, "frozen": ("model.embed_tokens.weight",)},
    "adapter": {"adapter": ADAPTER},
    "muon": {"kind": "muon"},
    "foreach": {"storage": Storage(states=BF16, stochastic=True)},
    "zero 0": {"zero": 0},
}


def test_one_process_trains_the_bits_that_fsdp_on_one_rank_trains(ranks):
    (found,) = ranks.run(1, each, *(partial(pair, **settings) for settings in CASES.values()))
    for case, (fsdp, masters) in zip(CASES, found, strict=True):
        assert fsdp[1:] == masters[1:], case
        assert fsdp[0].keys() == masters[0].keys()
        for name, weight in fsdp[0].items():
            assert torch.equal(weight, masters[0][name]), (case, name)


STAGED = {
    "tied": {},
    "untied": {"model": UNTIED},
    "two stages a rank": {"schedule": "interleaved-1f1b", "model": DEEP},
    "fp16": {"policy": "fp16", "schedule": "gpipe"},
    "full": {"recompute": "full"},
    "frozen embedding": {"frozen": ("model.embed_tokens.weight",)},
    "adapter": {"adapter": ADAPTER},
    "muon": {"kind": "muon"},
}


def test_a_stage_trains_the_bits_that_fsdp_on_one_rank_trains(ranks):
    calls = [partial(pair, **{"world": 2, "pp": 2, "zero": 1, **settings}) for settings in STAGED.values()]
    for found in ranks.run(2, each, *calls):
        for case, (fsdp, masters) in zip(STAGED, found, strict=True):
            assert fsdp[1:] == masters[1:], case
            assert fsdp[0].keys() == masters[0].keys()
            for name, weight in fsdp[0].items():
                assert torch.equal(weight, masters[0][name]), (case, name)


TENSOR = {
    "tied": {},
    "untied": {"model": {**HEADED, "tie_word_embeddings": False}},
    "fp16": {"policy": "fp16"},
    "selective": {"recompute": "selective"},
    "zero 1": {"zero": 1},
}


def cut(**settings):
    """What FSDP2 and masters train beside tp; and of masters each gradient's placements, the parameter's, and both in whole."""
    settings = {"model": HEADED, **settings}
    both = pair(world=2, tp=2, **settings)
    program = make_program(2, tp=2, **{"policy": "bf16", **settings})
    program.run([batch(0), batch(1)], torch.tensor(16.0))
    held = {record.name: record.tensor for record in program.records()}
    placed = {name: (one.grad.placements, one.placements, full(one.grad)) for name, one in held.items()}
    alone = {name: one.grad.to_local() for name, one in held.items() if one.placements[0].is_replicate()}
    return *both, placed, alone


def one_process(**settings):
    """Every gradient of two micro-batches."""
    program = make_program(1, **{"policy": "fp32", "model": HEADED, **settings})
    program.run([batch(0), batch(1)], torch.tensor(16.0))
    return {record.name: record.tensor.grad for record in program.records()}


def test_tensor_ranks_train_what_fsdp_on_one_rank_trains_and_sum_what_each_holds_whole(ranks):
    """FSDP2 sums norms' gradients over tp in 16 bits, in each micro-batch; masters once per step, in fp32."""
    first, second = ranks.run(2, each, *(partial(cut, **settings) for settings in TENSOR.values()))
    (exact,) = ranks.run(1, one_process)
    for case, (fsdp, masters, placed, alone), other in zip(TENSOR, first, second, strict=True):
        assert masters[1] == pytest.approx(fsdp[1], rel=3e-3) and masters[2] == pytest.approx(fsdp[2], rel=3e-2), case
        assert all(gradient == parameter for gradient, parameter, _ in placed.values()), case
        assert len(alone) > 5 and all(torch.equal(one, other[3][name]) for name, one in alone.items()), case
        if case == "tied":
            for name, (_, _, gradient) in placed.items():
                assert gradient.dtype == torch.float32
                assert (gradient - exact[name]).abs().max() <= 3e-2 * exact[name].abs().max(), name


def placed_in_stages():
    """Whether every gradient of a stage that is cut over tp is placed as its parameter."""
    program = make_program(4, policy="bf16", model=HEADED, tp=2, pp=2, zero=1)
    program.run([batch(0), batch(1)], torch.tensor(16.0))
    return [record.tensor.grad.placements == record.tensor.placements for record in program.records()]


def test_tensor_ranks_of_a_stage_sum_what_each_holds_whole(ranks):
    assert all(len(found) > 10 and all(found) for found in ranks.run(4, placed_in_stages))


def kinds():
    """({dtype of parameters}, {of masters}, {of their gradients}) with gradients in fp32 and in bf16."""
    found = []
    for gradients in (None, "bf16"):
        program = make_program(1, policy="bf16", precision={"gradients": gradients})
        program.run([batch(0), batch(1)], torch.tensor(16.0))
        parameters = list(program.model.parameters())
        assert all(parameter.grad is None for parameter in parameters), "handed over, and freed"
        tensors = [record.tensor for record in program.records()]
        found.append([{one.dtype for one in some} for some in (parameters, tensors, [t.grad for t in tensors])])
    return found


def test_parameters_are_in_bf16_masters_in_fp32_and_gradients_as_chosen(ranks):
    (found,) = ranks.run(1, kinds)
    assert found == [[{BF16}, {torch.float32}, {torch.float32}], [{BF16}, {torch.float32}, {BF16}]]


def test_gradients_added_in_bf16_train_nearly_the_same(ranks):
    calls = [partial(trained, storage=Storage(gradients=BF16), precision={"gradients": "bf16"}), partial(trained)]
    ((narrow, wide),) = ranks.run(1, each, *calls)
    assert narrow[1] == pytest.approx(wide[1], rel=3e-3) and narrow[1] != wide[1]
    assert narrow[2] == pytest.approx(wide[2], rel=3e-2)


def skipped():
    program = make_program(1, policy="bf16")
    optimizer = make_optimizer(program.records(), OptimConfig(), compute=BF16)
    before = [record.copy.clone() for record in program.records()]
    program.run([batch(0)], torch.tensor(8.0))
    optimizer.step(torch.tensor(float("nan")))
    return all(torch.equal(record.copy, old) for record, old in zip(program.records(), before, strict=True))


def test_a_skipped_step_leaves_parameters_as_they_were(ranks):
    assert ranks.run(1, skipped) == [True]


def rewritten():
    """Losses of one batch before masters are halved, after, and after write_copies."""
    program, losses = make_program(1, policy="bf16"), []
    losses.append(program.evaluate([batch(0)]).item())
    for record in program.records():
        record.tensor.data.mul_(0.5)
    losses.append(program.evaluate([batch(0)]).item())
    write_copies(program.records())
    return [*losses, program.evaluate([batch(0)]).item()]


def test_what_is_written_from_outside_counts_after_write_copies(ranks):
    ((before, stale, after),) = ranks.run(1, rewritten)
    assert before == stale != after


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_compiled_sum_has_the_bits_of_torchs_own_and_runs_in_a_thread_of_backward(dtype):
    """On CUDA backward, and with it the hook that adds, runs in a thread of autograd's."""
    generator = torch.Generator().manual_seed(1)
    for sizes in ((33, 7), (65,)):
        first, second = (torch.randn(sizes, generator=generator).to(dtype) for _ in "12")
        master = torch.nn.Parameter(torch.zeros(sizes))
        parameter = torch.nn.Parameter(torch.zeros(sizes, dtype=dtype))
        for gradient in (first, second):
            parameter.grad = gradient
            hand_over = partial(room._hand_over, master, torch.float32, room.compiled_add(), None, parameter)
            thread = threading.Thread(target=hand_over)
            thread.start()
            thread.join()
            assert parameter.grad is None
        assert torch.equal(master.grad, first.float() + second.float()), sizes
        assert not torch.equal(master.grad, (first + second).float())  # that a sum in 16 bits would be seen


def test_large_tensors_of_a_compiled_model_are_added_by_a_compiled_kernel():
    added = mock.Mock()
    model = torch.nn.Module()
    model.large, model.small = (torch.nn.Parameter(torch.zeros(size, dtype=BF16)) for size in ((5, 4), (4,)))
    precision = precision_of(PrecisionConfig(policy="bf16"))
    with mock.patch.object(room, "COMPILED_FROM", 20), mock.patch.object(room, "compiled_add", lambda: added):
        found = room.apply_masters(model, precision, is_compiled=True)
    (model.large.sum() + model.small.sum()).backward()
    assert added.call_count == 1 and found["large"].grad is not None and found["small"].grad is not None
