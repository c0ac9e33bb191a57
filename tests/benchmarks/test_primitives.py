"""Products, attention and head alone: their shapes, FLOPs, and that each kind computes the same attention."""

import pytest
import torch
from attention import AttentionCase, attention_call, measure_attention, varlen_call
from cells import Absent
from primitives import (
    FUSED,
    SEPARATE,
    TINY,
    dense_loss,
    measure_copy,
    measure_head,
    measure_products,
    product,
    shape_of,
)
from timed import Timer
from torch.nn import functional

from windlass.model.config import ModelConfig
from windlass.model.flops import count_multiplied
from windlass.model.head.head import Head

CPU = torch.device("cpu")


@pytest.fixture
def timer():
    return Timer(CPU, seconds=0.0)


@pytest.mark.parametrize("preset", ["qwen2.5-1.5b", "smollm3-3b", "qwen3-4b", "llama-3.1-8b"])
@pytest.mark.parametrize("form", [SEPARATE, FUSED])
def test_the_products_of_all_layers_and_the_head_are_the_weights_that_multiply(preset, form):
    arch, shape = ModelConfig(preset=preset).architecture(), shape_of(preset)
    layer = sum(times * n * k for name, times in form.items() for n, k in [shape.products()[name]])
    assert layer * arch.num_layers + shape.hidden * shape.vocab == count_multiplied(arch)


@pytest.fixture
def dtype(request, has_fp8):
    if request.param == "fp8" and not has_fp8:
        pytest.skip("this CPU has no fp8 products")
    return request.param


def test_a_cpu_without_fp8_products_is_reported(monkeypatch):
    def refuse(*_args, **_settings):
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(Absent, match="this CPU has no fp8 products: could not create a primitive"):
        product("fp8", 16, 16, 16, CPU)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"], indirect=True)
def test_every_product_is_timed_forward_and_twice_backward(timer, dtype):
    found = measure_products(TINY, 64, dtype, timer)
    assert found["products"].keys() == TINY.products().keys()
    for one in found["products"].values():
        assert one.keys() == {"forward", "input_gradient", "weight_gradient"}
        assert all(part["ms"] > 0 for part in one.values())
    parts = found["products"]
    fused_ms = sum(part["ms"] for name in FUSED for part in parts[name].values())
    separate_ms = sum(times * part["ms"] for name, times in SEPARATE.items() for part in parts[name].values())
    assert found["fused"]["layer_ms"] == pytest.approx(fused_ms, abs=1e-3)
    assert found["separate"]["layer_ms"] == pytest.approx(separate_ms, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"], indirect=True)
def test_a_product_has_the_shape_it_says(dtype):
    out = product(dtype, 32, 48, 64, CPU)()
    assert out.shape == (32, 48) and out.dtype == torch.bfloat16


def case(kind, documents=1, length=64):
    return AttentionCase(kind, heads=4, kv_heads=2, head_dim=16, length=length, tokens=128, documents=documents)


def reference(q, k, v, documents=1):
    length = q.shape[2]
    at = torch.arange(length)
    seen = (at[:, None] >= at) & (at[:, None] * documents // length == at * documents // length)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return functional.scaled_dot_product_attention(q, keys, values, attn_mask=seen)


@pytest.mark.parametrize(("kind", "documents"), [("default", 1), ("flash", 1), ("masked", 1), ("flex", 1), ("flex", 4)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_kind_computes_causal_attention(kind, documents):
    (q, k, v), forward, guard = attention_call(case(kind, documents), CPU)
    for tensor in (q, k, v):
        tensor.requires_grad_(False)  # flex has no backward on a CPU
    with guard:
        assert (forward().float() - reference(q, k, v, documents).float()).abs().max() < 3e-2


def test_packed_documents_are_given_with_their_borders(monkeypatch):
    given = {}

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
        given.update(
            borders=cu_seq_q.tolist(), longest=max_q, window=window_size, grouped=enable_gqa, shape=query.shape
        )
        return query

    import torch.nn.attention.varlen

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    (q, k, v), forward, _ = attention_call(case("varlen", documents=2), CPU)
    forward()
    assert given == {
        "borders": [0, 32, 64, 96, 128],
        "longest": 32,
        "window": (-1, 0),
        "grouped": True,
        "shape": torch.Size([128, 4, 16]),
    }

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
        given.update(causal=is_causal)
        return query

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", older)
    varlen_call(case("varlen"), q, k, v)()
    assert given["causal"] is True


def test_flops_count_the_causal_half_inside_of_documents():
    assert case("default").flops == 2 * 4 * 16 * 128 * 64
    assert case("varlen", documents=4).flops == case("default").flops / 4


def test_attention_is_timed_both_ways_and_names_what_ran(timer):
    found = measure_attention(case("default"), timer)
    assert found["forward"]["ms"] > 0 and found["backward"]["ms"] > 0
    # which is the longest is not ours to say: a busy machine may pause in any operator
    assert any("flash_attention_for_cpu" in one["kernel"] for one in found["kernels"])
    assert any("flash_attention_for_cpu_backward" in one["kernel"] for one in found["backward_kernels"])
    with pytest.raises(Absent, match=r"[Nn]o (viable backend|available kernel)"):
        measure_attention(case("cudnn"), timer)


def test_the_dense_head_is_the_chunked_one(timer):
    head, hidden = Head(16, 50, 128), torch.randn(2, 6, 16)
    targets = torch.randint(0, 50, (2, 6))
    targets[0, :3] = -100
    dense, chunked = dense_loss(head, hidden, targets), head(hidden, targets)
    assert dense.item() == pytest.approx(chunked.item(), rel=1e-5)
    for form in ("chunked", "chunked x4", "dense"):
        assert measure_head(TINY, 64, form, timer).keys() == {"ms", "fastest_ms", "repeats", "tflops", "more_mib"}


def test_a_copy_reads_and_writes(timer):
    assert measure_copy(1 << 16, timer).keys() == {"copy_tb_per_s", "cast_tb_per_s"}
