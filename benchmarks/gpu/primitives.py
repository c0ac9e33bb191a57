"""The operations that a training step is made of, each alone: matrix products, copies, the chunked head.

Operands are random normal numbers: a product of zeros draws less power, so its clock is higher than training's.

FLOPs: 2 M N K of a product. Rates are TFLOP/s.

Legend: M rows (tokens), N outputs, K inputs; B sequences, T positions, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cells import Absent
from timed import Timer, Timing
from torch import Tensor
from torch.nn import functional

from windlass.model.families.presets import PRESETS
from windlass.model.head.head import Head
from windlass.precision.masters import add_to, compiled_add

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its products have."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def products(self) -> dict[str, tuple[int, int]]:
        """Projection -> (outputs, inputs). qkv and gate_up are the fused forms of q, k, v and of gate, up."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.hidden),
            "k": (kv, self.hidden),
            "o": (self.hidden, q),
            "gate": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "qkv": (q + 2 * kv, self.hidden),
            "gate_up": (2 * self.inner, self.hidden),
        }


SEPARATE = {"q": 1, "k": 2, "o": 1, "gate": 2, "down": 1}  # how often a layer has each: v is as k, up as gate
FUSED = {"qkv": 1, "o": 1, "gate_up": 1, "down": 1}
TINY = Shape("tiny", 64, 128, 4, 2, 16, 512)


def shape_of(preset: str) -> Shape:
    sizes = PRESETS[preset]
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    head_dim = sizes.get("head_dim") or hidden // heads
    kv_heads, inner = sizes["num_key_value_heads"], sizes["intermediate_size"]
    return Shape(preset, hidden, inner, heads, kv_heads, head_dim, sizes["vocab_size"])


def rate(timing: Timing, flops: float) -> dict[str, Any]:
    return {
        "ms": round(timing.median_s * 1e3, 4),
        "fastest_ms": round(timing.fastest_s * 1e3, 4),
        "repeats": timing.repeats,
        "tflops": round(flops / timing.median_s / 1e12, 2),
    }


def normal(*sizes: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device=device, dtype=torch.bfloat16).to(dtype)


# ---- matrix products


