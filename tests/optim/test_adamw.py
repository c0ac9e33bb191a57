"""AdamW over records: who decays, what a bad step leaves, what a checkpoint gets, and torch's for-loop as the oracle."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parallel.tiny import Operators, batch, each, full, make_program
from windlass.optim.adamw import AdamW
from windlass.optim.clip import gradient_norm
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.parallel.records import Record
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of

GPT2 = {
    "family": "gpt2",
    "vocab_size": 150,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 16,
    "n_inner": 40,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
LAYOUTS = {"one": (1, 3, 1, 1), "ddp2": (2, 0, 2, 1), "zero3-2": (2, 3, 1, 2), "hsdp2x2": (4, 3, 2, 2)}
EVERY = ["one", "ddp2", "zero3-2", pytest.param("hsdp2x2", marks=pytest.mark.long)]
KERNELS = ["fused", "foreach"]


def record(name, tensor, logical_shape=None, counted=True):
    return Record(name, torch.nn.Parameter(tensor), torch.Size(logical_shape or tensor.shape), counted)


# ---- decay


def shrunk_by_decay(kernel, layout):
    """{name: w after / w before} of an update whose gradients are all zero: decay is all that moves a weight."""
    program = make_program(*layout, "fp64", model=GPT2)
    optimizer = AdamW(program.records(), OptimConfig(learning_rate=0.5, weight_decay=0.1, kernel=kernel))
    before = {}
    for one in program.records():
        with torch.no_grad():
            one.tensor.add_(1.0)  # biases begin at zero
        before[one.name] = full(one.tensor)
        one.tensor.grad = torch.zeros_like(one.tensor)
    optimizer.step(torch.tensor(0.0))
    ratios = {}
    for one in program.records():
        ratio = full(one.tensor) / before[one.name]
        assert ratio.max() - ratio.min() <= 1e-12, one.name
        ratios[one.name] = ratio.mean().item()
    return ratios


@pytest.mark.parametrize("layout", EVERY)
def test_matrices_decay_and_norms_and_biases_do_not(ranks, layout):
    calls = [partial(shrunk_by_decay, kernel, LAYOUTS[layout]) for kernel in KERNELS]
    for ratios in sum(ranks.run(LAYOUTS[layout][0], each, *calls), []):
        decayed = {name for name, ratio in ratios.items() if ratio == pytest.approx(0.95)}
        kept = {name for name, ratio in ratios.items() if ratio == 1.0}
        assert decayed | kept == set(ratios)
        assert kept == {name for name in ratios if name.endswith("bias") or "norm" in name}
        assert "model.embed_tokens.weight" in decayed and len(decayed) == 2 + 2 * 6, sorted(decayed)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_flat_shard_of_a_matrix_decays_by_its_logical_shape(kernel):
    records = [record("matrix", torch.ones(6), (3, 4)), record("bias", torch.ones(6))]
    optimizer = AdamW(records, OptimConfig(learning_rate=0.5, weight_decay=0.1, kernel=kernel))
    for one in records:
        one.tensor.grad = torch.zeros(6)
    optimizer.step(torch.tensor(0.0))
    assert records[0].tensor.tolist() == pytest.approx([0.95] * 6) and records[1].tensor.tolist() == [1.0] * 6


# ---- steps that are skipped


def state_of(program, optimizer):
    tensors = {one.name: full(one.tensor) for one in program.records()}
    return tensors | {name: full(value) for name, value in optimizer.state_tensors().items()}


def good_bad_good(layout, kernel, bad):
    """(what a bad step changed, step counters at the end, whether the good step after it changed weights)."""
    program = make_program(*layout, "fp64")
    optimizer = AdamW(program.records(), OptimConfig(learning_rate=1e-2, kernel=kernel))
    states = []
    for spoil in (False, True, False):
        program.run([batch(program.mesh.batch_rank)], torch.tensor(8.0 * layout[0]))
        if spoil:  # one element of one gradient, as the sum over ranks would leave it on all that hold it
            gradient = program.records()[3].tensor.grad
            local = gradient.to_local() if layout[0] > 1 and layout[1] else gradient
            if program.mesh.coordinate["shard"] == 0:
                local.view(-1)[0] = bad
        optimizer.step(gradient_norm(program.records(), program.mesh.pp_group))
        assert all(one.tensor.grad is None or not one.tensor.grad.any() for one in program.records())
        states.append(state_of(program, optimizer))
    good, after_bad, last = states
    changed = [name for name in good if not torch.equal(good[name], after_bad[name])]
    counters = {int(value) for name, value in last.items() if name.endswith(".step")}
    return changed, counters, not torch.equal(last["model.norm.weight"], good["model.norm.weight"])


@pytest.mark.parametrize("layout", EVERY)
def test_a_non_finite_norm_touches_nothing_on_any_rank(ranks, layout):
    bad = float("nan"), float("inf")
    calls = [partial(good_bad_good, LAYOUTS[layout], kernel, number) for kernel in KERNELS for number in bad]
    for changed, counters, moved in sum(ranks.run(LAYOUTS[layout][0], each, *calls), []):
        assert changed == [], "weights, moments and counters of the bad step"
        assert counters == {2} and moved, "the steps around it count"


MOE = {
    "family": "qwen3_moe",
    "vocab_size": 150,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}
PRODUCTS = {
    "tp2": (2, "q_proj", {"tp": 2}),
    "pp2": (2, "q_proj", {"pp": 2, "zero": 1}),
    "expert2": (2, "experts", {"expert": 2, "shard": 2}),
    "pp2 x shard2 x tp2": (8, "q_proj", {"pp": 2, "shard": 2, "tp": 2, "zero": 1}),
    "context2 x tp2 x expert2": (4, "experts", {"context": 2, "tp": 2, "expert": 2}),
}


def parts_of(program, optimizer):
    """This rank's own parts, no collective."""
    tensors = [one.tensor for one in program.records()] + list(optimizer.state_tensors().values())
    return [(one.to_local() if hasattr(one, "to_local") else one).detach().clone() for one in tensors]


