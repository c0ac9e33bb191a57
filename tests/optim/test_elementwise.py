"""The update of any dtype: right against fp64, moments that do not stall, the same in every layout, losses that are counted."""

import shutil

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.parallel.tiny import full, make_program
from windlass.optim import elementwise
from windlass.optim.adamw import AdamW
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.optim.rounding import Numbering
from windlass.parallel.records import Record

BF16 = torch.bfloat16
STOCHASTIC = Storage(BF16, stochastic=True, seed=7)


def record(name, tensor):
    return Record(name, torch.nn.Parameter(tensor), torch.Size(tensor.shape))


def bytes_of(storage, weights):
    """(bytes of weights and states per parameter, dtypes of the states) of a 100 x 100 matrix."""
    one = record("w", torch.zeros(100, 100, dtype=weights))
    state = AdamW([one], OptimConfig(), storage=storage).state_tensors()
    moments = [value for name, value in state.items() if not name.endswith(".step")]
    held = sum(tensor.numel() * tensor.element_size() for tensor in (one.tensor, *moments))
    return held / 10_000, {value.dtype for value in moments}


@pytest.mark.parametrize(
    ("storage", "weights", "num_bytes", "states"),
    [
        (Storage(), torch.float64, 24, torch.float64),
        (Storage(), torch.float32, 12, torch.float32),
        (STOCHASTIC, torch.float32, 8, BF16),
        (STOCHASTIC, BF16, 6, BF16),
        (Storage(), BF16, 6, BF16),
    ],
)
def test_bytes_per_parameter(storage, weights, num_bytes, states):
    assert bytes_of(storage, weights) == (num_bytes, {states})


def second_moment(storage, beta2, weights=torch.float32):
    """Its mean after 1,500 steps of gradients of std 1 and 1,500 of std 0.1, over what fp64 has."""
    one = record("w", torch.zeros(2000, dtype=weights))
    optimizer = AdamW([one], OptimConfig(learning_rate=1e-6, beta2=beta2), storage=storage)
    generator, exact = torch.Generator().manual_seed(1), torch.zeros(2000, dtype=torch.float64)
    for step in range(3000):
        one.tensor.grad = (torch.randn(2000, generator=generator) * (1.0 if step < 1500 else 0.1)).to(weights)
        exact = beta2 * exact + (1 - beta2) * one.tensor.grad.double() ** 2
        optimizer.step(torch.tensor(0.5))
    return (optimizer.state_tensors()["w.exp_avg_sq"].double().mean() / exact.mean()).item()


def test_a_bf16_second_moment_follows_with_stochastic_rounding_and_stands_still_without():
    assert second_moment(STOCHASTIC, 0.999) == pytest.approx(1, abs=0.02)
    assert second_moment(Storage(BF16), 0.999) > 3, "nothing ever falls"
    assert second_moment(Storage(BF16), 0.95) == pytest.approx(1, abs=0.02), "5 % a step is more than bf16's step"


def drift(storage, rate=1e-5, steps=400):
    """How far weights of 1.0 moved on the mean under a constant gradient, over what they should have."""
    one = record("w", torch.ones(4000, dtype=BF16))
    optimizer = AdamW([one], OptimConfig(learning_rate=rate, weight_decay=0.0), storage=storage)
    for _ in range(steps):
        one.tensor.grad = torch.ones_like(one.tensor)
        optimizer.step(torch.tensor(0.5))
    return ((1 - one.tensor.double().mean()) / (rate * steps)).item()


def test_small_updates_of_bf16_weights_add_up_with_stochastic_rounding_and_are_lost_without():
    assert drift(Storage()) == 0.0
    assert drift(STOCHASTIC) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("stochastic", "unchanged"), [(False, 0.85), (True, 0.34)])
def test_weights_that_ten_steps_at_1e_5_leave_as_they_were(stochastic, unchanged):
    """As in the field: 84 % of the weights unchanged at lr 1e-5 in pure bf16."""
    generator = torch.Generator().manual_seed(0)
    one = record("w", (torch.randn(1000, 50, generator=generator) * 0.02).to(BF16))
    before = one.tensor.detach().clone()
    optimizer = AdamW([one], OptimConfig(learning_rate=1e-5), storage=Storage(BF16, stochastic, 1, watch_every=10))
    for _ in range(10):
        one.tensor.grad = (torch.randn(before.shape, generator=generator) * 0.01 + 0.01).to(BF16)
        optimizer.step(torch.tensor(0.5))
    assert (one.tensor == before).double().mean() == pytest.approx(unchanged, abs=0.02)
    if not stochastic:
        assert optimizer.lost_shares()["w"] == pytest.approx(0.89, abs=0.02), "what the alarm sees"


