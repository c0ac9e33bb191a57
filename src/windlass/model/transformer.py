"""The decoder: embedding, blocks, norm, head, with Hugging Face's parameter names for every family.

    h = E[ids] (+ P[positions]);   h += attention(norm(h));   h += mlp(norm(h));   logits = W norm(h)

Families differ by the Architecture alone: RMSNorm or LayerNorm, rotary, learned or (per layer) no positions, a sliding
window per layer, norms on query and key heads, gated or plain MLP, biases, a tied head. Sources: arXiv 1706.03762
(attention), 1910.07467 (RMSNorm), 2002.05202 (gated MLP), 2305.19466 (layers without positions).

Under compile all blocks share one graph, but for layers without rotation (`no_rope_layers`) and layers with a window
beside layers without one: each such kind is a second graph.

A part of the model (a pipeline stage) keeps only its blocks, keyed by their global index, so that names are the same in
every layout. Nothing here is a buffer: after `to_empty` only parameters are to be filled, and `tie()` restores the tie
that to_empty cuts.

Legend: B sequences, T positions, D hidden size, H query heads, G key/value heads, K channels per head, F MLP width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.attention import Layout, attend
from windlass.model.cache import KVCache, LayerCache
from windlass.model.loss import Head
from windlass.model.rope import rope_tables, rotate

Rope = tuple[Tensor, Tensor] | None


def activate(x_BTF: Tensor, name: str) -> Tensor:
    """Hugging Face's activation functions by their names there."""
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return functional.gelu(x_BTF, approximate="tanh")
    if name in ("silu", "swish"):
        return functional.silu(x_BTF)
    return functional.gelu(x_BTF) if name == "gelu" else functional.relu(x_BTF)


def make_norm(size: int, arch: Architecture) -> nn.Module:
    return nn.LayerNorm(size, arch.norm_eps) if arch.layer_norm else nn.RMSNorm(size, arch.norm_eps)


