"""Gradients that products add up: the same ones, in fp32 without a rounding between, begun anew every step, and only where torch
multiplies. A CPU has no such product, so here it is asked for and computed in fp32."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.nn import functional

from tests.parallel.tiny import MODEL, batch, each, make_program
from windlass.errors import BadLayout
from windlass.model.lora.linear import Linear
from windlass.parallel import build
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.precision.sums import SummedProduct, add_in_place, add_product

BIASED = {**{name: size for name, size in MODEL.items() if name != "head_dim"}, "family": "qwen2"}
HALF_A_STEP = {"bf16": 2.0**-9, "fp16": 2.0**-12}  # by which rounding to 16 bits changes a number at most, of its size


def gradients(summed, steps=1, policy="bf16", **settings):
    """(loss, name -> gradient, names of parameters that hold one themselves) of the last of `steps` equal steps."""
    with mock.patch.object(build, "sums_in_products", lambda *_: summed):
        program = make_program(1, policy=policy, **settings)
    for _ in range(steps):
        for record in program.records():
            record.tensor.grad = None
        loss = program.run([batch(0), batch(1), batch(2)], torch.tensor(24.0)).item()
        program.evaluate([batch(3)])
    found = {r.name: r.tensor.grad.clone() for r in program.records() if r.tensor.grad is not None}
    return loss, found, [name for name, one in program.model.named_parameters() if one.grad is not None]


CASES = {
    "plain": {},
    "biases": {"model": BIASED},
    "fp16": {"policy": "fp16"},
    "selective": {"recompute": "selective"},
    "compiled": {"compile": True},
    "compiled, full": {"recompute": "full", "compile": True},
    "one matrix whole beside an adapter": {"adapter": {"rank": 2, "also_train": ["*o_proj*"]}},
}
QUICK = ("plain", "biases", "fp16", "compiled", "one matrix whole beside an adapter")
LONG = tuple(case for case in CASES if case not in QUICK)


@pytest.mark.parametrize("cases", [QUICK, pytest.param(LONG, marks=pytest.mark.long)], ids=["quick", "long"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
def test_products_add_up_what_is_otherwise_added_after_them(ranks, cases):
    calls = [partial(gradients, summed, **CASES[case]) for case in cases for summed in (False, True)]
    (found,) = ranks.run(1, each, *calls)
    for case, (after, inside) in zip(cases, zip(found[::2], found[1::2], strict=True), strict=True):
        assert after[0] == inside[0] and after[1].keys() == inside[1].keys(), case
        assert after[2] == inside[2] == [], "handed over, and freed"
        unit, differ = HALF_A_STEP[CASES[case].get("policy", "bf16")], set()
        for name, gradient in inside[1].items():
            assert gradient.dtype == torch.float32
            off = (gradient - after[1][name]).norm() / after[1][name].norm().clamp(
                min=1e-12
            )  # A of an adapter has none
            assert off <= unit, (case, name)
            differ |= {name} if off > unit / 50 else set()
        matrices = {name for name in inside[1] if name.endswith("_proj.weight")}
        assert differ == matrices and matrices, (case, "only these were rounded to 16 bits before the sum")


def test_every_step_begins_at_zero_in_the_same_memory(ranks):
    ((once, thrice),) = ranks.run(1, each, partial(gradients, True), partial(gradients, True, steps=3))
    assert once[0] == thrice[0] and all(torch.equal(one, thrice[1][name]) for name, one in once[1].items())
    assert ranks.run(1, memory) == [True]


def memory():
    with mock.patch.object(build, "sums_in_products", lambda *_: True):
        program = make_program(1, policy="bf16")
    places = []
    for _ in range(2):
        program.run([batch(0)], torch.tensor(8.0))
        matrices = [record.tensor for record in program.records() if record.name.endswith("_proj.weight")]
        places.append([matrix.grad.data_ptr() for matrix in matrices])
        for matrix in matrices:
            matrix.grad = None
    return places[0] == places[1]


def test_a_sum_that_is_there_is_added_to():
    """As two calls of `run` in one step do."""
    weight, x = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
    master = torch.nn.Parameter(torch.zeros(2, 3))
    product = SummedProduct(master, torch.float32)
    for total in (4.0, 8.0):
        product.begin()
        product(x.requires_grad_(), weight, None).sum().backward()
        assert torch.equal(master.grad, torch.full((2, 3), total))


def test_a_sum_keeps_what_16_bits_have_not():
    """4096 + 1: bf16 has 4096 and 4128."""
    total = torch.full((16, 16), 4096.0)
    one_NO, one_NI = torch.ones(1, 16, dtype=torch.bfloat16), torch.ones(1, 16, dtype=torch.bfloat16)
    add_product(total, one_NO, one_NI)
    assert torch.equal(total, torch.full((16, 16), 4097.0))
    narrow = torch.full((16, 16), 4096.0, dtype=torch.bfloat16)
    add_product(narrow, one_NO, one_NI)
    assert torch.equal(narrow, torch.full((16, 16), 4096.0, dtype=torch.bfloat16))


def products(policy, **settings):
    """The kinds of product of the model's linear layers, by the last part of their names."""
    with mock.patch.object(build, "sums_in_products", lambda *_: True):
        program = make_program(1, policy=policy, **settings)
    found: dict[str, set[str]] = {}
    for name, module in program.model.named_modules():
        if isinstance(module, Linear):
            kind = "torch's" if module.product is functional.linear else type(module.product).__name__
            found.setdefault(name.rpartition(".")[2], set()).add(kind)
    return found


