"""Products in fp8: torchao's against the formula, which matrices they are, what stays as in bf16, and who is refused."""

import builtins
import logging

import pytest
import torch
from torch.nn import functional

from tests.parallel.tiny import MODEL, batch, make_program
from windlass.errors import UserError
from windlass.hardware import Accelerator
from windlass.model.architecture import parameter_shapes
from windlass.model.config import ModelConfig
from windlass.model.lora.linear import Linear
from windlass.precision.config import is_fit
from windlass.precision.fp8 import Product, apply_fp8, check_devices, describe_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = {**MODEL, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
WIDE["tie_word_embeddings"] = False


def cast(numbers, dtype, dim=None):
    """Rounded to eight bits: one scale for all, or per slice along `dim`, then a power of two. In fp64."""
    wide = numbers.double()
    largest = wide.abs().max() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.clamp(min=1e-12)
    scale = scale if dim is None else 2 ** scale.log2().floor()
    return (numbers.float() * scale.float()).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(
        dtype
    ).double() / scale


def factors(outlier=1.0):
    """x [tokens, in], W [out, in] and dy [tokens, out] in bf16; one element of x is `outlier`."""
    made = torch.Generator().manual_seed(5)
    x, w, dy = (torch.randn(shape, generator=made).bfloat16() for shape in ((24, 64), (48, 64), (24, 48)))
    x[3, 7] = outlier
    return x.requires_grad_(), w.requires_grad_(), dy


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_the_three_products_are_the_formulas(scaling):
    x, w, dy = factors()
    y = Product(scaling, emulate=True)(x, w, None)
    found = (y, *torch.autograd.grad(y, (x, w), dy))
    if scaling == "tensorwise":
        x8, w8, dy8 = cast(x, E4M3), cast(w, E4M3), cast(dy, E5M2)
        wanted = (x8 @ w8.T, dy8 @ w8, dy8.T @ x8)
    else:  # each factor has a scale for every slice along which it is summed
        wanted = (
            cast(x, E4M3, 1) @ cast(w, E4M3, 1).T,
            cast(dy, E4M3, 1) @ cast(w, E4M3, 0),
            cast(dy, E4M3, 0).T @ cast(x, E4M3, 0),
        )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).abs().max() <= 2**-7 * theirs.abs().max()
    exact = functional.linear(x, w)
    assert (y - exact).abs().max() > 2**-7 * exact.abs().max(), "eight bits are fewer"


def test_beside_an_outlier_rows_keep_their_digits():
    x, w, _ = factors(outlier=1e6)
    exact, others = functional.linear(x, w).double(), [row for row in range(24) if row != 3]
    off = {
        scaling: (Product(scaling, True)(x, w, None).double() - exact)[others].abs().max()
        for scaling in ("tensorwise", "rowwise")
    }
    assert 5 * off["rowwise"] < exact[others].abs().max() / 2 < off["tensorwise"]


def test_with_a_bias():
    x, w, _ = factors()
    product, bias = Product("tensorwise", True), torch.full((48,), 3.0, dtype=torch.bfloat16)
    assert torch.equal(product(x, w, bias), product(x, w, None) + bias)


def multiplied_in_fp8(policy, model):
    """On a rank: names of the modules that multiply in fp8, records, loss and a gradient."""
    program = make_program(1, policy=policy, model=model)
    names = [
        name for name, module in program.model.named_modules() if isinstance(getattr(module, "product", None), Product)
    ]
    loss = program.run([batch(), batch(1)], torch.tensor(16.0)).item()
    records = {record.name: (record.tensor.dtype, record.tensor.shape) for record in program.records()}
    return names, records, loss


def test_the_blocks_matrices_and_nothing_else(ranks):
    (eight,), (sixteen,) = (ranks.run(1, multiplied_in_fp8, policy, WIDE) for policy in ("fp8", "bf16"))
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert sorted(eight[0]) == sorted(f"model.layers.{layer}.{name}" for layer in range(3) for name in matrices)
    assert sixteen[0] == [] and eight[1] == sixteen[1], "the same tensors in the same dtypes, by the same names"
    assert 1e-5 < abs(eight[2] - sixteen[2]) < 1e-2