class Attention(nn.Module):
    """Causal attention with grouped key/value heads."""

    def __init__(self, arch: Architecture):
        super().__init__()
        size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.head_dim = arch.head_dim
        self.q_proj = nn.Linear(arch.hidden_size, size, bias=arch.qkv_bias)
        self.k_proj = nn.Linear(arch.hidden_size, kv_size, bias=arch.qkv_bias)
        self.v_proj = nn.Linear(arch.hidden_size, kv_size, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(size, arch.hidden_size, bias=arch.out_bias)
        self.q_norm = nn.RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = nn.RMSNorm(arch.head_dim, arch.norm_eps) if arch.qk_norm else None

    def forward(self, hidden_BTD: Tensor, rope: Rope, layout: Layout, cache: LayerCache | None) -> Tensor:
        q_BTHK = self.q_proj(hidden_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.k_proj(hidden_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.v_proj(hidden_BTD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHK, k_BTGK = self.q_norm(q_BTHK), self.k_norm(k_BTGK)
        q_BHTK, k_BGTK, v_BGTK = q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
        if rope is not None:
            q_BHTK, k_BGTK = rotate(q_BHTK, rope), rotate(k_BGTK, rope)
        if cache is not None:
            k_BGTK, v_BGTK = cache.append(k_BGTK, v_BGTK, layout.query_offset)
        out_BHTK = attend(q_BHTK, k_BGTK, v_BGTK, layout)
        return self.o_proj(out_BHTK.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) for families without a gate."""

    def __init__(self, arch: Architecture):
        super().__init__()
        hidden, inner, bias = arch.hidden_size, arch.intermediate_size, arch.mlp_bias
        self.activation = arch.activation
        self.gate_proj = nn.Linear(hidden, inner, bias=bias) if arch.gated_mlp else None
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        up_BTF = self.up_proj(hidden_BTD)
        if self.gate_proj is None:
            return self.down_proj(activate(up_BTF, self.activation))
        return self.down_proj(activate(self.gate_proj(hidden_BTD), self.activation) * up_BTF)


class Block(nn.Module):
    """One layer: attention and MLP, each on the normed stream and added to it. No index: one graph serves all."""

    def __init__(self, arch: Architecture):
        super().__init__()
        self.self_attn = Attention(arch)
        self.mlp = MLP(arch)
        self.input_layernorm = make_norm(arch.hidden_size, arch)
        self.post_attention_layernorm = make_norm(arch.hidden_size, arch)

    def forward(self, hidden_BTD: Tensor, rope: Rope, layout: Layout, cache: LayerCache | None = None) -> Tensor:
        hidden_BTD = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD), rope, layout, cache)
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))


class Trunk(nn.Module):
    """Holds all but the head, so that names begin as Hugging Face's do. A part of the model has only some of these."""

    embed_tokens: nn.Embedding
    embed_positions: nn.Embedding
    layers: nn.ModuleDict
    norm: nn.Module


class Decoder(nn.Module):
    """The model, or with `layers`, `first`, `last` the part of it that a pipeline stage keeps."""

    def __init__(self, arch: Architecture, layers: range | None = None, first: bool = True, last: bool = True):
        super().__init__()
        self.arch, self.first, self.last = arch, first, last
        kept = range(arch.num_layers) if layers is None else layers
        self.model = Trunk()
        if first:
            self.model.embed_tokens = nn.Embedding(arch.padded_vocab_size, arch.hidden_size)
            if arch.rope_theta is None:
                self.model.embed_positions = nn.Embedding(arch.max_positions, arch.hidden_size)
        self.model.layers = nn.ModuleDict({str(index): Block(arch) for index in kept})
        if last:
            self.model.norm = make_norm(arch.hidden_size, arch)
            self.lm_head = Head(arch.hidden_size, arch.vocab_size, arch.padded_vocab_size)
        self.tie()

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers it holds, in order: what is sharded, recomputed and compiled one by one."""
        return list(self.model.layers.values())

    def tie(self) -> None:
        """Make head and embedding one Parameter again, where the model is tied and has both. Call it after to_empty."""
        if self.arch.tied and self.first and self.last:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """input_ids [B, T] (not `first`: hidden [B, T, D]) -> logits [B, T, vocab_size]; with targets [B, T] the summed
        loss in nats (at least fp32); not `last`: hidden. With a cache the positions follow those already in it."""
        num_positions, offset = input_ids.shape[1], 0
        if cache is not None:
            cache.check(num_positions)
            offset = cache.length
        end = offset + num_positions
        positions_T = torch.arange(offset, end, device=input_ids.device)
        hidden_BTD = self._embed(input_ids, positions_T, end) if self.first else input_ids
        rope = None
        if self.arch.rope_theta is not None:
            kind = (self.arch.head_dim, self.arch.rope_theta, hidden_BTD.dtype, self.arch.rope_scaling)
            rope = rope_tables(positions_T, *kind)
        for index, block in self.model.layers.items():
            turned = None if int(index) in self.arch.unrotated_layers else rope
            layout = Layout(offset, self.arch.window if int(index) in self.arch.window_layers else None)
            hidden_BTD = block(hidden_BTD, turned, layout, None if cache is None else cache[index])
        if cache is not None:
            cache.advance(num_positions)
        if not self.last:
            return hidden_BTD
        if self.arch.tied and self.first:
            assert self.lm_head.weight is self.model.embed_tokens.weight, "the tie was cut: call tie() after to_empty"
        return self.lm_head(self.model.norm(hidden_BTD), targets)

    def _embed(self, ids_BT: Tensor, positions_T: Tensor, end: int) -> Tensor:
        """Token rows, plus position rows where positions are learned; `end`: one past the last position."""
        hidden_BTD = self.model.embed_tokens(ids_BT)
        if self.arch.pad_row is not None:
            hidden_BTD = torch.where((ids_BT == self.arch.pad_row)[:, :, None], hidden_BTD.detach(), hidden_BTD)
        if self.arch.rope_theta is not None:
            return hidden_BTD
        if end > self.arch.max_positions:
            raise UserError(
                f"a sequence of {end} tokens",
                f"this model has {self.arch.max_positions} learned positions",
                f"use sequences of at most {self.arch.max_positions} tokens",
            )
        return hidden_BTD + self.model.embed_positions(positions_T)