def bad_on_one_rank(world, spoiled, parallel):
    """(whether a bad step left this rank alone, whether the good one after it moved it, ranks that had the bad element)."""
    program = make_program(world, policy="fp64", model=MOE, **parallel)
    optimizer = AdamW(program.records(), OptimConfig(learning_rate=1e-2))
    states, is_bad = [], not any(program.mesh.coordinate.values())
    for spoil in (False, True, False):
        program.run([batch(0), batch(1)], torch.tensor(32.0))
        if spoil and is_bad:  # one element of a tensor that is cut, or is on one stage alone
            gradient = next(one.tensor.grad for one in program.records() if spoiled in one.name)
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = float("inf")
        optimizer.step(gradient_norm(program.records(), program.mesh.pp_group))
        states.append(parts_of(program, optimizer))
    same = all(map(torch.equal, states[0], states[1]))
    return same, not all(map(torch.equal, states[1], states[2])), is_bad


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=pytest.mark.long) if PRODUCTS[one][0] > 2 else one for one in PRODUCTS]
)
def test_a_step_that_is_bad_on_one_rank_is_skipped_on_all(ranks, layout):
    seen = ranks.run(PRODUCTS[layout][0], bad_on_one_rank, *PRODUCTS[layout])
    assert [(same, moved) for same, moved, _ in seen] == [(True, True)] * PRODUCTS[layout][0]
    assert sum(is_bad for _, _, is_bad in seen) == 1


def reads_of_a_step(layout, kernel):
    program = make_program(*layout)
    optimizer = AdamW(program.records(), OptimConfig(kernel=kernel))
    reads = []
    for _ in range(2):
        program.run([batch()], torch.tensor(8.0 * layout[0]))
        with Operators() as mode:
            optimizer.set_learning_rate(1e-3)
            optimizer.step(gradient_norm(program.records(), program.mesh.pp_group))
        reads.append(mode.calls["_local_scalar_dense"])
    return reads


@pytest.mark.parametrize("layout", ["one", "zero3-2"])
def test_a_step_reads_nothing_on_the_host(ranks, layout):
    calls = [partial(reads_of_a_step, LAYOUTS[layout], kernel) for kernel in KERNELS]
    world = LAYOUTS[layout][0]
    assert ranks.run(world, each, *calls) == [[[0, 0]] * len(calls)] * world


def reads_of_a_whole_step(layout, settings):
    """Forward, backward, clip, update and the next loss scale, in a policy."""
    program = make_program(*layout, settings["policy"], precision={k: v for k, v in settings.items() if k != "policy"})
    chosen = precision_of(PrecisionConfig(**settings))
    storage = Storage(chosen.states, chosen.is_stochastic, watch_every=1)
    optimizer = AdamW(program.records(), OptimConfig(), storage=storage)
    reads = []
    for _ in range(2):
        with Operators() as mode:
            program.run([batch()], torch.tensor(8.0 * layout[0]))
            norm = gradient_norm(program.records(), program.mesh.pp_group)
            optimizer.step(norm)
            program.adapt(norm)
        reads.append(mode.calls["_local_scalar_dense"])
    return reads