def stepped(layout, storage, kernel="fused"):
    """Weights and moments after three steps whose gradients are a function of the element alone."""
    program = make_program(*layout, "fp64" if storage.states is None else "fp32")
    optimizer = AdamW(program.records(), OptimConfig(learning_rate=1e-3, kernel=kernel), storage=storage)
    for step in range(3):
        for one in program.records():
            generator = torch.Generator().manual_seed(step)
            gradient = torch.randn(one.logical_shape, generator=generator)
            if layout[1] and layout[0] > 1:
                placements = one.tensor.placements
                gradient = distribute_tensor(gradient, one.tensor.device_mesh, placements)
            one.tensor.grad = gradient.to(one.tensor.dtype)
        optimizer.step(torch.tensor(0.5))
    found = {one.name: full(one.tensor) for one in program.records()}
    return found | {name: full(value) for name, value in optimizer.state_tensors().items()}


@pytest.mark.parametrize("layout", [(2, 0, 2, 1), (2, 3, 1, 2), pytest.param((4, 3, 2, 2), marks=pytest.mark.long)])
def test_every_layout_rounds_every_element_alike(ranks, layout):
    (whole,) = ranks.run(1, stepped, (1, 3, 1, 1), STOCHASTIC)
    for found in ranks.run(layout[0], stepped, layout, STOCHASTIC):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], whole[name]) for name in whole)


def lost(storage, rate, weights=BF16, layout=None):
    ones = [record("a", torch.full((30, 10), 1.0, dtype=weights)), record("b", torch.full((10,), 1e-4, dtype=weights))]
    config = OptimConfig(learning_rate=rate, weight_decay=0.0)
    storage = Storage(storage.states, storage.stochastic, storage.seed, watch_every=2)
    optimizer = AdamW(ones, config, storage=storage)
    seen = []
    for bad in (False, False, False, True, False, False):
        for one in ones:
            one.tensor.grad = torch.ones_like(one.tensor)
            one.tensor.grad[:3] = 0.0
        optimizer.step(torch.tensor(float("nan") if bad else 0.5))
        seen.append(optimizer.lost_shares())
    return seen


def test_updates_that_round_to_nothing_are_counted_every_other_step_and_not_in_skipped_ones():
    share = {"a": 0.9, "b": 0.0}  # three of thirty rows have no gradient: no update that could be lost
    assert lost(Storage(), 1e-5) == [{}, share, {}, {"a": 0.0, "b": 0.0}, {}, share]
    assert lost(Storage(), 1e-1)[1] == {"a": 0.0, "b": 0.0}, "a large rate moves every weight"
    assert lost(Storage(), 1e-5, torch.float32) == [{}] * 6, "fp32 weights run torch's own kernel: nothing is counted"


def lost_in_shards(layout):
    """Shares of bf16 weights of 1.0 under updates of 1e-5, which are all lost; every third element has no gradient at all."""
    program = make_program(*layout, "bf16-pure")
    storage = Storage(BF16, watch_every=1)
    optimizer = AdamW(program.records(), OptimConfig(learning_rate=1e-5, weight_decay=0.0), storage=storage)
    for one in program.records():
        with torch.no_grad():
            one.tensor.fill_(1.0)
        size = one.logical_shape.numel()
        gradient = (torch.arange(size) % 3 > 0).to(BF16).view(one.logical_shape)
        if isinstance(one.tensor, DTensor):
            gradient = distribute_tensor(gradient, one.tensor.device_mesh, one.tensor.placements)
        one.tensor.grad = gradient
    optimizer.step(torch.tensor(0.5))
    return optimizer.lost_shares()


@pytest.mark.parametrize("layout", [(2, 3, 1, 2), (2, 0, 2, 1), pytest.param((4, 3, 2, 2), marks=pytest.mark.long)])
def test_shares_are_of_the_whole_tensor_on_every_rank_and_replicas_count_once(ranks, layout):
    (whole,) = ranks.run(1, lost_in_shards, (1, 3, 1, 1))
    assert len(whole) > 10 and all(0.6 < share < 0.7 for share in whole.values())
    assert ranks.run(layout[0], lost_in_shards, layout) == [whole] * layout[0]


