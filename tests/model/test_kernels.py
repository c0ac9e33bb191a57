"""The kernel that is reported is the one that ran: seen from the operators, and taken away."""

import contextlib
import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from tests.model.attention.flash_on_cpu import Kernel, flash_on_cpu
from tests.model.tiny import hf_model, our_model
from windlass.model.kernels import CPU_TOKENS, attention_kernel

CPU = torch.device("cpu")


def arch_of(family, **changes):
    return our_model(hf_model(family, True, **changes)).arch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_kernel_of_a_cpu(dtype):
    shape = {"rows": 2, "length": 17, "dtype": dtype, "device": CPU}
    assert attention_kernel(arch_of("llama"), **shape) == "flash for CPU"
    assert attention_kernel(arch_of("llama"), **shape, documents=True) == "flash for CPU, document by document"


def test_a_kernel_that_was_taken_away_is_not_reported():
    with sdpa_kernel(SDPBackend.MATH):
        name = attention_kernel(arch_of("gpt2"), rows=2, length=17, dtype=torch.float32, device=CPU)
    assert name == "none fused: matrix products and softmax"


def test_attention_with_dropout_has_no_fused_kernel():
    arch = dataclasses.replace(arch_of("gpt2"), attn_dropout=0.1)
    name = attention_kernel(arch, rows=2, length=17, dtype=torch.float32, device=CPU)
    assert name == "none fused: matrix products and softmax"


def test_layers_with_a_window_are_named_where_their_kernel_is_another(monkeypatch):
    smollm3 = arch_of("smollm3", use_sliding_window=True, sliding_window=4)
    mixed = dataclasses.replace(smollm3, window_layers=(0,))
    shape = {"rows": 2, "length": 17, "dtype": torch.float32, "device": CPU}
    assert attention_kernel(mixed, **shape) == "flash for CPU"
    with monkeypatch.context() as patch:
        patch.setattr("windlass.model.kernels.attend", lambda q, k, v, layout, *_: q if layout.window else q @ q.mT)
        patch.setattr("windlass.model.kernels.KERNELS", {"aten::bmm": "products"})
        logged = attention_kernel(mixed, **shape)
    assert logged == "products; none fused: matrix products and softmax in layers with a window of 4"


@pytest.mark.parametrize(
    ("operator", "named"),
    [
        (
            "varlen",
            {None: "flash, variable lengths", "FA3": "flash 3, variable lengths", "FA4": "flash 4, variable lengths"},
        ),
        ("sdpa", {None: "flash", "FA3": "flash 3", "FA4": "flash 4"}),
        ("sdpa of a CPU", {None: "flash for CPU", "FA3": "flash for CPU"}),
    ],
)
def test_the_version_that_is_reported_is_the_one_that_is_active(monkeypatch, operator, named):
    """Wished or installed, it is not reported; nor on a CPU, where none of them runs."""

    def call(q, k, v, *_):
        bounds_N = torch.tensor([0, 17], dtype=torch.int32)
        with contextlib.suppress(NotImplementedError):  # seen before it is found to be a GPU's
            if operator == "varlen":
                varlen_attn(*(x[0].transpose(0, 1) for x in (q, k, v)), bounds_N, bounds_N, 17, 17, enable_gqa=True)
            elif operator == "sdpa":
                torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
            else:
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)

    monkeypatch.setattr("windlass.model.kernels.attend", call)
    with flash_on_cpu(FA3=Kernel(), FA4=Kernel()):
        for active, name in named.items():
            if active is not None:
                activate_flash_attention_impl(active)
            assert attention_kernel(arch_of("llama"), rows=2, length=17, dtype=torch.bfloat16, device=CPU) == name


def test_asking_costs_little_at_any_length(monkeypatch):
    arch = dataclasses.replace(arch_of("qwen3"), num_heads=32, num_kv_heads=8, head_dim=128)
    shapes = []
    monkeypatch.setattr("windlass.model.kernels.attend", lambda q, *_: shapes.append(tuple(q.shape)))
    attention_kernel(arch, rows=8, length=1 << 17, dtype=torch.float32, device=CPU)
    assert shapes == [(1, 32, CPU_TOKENS, 128)]  # the whole would take hours
