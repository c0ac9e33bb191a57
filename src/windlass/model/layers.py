"""What a block is made of: attention, the MLP, activations by Hugging Face's names, and norms. Beside LayerNorm these:

    RMSNorm      x / sqrt(mean(x^2) + eps) * w (arXiv 1910.07467)
    OffsetNorm   the same with 1 + w: weights near 0 keep their digits in 16 bits, and decay pulls towards the plain norm (Gemma)
    HeadsNorm    RMSNorm over the channels of all heads of a token at once, before they are split (OLMo 2, arXiv 2501.00656)

The module's class says which it is: parallel/tensor.py cuts each in its own way.

Legend: B sequences, T positions, D hidden size, H query heads, G key/value heads, K channels per head, F MLP width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.model.architecture import Architecture
from windlass.model.attention.attend import attend
from windlass.model.attention.layout import AttentionLayout
from windlass.model.cache import LayerCache
from windlass.model.lora.linear import Linear
from windlass.model.rope import Rope, rotate


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
    """The norm of queries or keys [B, T, H K] over all heads; the maths is RMSNorm's."""


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


class Attention(nn.Module):
    """Causal attention with grouped key/value heads."""

    def __init__(self, arch: Architecture):
        super().__init__()
        size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.head_dim, self.dropout = arch.head_dim, arch.attn_dropout
        self.q_proj = Linear(arch.hidden_size, size, bias=arch.qkv_bias)
        self.k_proj = Linear(arch.hidden_size, kv_size, bias=arch.qkv_bias)
        self.v_proj = Linear(arch.hidden_size, kv_size, bias=arch.qkv_bias)
        self.o_proj = Linear(size, arch.hidden_size, bias=arch.out_bias)
        self.q_norm, self.k_norm = make_head_norm(arch.num_heads, arch), make_head_norm(arch.num_kv_heads, arch)
        self.norms_whole, self.interleaved = arch.qk_norm_whole, arch.rope_interleaved
        # kernels divide scores by sqrt(K); queries bring what another scale needs
        self.query_scale = 1.0 if arch.score_scale is None else arch.score_scale * math.sqrt(arch.head_dim)

    def forward(
        self, hidden_BTD: Tensor, rope: Rope, layout: AttentionLayout, cache: LayerCache | None, keys_B: Tensor | None
    ) -> Tensor:
        drawn = keys_B, layout.row_T  # of the masks before the factors
        q_BTX, k_BTX = self.q_proj(hidden_BTD, *drawn), self.k_proj(hidden_BTD, *drawn)
        if self.q_norm is not None and self.k_norm is not None and self.norms_whole:
            q_BTX, k_BTX = self.q_norm(q_BTX), self.k_norm(k_BTX)
        q_BTHK, k_BTGK = q_BTX.unflatten(-1, (-1, self.head_dim)), k_BTX.unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.v_proj(hidden_BTD, *drawn).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None and not self.norms_whole:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BHTK, k_BGTK, v_BGTK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        if rope is not None:
            q_BHTK, k_BGTK = rotate(q_BHTK, rope, self.interleaved), rotate(k_BGTK, rope, self.interleaved)
        if self.query_scale != 1.0:
            q_BHTK = q_BHTK * self.query_scale
        if cache is not None:
            k_BGTK, v_BGTK = cache.append(k_BGTK, v_BGTK, layout.query_offset)
        out_BHTK = attend(q_BHTK, k_BGTK, v_BGTK, layout, self.dropout, keys_B)
        return self.o_proj(out_BHTK.transpose(1, 2).flatten(-2), *drawn)