def product(dtype: str, m: int, n: int, k: int, device: torch.device, precise: bool = False) -> Callable[[], Tensor]:
    """[M, K] @ [N, K]^T -> [M, N] in bf16, as a call. fp8: one scale per tensor; `precise`: fp32 accumulation all the way."""
    if dtype == "bf16":
        a_MK, b_NK = normal(m, k, device=device), normal(n, k, device=device)
        return lambda: a_MK @ b_NK.T
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise Absent("this device has no fp8 products")
    if not hasattr(torch, "_scaled_mm") or not hasattr(torch, "float8_e4m3fn"):
        raise Absent(f"torch {torch.__version__} has no _scaled_mm")
    a_MK = normal(m, k, device=device, dtype=torch.float8_e4m3fn)
    b_NK = normal(n, k, device=device, dtype=torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    fast = not precise

    def call() -> Tensor:
        return torch._scaled_mm(a_MK, b_NK.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    if device.type == "cpu":
        try:
            call()
        except RuntimeError as error:  # oneDNN's for CPUs without AVX-512
            raise Absent(f"this CPU has no fp8 products: {error}") from error
    return call


def measure_products(shape: Shape, rows: int, dtype: str, timer: Timer) -> dict[str, Any]:
    """All products of one layer, forward and the two of backward, with what a layer takes with separate and fused ones.

    forward [M, K] @ [N, K]^T;  input gradient [M, N] @ [K, N]^T;  weight gradient [N, M] @ [K, M]^T. In bf16 the operands of
    backward are as autograd finds them (transposed views); fp8 products need copies in that order, which training makes.
    """
    found: dict[str, Any] = {}
    for name, (n, k) in shape.products().items():
        flops = 2.0 * rows * n * k
        if dtype == "bf16":
            x_MK, w_NK, d_MN = (normal(*sizes, device=timer.device) for sizes in ((rows, k), (n, k), (rows, n)))
            calls: dict[str, Callable[[], Tensor]] = {
                "forward": functools.partial(functional.linear, x_MK, w_NK),
                "input_gradient": functools.partial(torch.matmul, d_MN, w_NK),
                "weight_gradient": functools.partial(torch.matmul, d_MN.T, x_MK),
            }
        else:
            calls = {
                "forward": product(dtype, rows, n, k, timer.device),
                "input_gradient": product(dtype, rows, k, n, timer.device, precise=True),
                "weight_gradient": product(dtype, n, k, rows, timer.device, precise=True),
            }
        found[name] = {kind: rate(timer.time(call), flops) for kind, call in calls.items()}
    layer = 6.0 * rows * sum(times * n * k for name, times in SEPARATE.items() for n, k in [shape.products()[name]])
    totals = {}
    for form, parts in (("separate", SEPARATE), ("fused", FUSED)):
        layer_ms = sum(times * one["ms"] for name, times in parts.items() for one in found[name].values())
        totals[form] = {"layer_ms": round(layer_ms, 4), "tflops": round(layer / layer_ms / 1e9, 2)}
    return {"products": found, **totals}


def measure_square(size: int, dtype: str, timer: Timer) -> dict[str, Any]:
    """One large square product: the highest rate that products reach here, by which the others are judged."""
    return rate(timer.time(product(dtype, size, size, size, timer.device)), 2.0 * size**3)


# ---- memory and head


def measure_copy(num_bytes: int, timer: Timer) -> dict[str, Any]:
    """Device memory to itself, and the cast that a 16-bit copy of the weights is: bytes read and written per second."""
    wide = torch.randn(num_bytes // 4, device=timer.device)
    copied, narrow = torch.empty_like(wide), torch.empty_like(wide, dtype=torch.bfloat16)
    copy_s = timer.time(lambda: copied.copy_(wide)).median_s
    cast_s = timer.time(lambda: narrow.copy_(wide)).median_s
    return {
        "copy_tb_per_s": round(2 * num_bytes / copy_s / 1e12, 3),
        "cast_tb_per_s": round(1.5 * num_bytes / cast_s / 1e12, 3),
    }


def measure_sums(rows: int, columns: int, inner: int, timer: Timer) -> dict[str, Any]:
    """A micro-batch's gradient of a weight [rows, columns] in bf16 into its sum in fp32: torch's kernel and windlass's compiled
    one, copied and added, TB/s. Then the product that makes it, over `inner` tokens, alone and (`product_added_ms`) adding to the
    sum itself, in the same kernel."""
    total, gradient = torch.zeros(rows, columns, device=timer.device), normal(rows, columns, device=timer.device)
    found: dict[str, Any] = {}
    for words, add in (("torch", add_to), ("compiled", compiled_add())):
        for kind, is_first, moved in (("copied", True, 6), ("added", False, 10)):
            call = functools.partial(add, total.view(-1), gradient.view(-1), is_first)
            found[f"{words}_{kind}_tb_per_s"] = round(moved * total.numel() / timer.time(call).median_s / 1e12, 3)
    left, right = normal(inner, rows, device=timer.device), normal(inner, columns, device=timer.device)
    found["product_ms"] = round(1e3 * timer.time(lambda: left.T @ right).median_s, 4)
    if timer.device.type == "cuda":

        def added() -> None:
            torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)

        found["product_added_ms"] = round(1e3 * timer.time(added).median_s, 4)
    return found


def measure_head(shape: Shape, tokens: int, form: str, timer: Timer) -> dict[str, Any]:
    """Head and cross-entropy, forward and backward together, and the memory at their peak beyond their inputs.

    form: "chunked", windlass's own; "chunked x4", with chunks four times as long; "dense", fp32 logits as a whole.
    """
    device = timer.device
    padded = -(-shape.vocab // 128) * 128
    head = Head(shape.hidden, shape.vocab, padded).to(device=device, dtype=torch.bfloat16)
    torch.nn.init.normal_(head.weight, std=0.02)
    head.chunk_tokens *= 4 if form == "chunked x4" else 1
    hidden = normal(1, tokens, shape.hidden, device=device).requires_grad_()
    targets = torch.randint(0, shape.vocab, (1, tokens), device=device)

    def step() -> None:
        head.weight.grad = hidden.grad = None
        loss = dense_loss(head, hidden, targets) if form == "dense" else head(hidden, targets)
        (loss / tokens).backward()

    before = reset_peak(device)
    timing = timer.time(step)
    more = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    flops = 6.0 * tokens * shape.vocab * shape.hidden
    return rate(timing, flops) | {"more_mib": round(more / 2**20) if more is not None else None}


def dense_loss(head: Head, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """The summed loss from fp32 logits of all tokens at once, as most trainers have it."""
    logits_NV = functional.linear(hidden_BTD, head.weight[: head.vocab_size]).float().flatten(0, 1)
    return functional.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=-100, reduction="sum")


def reset_peak(device: torch.device) -> int:
    """Bytes allocated now; the peak is counted from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
