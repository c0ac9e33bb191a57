"""Which attention kernel runs: torch chooses among several by device, dtype and shapes, and some cost twice as much as others.

`attention_kernel` calls `attend` once and watches its operators. torch's scaled_dot_product_attention has one operator per
kernel (flash, cuDNN, memory-efficient; without any of these: plain matrix products and softmax), so the operator shows the
choice; nothing is assumed. Another FlashAttention than torch's own has the same operator (attention/flash_versions.py), and
torch's registry says which is active. The call starts no profiler: torch 2.13's writes lines to stderr.

On CUDA the call has the run's own shapes. On a CPU the choice depends only on dtype, masks and head size, so one row of a
few tokens shows it, in milliseconds at any length.
"""

from typing import Any, Final

import torch
from torch.nn.attention import current_flash_attention_impl
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.model.architecture import Architecture
from windlass.model.attention.attend import attend
from windlass.model.attention.documents import find_documents
from windlass.model.attention.layout import AttentionLayout

KERNELS: Final = {
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash for CPU",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "torch_attn::_varlen_attn": "flash, variable lengths",
    "windlass::flash_by_document": "flash for CPU, document by document",
}
REPLACED: Final = ("aten::_scaled_dot_product_flash_attention", "torch_attn::_varlen_attn")
"""Operators below which another FlashAttention may be active than torch's own; none of them runs on a CPU."""
CPU_TOKENS: Final = 32


def _name(operator: str) -> str:
    """The kernel's name, with the version of the FlashAttention that replaces torch's own."""
    active = current_flash_attention_impl() if operator in REPLACED else None
    version = "" if active is None else f" {active.removeprefix('FA')}"
    return KERNELS[operator].replace("flash", f"flash{version}", 1)


class _Watch(TorchDispatchMode):
    """Records the operators that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func.name())
        return func(*args, **(kwargs or {}))


def attention_kernel(
    arch: Architecture, *, rows: int, length: int, dtype: torch.dtype, device: torch.device, documents: bool = False
) -> str:
    """The name of the kernel that attention runs in a training step of `rows` of `length` tokens in `dtype`, or two names where
    some layers have a window. `documents`: rows hold several documents."""
    windows = {arch.window if layer in arch.window_layers else None for layer in range(arch.num_layers)}
    windows = {None if window is None or window >= length else window for window in windows}
    found = {window: _run_once(arch, window, rows, length, dtype, device, documents) for window in windows}
    if len(set(found.values())) == 1:
        return found.popitem()[1]
    windowed = found[arch.window]
    return f"{found[None]}; {windowed} in layers with a window of {arch.window}"


def _run_once(
    arch: Architecture,
    window: int | None,
    rows: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    documents: bool,
) -> str:
    if device.type == "cpu":
        rows, length, window = 1, min(length, CPU_TOKENS), None if window is None else min(window, CPU_TOKENS // 2)
    shapes = ((rows, heads, length, arch.head_dim) for heads in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads))
    q_BHTK, k_BGTK, v_BGTK = (torch.zeros(s, dtype=dtype, device=device, requires_grad=True) for s in shapes)
    starts_BM = torch.tensor([[0, length // 2]] * rows, device=device)
    layout = AttentionLayout(0, window, find_documents(starts_BM, length) if documents else None, cap=arch.score_cap)
    with _Watch() as watch:
        keys_B = torch.zeros(rows, dtype=torch.int64, device=device)
        attend(q_BHTK, k_BGTK, v_BGTK, layout, arch.attn_dropout, keys_B)
    names = [_name(operator) for operator in watch.operators if operator in KERNELS]
    return names[0] if names else "none fused: matrix products and softmax"