def test_what_is_frozen_or_in_fp8_stays_with_its_own_product(ranks):
    wide = {**MODEL, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "head_dim": 16}
    calls = [partial(products, "bf16"), partial(products, "bf16", adapter={"rank": 2}), partial(products, "fp32")]
    ((all_trained, adapted, fp32, fp8),) = ranks.run(1, each, *calls, partial(products, "fp8", model=wide))
    assert set(map(frozenset, all_trained.values())) == {frozenset({"SummedProduct"})}
    assert set(map(frozenset, adapted.values())) == {frozenset({"torch's"})}
    assert set(map(frozenset, fp32.values())) == {frozenset({"torch's"})}, "without masters nothing is rounded"
    assert fp8["q_proj"] == {"Product"} and fp8["down_proj"] == {"SummedProduct"}, "40 is no multiple of 16"


@pytest.mark.parametrize(
    ("device", "gradients", "has_product", "expected"),
    [
        ("cpu", None, True, False),
        ("cuda", None, True, True),
        ("cuda", None, False, False),
        ("cuda", "bf16", False, True),
    ],
)
def test_products_add_up_where_torch_has_such_a_product(device, gradients, has_product, expected):
    precision = precision_of(PrecisionConfig(policy="bf16", gradients=gradients))
    with mock.patch.object(build, "adds_wide", lambda *_: has_product):
        assert build.sums_in_products(precision, torch.device(device)) is expected


def cut_off(compile):
    """The message about a layer whose values and inner products no backward comes to."""
    with mock.patch.object(build, "sums_in_products", lambda *_: True):
        program = make_program(1, policy="bf16", compile=compile)
    block = program.model.blocks[1]
    for linear in (block.self_attn.v_proj, block.mlp.up_proj):
        product = linear.product
        linear.product = lambda x, weight, bias, product=product: product(x, weight, bias).detach()
        linear.product.begin, linear.product.end = product.begin, product.end
    with mock.patch("windlass.parallel.program.summed", lambda linears: [one.product for one in linears]):
        try:
            program.run([batch(0)], torch.tensor(8.0))
        except BadLayout as error:
            return str(error)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
def test_a_matrix_that_no_backward_comes_to_has_no_gradient(ranks):
    for said in ranks.run(1, each, partial(cut_off, False), partial(cut_off, True))[0]:
        assert said is not None and "2 parameters" in said and "v_proj" in said


def test_a_sum_that_was_put_elsewhere_is_refused():
    master = torch.nn.Parameter(torch.zeros(2, 3))
    product = SummedProduct(master, torch.float32)
    product.begin()
    master.grad = master.grad.clone()
    with pytest.raises(AssertionError, match="to this tensor, and to no other"):
        product.begin()


def test_on_cuda_one_product_adds_to_the_sum_in_its_dtype():
    total, grad, x = mock.Mock(is_cuda=True, dtype=torch.float32), mock.Mock(), mock.Mock(dtype=torch.bfloat16)
    with mock.patch("torch.addmm") as addmm:
        add_in_place(total, grad, x)
    addmm.assert_called_once_with(total, grad.T, x, out_dtype=torch.float32, out=total)