def test_a_matrix_with_other_sides_stays_in_bf16(ranks):
    ((names, _, _),) = ranks.run(1, multiplied_in_fp8, "fp8", {**WIDE, "intermediate_size": 40})
    assert names and not [name for name in names if "mlp" in name]
    assert [is_fit(*sides) for sides in ((16, 32), (24, 32), (32, 24))] == [True, False, False]


def test_a_run_says_how_many_matrices_are_in_fp8():
    experts = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    of = {
        name: parameter_shapes(ModelConfig.model_validate({**WIDE, **changes}).architecture())
        for name, changes in (("wide", {}), ("odd", {"intermediate_size": 40}), ("experts", experts))
    }
    assert (
        describe_fp8(of["wide"], "rowwise")
        == "rowwise, 21 of the 21 matrices of the blocks; MFU is a share of bf16's peak"
    )
    assert describe_fp8(of["odd"], "tensorwise").startswith("tensorwise, 12 of the 21 matrices")
    assert describe_fp8(of["experts"], "tensorwise").startswith("tensorwise, 12 of the 12 matrices")


def test_tokens_that_are_no_multiple_of_16_are_padded_for_the_gradient_of_the_matrix():
    """A GPU's product asks for it, and meta checks it: emulation on a CPU does not."""
    product = Product("tensorwise", emulate=False)
    for tokens in (16, 24, 1000):
        x, w = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for shape in ((tokens, 64), (48, 64))
        )
        y = product(x, w, None)
        found = torch.autograd.grad(y, (x, w), torch.empty_like(y))
        assert [tuple(one.shape) for one in found] == [(tokens, 64), (48, 64)]
    x, w, dy = factors()
    x, dy = x[:19].detach().requires_grad_(), dy[:19]
    (ours,) = torch.autograd.grad(Product("tensorwise", True)(x, w, None), (w,), dy)
    wanted = cast(dy, E5M2).T @ cast(x, E4M3)
    assert (ours.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_no_scaling_no_change():
    linear = Linear(16, 16, bias=False)
    apply_fp8([linear], None, torch.device("cpu"))
    assert linear.product is functional.linear


H100, L4, A100 = (
    Accelerator("NVIDIA H100 80GB HBM3", (9, 0)), Accelerator("NVIDIA L4", (8, 9)),
    Accelerator("NVIDIA A100-SXM4-80GB", (8, 0)),
)  # fmt: skip


def test_devices_without_fp8_are_refused_and_a_cpu_emulates():
    assert check_devices([H100, L4]) == []
    (sentence,) = check_devices([Accelerator("CPU", None)])
    assert sentence == "precision.policy=fp8 is emulated on a CPU: the same casts and scales, slower than bf16"
    with pytest.raises(UserError) as caught:
        check_devices([H100, A100])
    assert caught.value.given == "precision.policy=fp8 on NVIDIA A100-SXM4-80GB"
    assert "8.9" in caught.value.rule and "run.accept_drift=[precision.policy]" in caught.value.change


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (lambda name: ModuleNotFoundError(f"No module named {name!r}", name=name), "torchao is not installed"),
        (
            lambda name: ImportError("undefined symbol: _ZN3c10"),
            "torchao cannot be imported: undefined symbol: _ZN3c10",
        ),
    ],
)
def test_a_missing_library_is_one_message(monkeypatch, problem, said):
    monkeypatch.setattr(logging.root.manager, "disable", 5)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torchao"):
            raise problem(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError) as caught:
        check_devices([H100])
    assert said in caught.value.given and "windlass-lm[fp8]" in caught.value.change
    assert logging.root.manager.disable == 5, "as the caller had it"