def test_every_tensor_has_its_own_noise_and_the_same_name_the_same():
    def rounded(*names):
        ones = [record(name, torch.ones(1000, dtype=BF16)) for name in names]
        optimizer = AdamW(ones, OptimConfig(learning_rate=1e-3, weight_decay=0.0), storage=STOCHASTIC)
        for one in ones:
            one.tensor.grad = torch.full_like(one.tensor, 0.3)
        optimizer.step(torch.tensor(0.5))
        state = optimizer.state_tensors()
        return {one.name: (one.tensor.detach(), state[f"{one.name}.exp_avg"]) for one in ones}

    both, alone = rounded("a", "b"), rounded("b")
    for first, second, again in zip(both["a"], both["b"], alone["b"]):
        assert 0.2 < (first != second).double().mean() < 0.8, "equal values and gradients, other noise"
        assert torch.equal(second, again), "the name decides, not the place in the list"


@pytest.mark.long  # 54 s with nothing in the compiler's cache
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # inductor's own import
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile builds C++ for CPU")
def test_compiled_it_is_bit_equal():
    states = []
    for compiled in (False, True):
        ones = [record("a", torch.linspace(-2, 2, 600).view(30, 20).to(BF16)), record("b", torch.ones(50, dtype=BF16))]
        storage = Storage(BF16, True, 3, compiled)
        optimizer = AdamW(ones, OptimConfig(learning_rate=1e-3), storage=storage)
        for step in range(3):
            for one in ones:
                generator = torch.Generator().manual_seed(step)
                one.tensor.grad = torch.randn(one.tensor.shape, generator=generator).to(BF16)
            optimizer.step(torch.tensor(0.5 + step))  # the first does not clip
        states.append({one.name: one.tensor.detach() for one in ones} | optimizer.state_tensors())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_each_part_has_the_noise_of_its_own_place_where_the_update_is_one_kernel(monkeypatch):
    """Parts that begin elsewhere in their tensors: what is compiled gets the same numbers as what runs piece by piece."""
    monkeypatch.setattr(elementwise, "numbering_of", lambda one: Numbering(7 * one.numel(), 1, 1))
    monkeypatch.setattr(
        elementwise, "_compiled", lambda: elementwise._update_numbered
    )  # not compiled: only what it is given
    ends = []
    for compiled in (False, True):
        ones = [record(name, torch.ones(size, dtype=BF16)) for name, size in (("a", 40), ("b", 24), ("c", 40))]
        optimizer = AdamW(ones, OptimConfig(learning_rate=1e-3), storage=Storage(BF16, True, 3, compiled))
        for _ in range(3):
            for one in ones:
                one.tensor.grad = torch.full_like(one.tensor, 0.1)
            optimizer.step(torch.tensor(0.5))
        ends.append([one.tensor.detach() for one in ones])
    assert all(torch.equal(*both) for both in zip(*ends))


@pytest.mark.parametrize("absent", [0, 1])
def test_a_parameter_without_a_gradient_is_left_out_and_its_group_goes_on(absent):
    """Its counter too: one that joins later begins at its own first step."""
    ones = [record(name, torch.ones(8)) for name in "ab"]
    optimizer = AdamW(ones, OptimConfig(learning_rate=1e-2, kernel="foreach"))
    for _ in range(2):
        ones[1 - absent].tensor.grad = torch.ones(8)
        optimizer.step(torch.tensor(0.5))
    assert torch.equal(ones[absent].tensor, torch.ones(8)) and (ones[1 - absent].tensor < 1).all()
    state = optimizer.torch_optimizer.state
    assert state[ones[1 - absent].tensor]["step"] == 2 and not state.get(ones[absent].tensor)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # inductor's own import
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile builds C++ for CPU")
@pytest.mark.parametrize("gradients", [torch.float32, BF16])
def test_a_compiled_update_writes_the_copy_too_and_leaves_it_in_a_skipped_step(gradients):
    found, start = [], torch.linspace(-2, 2, 600).view(30, 20)
    for storage in (Storage(gradients=gradients, compiled=True), Storage(gradients=gradients)):
        weight = torch.nn.Parameter(start.clone())
        weight.grad_dtype = gradients
        copy = torch.nn.Parameter(start.to(BF16))
        one = Record("a", weight, weight.shape, copy=copy)
        optimizer = AdamW([one], OptimConfig(learning_rate=1e-2), storage=storage)
        for step in range(3):
            weight.grad = torch.randn(30, 20, generator=torch.Generator().manual_seed(step)).to(gradients)
            optimizer.step(torch.tensor(0.5 if step < 2 else float("nan")))
            assert torch.equal(copy, weight.to(BF16)), step
        found.append(weight.detach())
    assert torch.allclose(*found, rtol=1e-6, atol=1e-7) and not torch.allclose(found[0], start)