@pytest.mark.parametrize("layout", ["ddp2", "zero3-2"])
def test_a_whole_step_reads_nothing_in_any_policy(ranks, layout):
    policies = {"policy": "fp16"}, {"policy": "bf16-pure"}, {"policy": "bf16", "states": "bf16"}
    found = ranks.run(2, each, *(partial(reads_of_a_whole_step, LAYOUTS[layout], settings) for settings in policies))
    assert found == [[[0, 0]] * 3] * 2, "a count of lost updates is no read either"


def reads_of_an_honest_question():
    with Operators() as mode:
        bool(torch.isfinite(torch.tensor(1.0)))
    return mode.calls["_local_scalar_dense"]


def test_the_counter_sees_the_read_of_a_norm(ranks):
    assert ranks.run(1, reads_of_an_honest_question) == [1]


# ---- against torch's for-loop


@pytest.mark.parametrize("kernel", KERNELS)
def test_both_kernels_are_torchs_for_loop(kernel):
    torch.manual_seed(3)
    shapes = [(5, 7), (7,), (3, 2, 2), (1,)]
    starts = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    config = OptimConfig(learning_rate=1.0, beta1=0.8, beta2=0.97, epsilon=1e-6, weight_decay=0.3, kernel=kernel)
    records = [record(str(index), start.clone()) for index, start in enumerate(starts)]
    ours = AdamW(records, config)
    plain = [torch.nn.Parameter(start.clone()) for start in starts]
    groups = [
        {"params": [p for p in plain if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in plain if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.97), eps=1e-6, foreach=False, fused=False)
    for rate in (1e-2, 3e-2, 1e-3, 5e-3):
        for one, parameter in zip(records, plain, strict=True):
            one.tensor.grad = torch.randn_like(parameter)
            parameter.grad = one.tensor.grad.clone()
        ours.set_learning_rate(rate)
        for group in theirs.param_groups:
            group["lr"] = rate
        ours.step(torch.tensor(0.5))
        theirs.step()
        for one, parameter in zip(records, plain, strict=True):
            assert (one.tensor - parameter).abs().max() <= 1e-12
    state = ours.state_tensors()
    for index, parameter in enumerate(plain):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert (state[f"{index}.{key}"] - theirs.state[parameter][key]).abs().max() <= 1e-12


@pytest.mark.parametrize(("kernel", "dtype", "bound"), [
    ("fused", torch.float32, 1e-6), ("fused", torch.float64, 1e-12), ("foreach", torch.float32, 1e-6),
    ("foreach", torch.float64, 1e-12),
])  # fmt: skip
def test_an_update_clips_as_torchs_own_clip_before_it(kernel, dtype, bound):
    """Three steps are clipped, by other divisors, and one is not, so that the moments see what the divisor is."""
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(shape, dtype=dtype, generator=generator) for shape in [(5, 7), (7,), (3, 2, 2)]]
    config = OptimConfig(learning_rate=1e-2, max_norm=0.7, weight_decay=0.0, kernel=kernel)
    records = [record(str(index), start.clone()) for index, start in enumerate(starts)]
    ours, plain = AdamW(records, config), [torch.nn.Parameter(start.clone()) for start in starts]
    theirs = torch.optim.AdamW(plain, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, foreach=False)
    norms = []
    for size in (2.0, 0.02, 0.5, 0.12):
        for one, parameter in zip(records, plain, strict=True):
            one.tensor.grad = torch.randn(parameter.shape, dtype=dtype, generator=generator) * size
            parameter.grad = one.tensor.grad.clone()
        norms.append(torch.nn.utils.clip_grad_norm_(plain, 0.7))
        ours.step(norms[-1])
        theirs.step()
    assert [norm > 0.7 for norm in norms] == [True, False, True, True]
    for one, parameter in zip(records, plain, strict=True):
        assert (one.tensor - parameter).abs().max() <= bound
        for key in ("exp_avg", "exp_avg_sq"):
            expected = theirs.state[parameter][key]
            assert ((ours.state_tensors()[f"{one.name}.{key}"] - expected) / expected).abs().max() <= 100 * bound


