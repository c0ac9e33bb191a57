"""Attention alone, forward and backward, by kernel, length and documents.

FLOPs of causal attention: 2 H K sum(L^2) forward over documents of L tokens (half of the scores), and 2.5 times that
backward, whatever a kernel computes besides. Operands are random normal numbers, as in primitives.py.

    default    what torch chooses for causal SDPA without a mask: windlass's own call
    cudnn, flash, efficient    that kernel, or absent
    masked     a dense mask, as transformers makes it under compile
    varlen     torch's varlen_attn over packed documents
    flex       flex_attention, compiled, with the causal mask inside of documents

Legend: B sequences, T positions, N = B T tokens, H query heads, G key/value heads, K channels per head, L a document's tokens.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from cells import Absent
from primitives import normal, rate
from timed import Timer, kernels_of
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
KINDS = ("default", *BACKENDS, "masked", "varlen", "flex")


@dataclass(frozen=True)
class AttentionCase:
    """`tokens` in sequences of `length`, each of `documents` equally long ones that do not see one another."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    tokens: int
    documents: int = 1

    @property
    def flops(self) -> float:
        """Forward, causal, inside of documents."""
        squares = self.tokens * (self.length // self.documents)
        return 2.0 * self.heads * self.head_dim * squares


def measure_attention(case: AttentionCase, timer: Timer) -> dict[str, Any]:
    """Forward and backward, each timed alone, and which kernels ran."""
    inputs, forward, guard = attention_call(case, timer.device)
    with guard:
        try:
            forward()
        except RuntimeError as error:
            if "No viable backend" in str(error) or "No available kernel" in str(
                error
            ):  # torch 2.13 and 2.11 say it so
                raise Absent(str(error)) from error
            raise
        found: dict[str, Any] = {"forward": rate(timer.time(forward), case.flops)}
        found["kernels"] = kernels_of(forward, timer.device)
        out = forward()
        gradient = torch.randn_like(out)

        def backward() -> object:
            return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

        found["backward"] = rate(timer.time(backward), 2.5 * case.flops)
        found["backward_kernels"] = kernels_of(backward, timer.device)
    total_s = (found["forward"]["ms"] + found["backward"]["ms"]) / 1e3
    return found | {"tflops": round(3.5 * case.flops / total_s / 1e12, 2)}


def attention_call(
    case: AttentionCase, device: torch.device
) -> tuple[list[Tensor], Callable[[], Tensor], AbstractContextManager[object]]:
    """(q, k, v), the forward call on them, and the context that chooses the kernel."""
    batch = case.tokens // case.length

    def heads(number: int) -> Tensor:
        packed = (case.tokens, number, case.head_dim)
        sizes = packed if case.kind == "varlen" else (batch, number, case.length, case.head_dim)
        return normal(*sizes, device=device).requires_grad_()

    q, k, v = heads(case.heads), heads(case.kv_heads), heads(case.kv_heads)
    repeats, grouped = case.heads // case.kv_heads, case.heads != case.kv_heads
    attention = functional.scaled_dot_product_attention
    guard: AbstractContextManager[object] = nullcontext()
    if case.kind in BACKENDS:
        guard = sdpa_kernel(BACKENDS[case.kind])
    if case.kind == "varlen":
        forward = varlen_call(case, q, k, v)
    elif case.kind == "flex":
        forward = flex_call(case, q, k, v)
    elif case.kind in ("efficient", "masked"):  # these know no grouped heads: keys are repeated, as transformers does
        mask = None
        if case.kind == "masked":
            mask = torch.ones(case.length, case.length, dtype=torch.bool, device=device).tril()[None, None]

        def forward() -> Tensor:
            keys, values = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            return attention(q, keys, values, attn_mask=mask, is_causal=mask is None)
    else:
        forward = functools.partial(attention, q, k, v, is_causal=True, enable_gqa=grouped)
    return [q, k, v], forward, guard


def varlen_call(case: AttentionCase, q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor) -> Callable[[], Any]:
    """torch's varlen_attn on packed documents. Its way to say "causal" and "grouped" differs from 2.11 to 2.13."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Absent(f"torch {torch.__version__} has no varlen_attn") from None
    known = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        causal["enable_gqa"] = case.heads != case.kv_heads
    longest = case.length // case.documents
    borders = torch.arange(0, case.tokens + 1, longest, dtype=torch.int32, device=q_NHK.device)
    return lambda: varlen_attn(q_NHK, k_NGK, v_NGK, borders, borders, longest, longest, **causal)


def flex_call(case: AttentionCase, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Callable[[], Tensor]:
    """Compiled flex_attention; the mask of blocks is made once, as a trainer makes it once per batch."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    longest = case.length // case.documents
    device = q_BHTK.device

    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // longest == query // longest)

    mask = create_block_mask(seen, None, None, case.length, case.length, device=device.type)
    run = torch.compile(flex_attention, fullgraph=True) if device.type == "cuda" else flex_attention
    return functools.partial(run, q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=case.heads != case.kv_heads)
