"""Techniques that must not change the numbers (recomputation, compile, precision), and the censuses that guard a layout."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.test_communication import MODEL, batch, make_program
from windlass.errors import BadLayout, UserError
from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.optim.adamw import AdamW
from windlass.optim.config import OptimConfig
from windlass.parallel import build as building
from windlass.parallel.build import build_program, check_compiler
from windlass.parallel.census import check_dtypes, check_gradients, check_optimizer, check_units
from windlass.parallel.config import ParallelConfig, PrecisionConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.precision import precision_of
from windlass.parallel.records import Record


def gradients(parallel, policy="fp64", world=2):
    """(loss, {name: full gradient}) of two micro-batches, on one of `world` ranks."""
    architecture = ModelConfig.model_validate(MODEL).architecture()
    mesh = make_mesh(parallel.layout(world), "cpu")
    fill = lambda named: initialise(named.items(), architecture, 3)  # noqa: E731
    precision = precision_of(PrecisionConfig(policy=policy))
    program = build_program(architecture, parallel, precision, mesh, torch.device("cpu"), fill)
    loss = program.run([batch(2 * mesh.batch_rank), batch(2 * mesh.batch_rank + 1)], torch.tensor(32.0))
    grads = {}
    for record in program.records():
        gradient = record.tensor.grad
        grads[record.name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return loss.item(), grads, {record.name: str(record.tensor.dtype) for record in program.records()}


def assert_equal(one, two, tolerance):
    assert abs(one[0] - two[0]) <= tolerance
    assert one[1].keys() == two[1].keys()
    for name, gradient in one[1].items():
        assert (gradient - two[1][name]).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("zero", [0, 3])
def test_recomputation_changes_no_gradient(ranks, recompute, zero):
    plain = ranks.run(2, gradients, ParallelConfig(zero=zero))[0]
    again = ranks.run(2, gradients, ParallelConfig(zero=zero, recompute=recompute))[0]
    assert_equal(plain, again, 0.0)


def saved_bytes(recompute):
    """Bytes that autograd keeps of one forward, parameters aside."""
    architecture = ModelConfig.model_validate(MODEL).architecture()
    parallel = ParallelConfig(recompute=recompute)
    mesh = make_mesh(parallel.layout(1), "cpu")
    fill = lambda named: initialise(named.items(), architecture, 3)  # noqa: E731
    program = build_program(
        architecture, parallel, precision_of(PrecisionConfig()), mesh, torch.device("cpu"), fill
    )
    own = {record.tensor.untyped_storage().data_ptr() for record in program.records()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = program.model(**batch())
    del loss
    return sum(kept.values())


def test_full_recomputation_keeps_least_and_none_most(ranks):
    kept = {kind: ranks.run(1, saved_bytes, kind)[0] for kind in ("none", "full")}
    assert kept["full"] < 0.5 * kept["none"], kept


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def count_operators(recompute):
    architecture = ModelConfig.model_validate(MODEL).architecture()
    parallel = ParallelConfig(recompute=recompute)
    mesh = make_mesh(parallel.layout(1), "cpu")
    fill = lambda named: initialise(named.items(), architecture, 3)  # noqa: E731
    program = build_program(architecture, parallel, precision_of(PrecisionConfig()), mesh, torch.device("cpu"), fill)
    with Operators() as mode:
        program.run([batch()], torch.tensor(8.0))
    return mode.calls


def test_selective_repeats_the_cheap_operators_and_no_matrix_product(ranks):
    none, selective, full = (ranks.run(1, count_operators, kind)[0] for kind in ("none", "selective", "full"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for product in ("mm", attention):
        assert none[product] == selective[product] < full[product], product
    assert none["silu"] < selective["silu"] == full["silu"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_give_the_same_gradients_and_names(ranks, recompute):
    plain = ranks.run(2, gradients, ParallelConfig(zero=3), "fp32")[0]
    compiled = ranks.run(2, gradients, ParallelConfig(zero=3, compile=True, recompute=recompute), "fp32", timeout_s=300)[0]
    assert_equal(plain, compiled, 2e-5)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_bf16_keeps_fp32_masters_and_stays_near(ranks, zero):
    exact = ranks.run(2, gradients, ParallelConfig(zero=zero), "fp32")[0]
    mixed = ranks.run(2, gradients, ParallelConfig(zero=zero), "bf16")[0]
    assert set(mixed[2].values()) == {"torch.float32"}
    assert 0 < abs(mixed[0] - exact[0]) <= 3e-3 * exact[0], "computed in bf16, and near"
    norms = [sum(g.double().square().sum() for g in run[1].values()).sqrt() for run in (exact, mixed)]
    assert abs(norms[1] - norms[0]) <= 3e-2 * norms[0]


def census_faults():
    """Each fault planted on a built program of two ranks -> what the census says."""
    program = make_program(2, 3, 1, 2)
    model, records, said = program.model, program.records(), {}

    def say(name, check, *args):
        try:
            check(*args)
        except BadLayout as error:
            said[name] = str(error)

    say("sound units", check_units, model, model.blocks, records)
    say("sound dtypes", check_dtypes, records, torch.float32)
    say("units", check_units, model, model.blocks[:-1], records)
    plain = Record("model.norm.weight", torch.nn.Parameter(torch.ones(3)), torch.Size([3]))
    say("whole", check_units, model, model.blocks, [*records, plain])
    say("dtypes", check_dtypes, records, torch.bfloat16)
    say("gradients", check_gradients, records)
    before = AdamW([plain], OptimConfig())
    say("optimizer", check_optimizer, before.torch_optimizer, records)
    say("sound optimizer", check_optimizer, AdamW(records, OptimConfig()).torch_optimizer, records)
    return said


def test_each_census_finds_its_fault_and_passes_the_sound(ranks):
    said = ranks.run(2, census_faults)[0]
    assert set(said) == {"units", "whole", "dtypes", "gradients", "optimizer"}
    assert "4 FSDP units over 2 blocks" in said["units"]
    assert "1 parameters are not sharded, the first is model.norm.weight" in said["whole"]
    assert "model.embed_tokens.weight is torch.float32" in said["dtypes"]
    assert "got no gradient in the first step, the first is model.embed_tokens.weight" in said["gradients"]
    assert "the optimizer holds 1 parameters that the model does not use" in said["optimizer"]


def lost_gradient():
    """A block that is skipped: its parameters get no gradient, which the first run must find."""
    program = make_program(1, 3, 1, 1)
    program.model.blocks[1].forward = lambda hidden, *rest: hidden
    try:
        program.run([batch()], torch.tensor(8.0))
    except BadLayout as error:
        return str(error)
    return "nothing was noticed"


def test_a_parameter_without_gradient_stops_the_first_step(ranks):
    assert "the first is model.layers.1.self_attn.q_proj.weight" in ranks.run(1, lost_gradient)[0]


def test_compile_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(building.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"apt install g\+\+"):
        check_compiler(ParallelConfig(compile=True), "cpu")
    check_compiler(ParallelConfig(compile=True), "cuda")
    check_compiler(ParallelConfig(), "cpu")