def passes_over_gradients(policy):
    """Operators of a clipped update that take a gradient, by name."""
    program = make_program(1, policy=policy, zero=0)
    optimizer = AdamW(program.records(), OptimConfig(max_norm=1e-3))
    program.run([batch()], torch.tensor(8.0))
    gradients = {one.tensor.grad.data_ptr() for one in program.records()}
    norm = gradient_norm(program.records(), program.mesh.pp_group)
    with Taking(gradients) as mode:
        optimizer.step(norm)
    return mode.names


class Taking(TorchDispatchMode):
    """Names of operators that take one of `tensors`, in order; views and what is made of them are not followed."""

    def __init__(self, tensors):
        super().__init__()
        self._tensors, self.names = tensors, []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        taken = {one.data_ptr() for one in tree_leaves((arguments, keywords)) if isinstance(one, torch.Tensor)}
        if taken & self._tensors and not function.is_view and function is not torch.ops.aten.detach.default:
            self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(keywords or {}))


def test_a_clipped_update_takes_each_gradient_once(ranks):
    (names,) = ranks.run(1, passes_over_gradients, "fp32")
    assert set(names) == {"_fused_adamw_"} and len(names) == 2, "matrices, and what does not decay"


# ---- state


@pytest.mark.parametrize("kernel", KERNELS)
def test_state_is_named_after_the_parameters_and_there_from_the_start(kernel):
    records = [
        record("a.weight", torch.ones(2, 3)),
        record("b", torch.ones(4)),
        record("copy", torch.ones(2), None, False),
    ]
    optimizer = AdamW(records, OptimConfig(kernel=kernel))
    state = optimizer.state_tensors()
    assert set(state) == {f"{name}.{key}" for name in ("a.weight", "b") for key in ("exp_avg", "exp_avg_sq", "step")}
    assert all(not value.any() for value in state.values())
    assert state["a.weight.exp_avg"].shape == (2, 3) and state["b.step"].dtype == torch.float32
    for one in records:
        one.tensor.grad = torch.ones_like(one.tensor)
    optimizer.step(torch.tensor(0.5))
    after = optimizer.state_tensors()
    assert all(after[name] is state[name] for name in state), "the tensors that were handed out are the ones in use"
    assert (after["b.step"].item(), after["b.exp_avg"][0].item()) == (1.0, pytest.approx(0.1))


@pytest.mark.parametrize("kernel", KERNELS)
def test_state_put_back_continues_bit_for_bit(kernel):
    def train(optimizer, records, steps):
        for step in steps:
            for one in records:
                one.tensor.grad = torch.full_like(one.tensor, 0.1 + step) * torch.arange(1.0, 7.0).view(
                    one.tensor.shape
                )
            optimizer.step(torch.tensor(0.5))
        return records

    def fresh():
        records = [record("a", torch.ones(2, 3)), record("b", torch.ones(6))]
        return records, AdamW(records, OptimConfig(learning_rate=1e-2, kernel=kernel))

    whole, optimizer = fresh()
    train(optimizer, whole, range(6))
    first, optimizer = fresh()
    train(optimizer, first, range(3))
    second, resumed = fresh()
    with torch.no_grad():
        for one, other in zip(second, first, strict=True):
            one.tensor.copy_(other.tensor)
        for name, value in resumed.state_tensors().items():
            value.copy_(optimizer.state_tensors()[name])
    train(resumed, second, range(3, 6))
    assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(whole, second, strict=True))


def sharded_state():
    program = make_program(2, 3, 1, 2)
    optimizer = AdamW(program.records(), OptimConfig())
    tensors = {one.name: one.tensor for one in program.records()}
    state = optimizer.state_tensors()
    return all(
        state[f"{name}.{key}"].placements == tensor.placements and state[f"{name}.{key}"].shape == tensor.shape
        for name, tensor in tensors.items()
        for key in ("exp_avg", "exp_avg_sq")
    )


def test_state_is_cut_as_its_parameter_is(ranks):
    assert ranks.run(2, sharded_state) == [True, True]


def test_the_learning_rate_reaches_every_group():
    optimizer = AdamW([record("a", torch.ones(2, 3)), record("b", torch.ones(6))], OptimConfig())
    optimizer.set_learning_rate(0.25)
    assert [group["lr"] for group in optimizer.torch_optimizer.param_groups] == [0.25, 0.25]
