"""The MLP, activations by Hugging Face's names, and norms: RMSNorm (arXiv 1910.07467), LayerNorm, and two variants of the first.

    RMSNorm      x / sqrt(mean(x^2) + eps) * w
    OffsetNorm   the same with 1 + w: weights near 0 keep their digits in 16 bits, and decay pulls towards the plain norm (Gemma)
    HeadsNorm    RMSNorm over the channels of all heads of a token at once, before they are split (OLMo 2, arXiv 2501.00656)

The module's class says which it is: parallel/tensor.py cuts each in its own way.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.model.architecture import Architecture
from windlass.model.lora.linear import Linear


def activate(x: Tensor, name: str) -> Tensor:
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return functional.gelu(x, approximate="tanh")
    if name in ("silu", "swish"):
        return functional.silu(x)
    return functional.gelu(x) if name == "gelu" else functional.relu(x)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) for families without a gate."""

    def __init__(self, arch: Architecture):
        super().__init__()
        hidden, inner, bias = arch.hidden_size, arch.intermediate_size, arch.mlp_bias
        self.activation = arch.activation
        self.gate_proj = Linear(hidden, inner, bias=bias) if arch.gated_mlp else None
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, hidden_BTD: Tensor, *drawn: Tensor | None) -> Tensor:  # keys_B and positions_T of Linear
        up_BTF = self.up_proj(hidden_BTD, *drawn)
        if self.gate_proj is None:
            return self.down_proj(activate(up_BTF, self.activation), *drawn)
        return self.down_proj(activate(self.gate_proj(hidden_BTD, *drawn), self.activation) * up_BTF, *drawn)


class OffsetNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return offset_norm(x, self.weight, self.eps)


class HeadsNorm(nn.RMSNorm):
    """Of [B, T, H K]; the maths is RMSNorm's."""


def offset_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """RMSNorm times 1 + weight, in at least fp32 and rounded once: 1 + weight in bf16 would lose the weight."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.rms_norm(x.to(wide), weight.shape, 1 + weight.to(wide), eps).to(x.dtype)


def make_norm(size: int, arch: Architecture) -> nn.Module:
    """The family's norm over `size` channels."""
    if arch.layer_norm:
        return nn.LayerNorm(size, arch.norm_eps, bias=arch.norm_bias)
    return (OffsetNorm if arch.norm_adds_one else nn.RMSNorm)(size, arch.norm_eps)


def make_head_norm(num_heads: int, arch: Architecture) -> nn.Module | None:
    """The norm of queries or keys, where the family has one."""
    if not arch.qk_norm:
        return None
    return HeadsNorm(num_heads * arch.head_dim, arch.norm_eps) if arch.qk_norm_whole else make_norm(arch.head_dim, arch)
