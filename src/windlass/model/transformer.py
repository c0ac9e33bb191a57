"""The decoder: embedding, blocks, norm, head, with Hugging Face's parameter names for every family.

    h = E[ids] (+ P[positions]);   h += attention(norm(h));   h += mlp(norm(h));   logits = W norm(h)

Families differ by the Architecture alone: kinds of norm (layers.py) and their places, rotary, learned or (per layer) no
positions, a sliding window per layer, norms on queries and keys, gated or plain MLP or experts (moe.py), biases, a tied head,
constant factors and soft caps. What a branch reads is x, or norm(x); what it adds is y, norm(y), or c y:

    h += [norm] attention([norm] h);   h += [norm] mlp([norm] h)      in sequence, or both of one norm(h) (`parallel_block`)

Sources: arXiv 1706.03762 (attention), 2002.05202 (gated MLP), 2305.19466 (no positions), 2501.00656, 2204.02311, 2408.00118.

Under compile all blocks share one graph, but for layers without rotation (`no_rope_layers`), layers with a window
beside layers without one, and sparse layers, of which the first half is compiled, beside dense ones: each such kind is a second
graph.

Dropout is a function of the batch's `keys` (dropout.py) and applies where GPT-2 has it: after the embedding, to attention's
weights, to the outputs of attention and MLP, and before an adapter's factors. Without keys or training nothing is dropped.

A part of the model (a pipeline stage) keeps only its blocks, keyed by their global index, so that names are the same in
every layout. Nothing here is a buffer: after `to_empty` only parameters need values, and `tie()` restores the tie.

Legend: B sequences, T positions, D hidden size, H query heads.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from windlass.data.batch_fields import NOT_COUNTED
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.attention.context import Context
from windlass.model.attention.documents import Documents, find_documents
from windlass.model.attention.layout import AttentionLayout
from windlass.model.cache import KVCache, LayerCache
from windlass.model.chunks import USUAL, Chunks
from windlass.model.dropout import ATTENTION_OUTPUT, EMBEDDING, MLP_OUTPUT, dropout, fold_keys, layer_keys
from windlass.model.head.head import Head
from windlass.model.head.source_losses import SourceLosses
from windlass.model.layers import MLP, Attention, make_norm
from windlass.model.lora.adapter import Adapter
from windlass.model.lora.linear import adapt
from windlass.model.moe import MoE, Routed
from windlass.model.rope import Rope, make_ropes
from windlass.model.routing import Routing
from windlass.model.slices import Share


class Block(nn.Module):
    """One layer: attention and MLP, each added to the stream, with norms before, after or around them. No index: one graph serves
    all of a kind. A sparse layer, whose MLP is a mixture of experts, returns its router's result too."""

    def __init__(self, arch: Architecture, is_sparse: bool = False):
        super().__init__()
        self.dropout, self.is_parallel = arch.resid_dropout, arch.parallel_block
        self.residual_scale, self.self_attn = arch.residual_scale, Attention(arch)
        self.mlp = MoE(arch) if is_sparse else MLP(arch)
        size = arch.hidden_size
        self.input_layernorm = make_norm(size, arch) if arch.norm_inputs else nn.Identity()
        if not arch.parallel_block:
            self.post_attention_layernorm = make_norm(size, arch) if arch.norm_inputs else nn.Identity()
        self.post_self_attn_layernorm = make_norm(size, arch) if arch.norm_outputs else None
        self.post_mlp_layernorm = make_norm(size, arch) if arch.norm_outputs else None

    def forward(
        self,
        hidden_BTD: Tensor,
        rope: Rope,
        layout: AttentionLayout,
        cache: LayerCache | None = None,
        keys_B: Tensor | None = None,
        counted_BT: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Routed]:
        hidden_BTD, shared_BTD = self.first_half(hidden_BTD, rope, layout, cache, keys_B)
        branch_BTD, routed = self.second_half(hidden_BTD, shared_BTD, layout, keys_B, counted_BT)
        if self.post_mlp_layernorm is not None:
            branch_BTD = self.post_mlp_layernorm(branch_BTD)
        if keys_B is not None:
            branch_BTD = dropout(branch_BTD, self.dropout, keys_B, MLP_OUTPUT, layout.stream_T)
        hidden_BTD = self._add(hidden_BTD, branch_BTD)
        return hidden_BTD if routed is None else (hidden_BTD, routed)

    def first_half(
        self,
        hidden_BTD: Tensor,
        rope: Rope,
        layout: AttentionLayout,
        cache: LayerCache | None,
        keys_B: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The stream with attention added; and the norm that the MLP reads too (`parallel_block`), else None."""
        normed_BTD = self.input_layernorm(hidden_BTD)
        branch_BTD = self.self_attn(normed_BTD, rope, layout, cache, keys_B)
        if self.post_self_attn_layernorm is not None:
            branch_BTD = self.post_self_attn_layernorm(branch_BTD)
        if keys_B is not None:
            branch_BTD = dropout(branch_BTD, self.dropout, keys_B, ATTENTION_OUTPUT, layout.stream_T)
        return self._add(hidden_BTD, branch_BTD), normed_BTD if self.is_parallel else None

    def second_half(
        self,
        hidden_BTD: Tensor,
        shared_BTD: Tensor | None,
        layout: AttentionLayout,
        keys_B: Tensor | None,
        counted_BT: Tensor | None,
    ) -> tuple[Tensor, Routed | None]:
        """What the MLP makes of the stream, and of experts the router's result too. `shared`: the norm that attention read."""
        normed_BTD = self.post_attention_layernorm(hidden_BTD) if shared_BTD is None else shared_BTD
        if isinstance(self.mlp, MoE):
            found: tuple[Tensor, Routed] = self.mlp(normed_BTD, counted_BT)
            return found
        return self.mlp(normed_BTD, keys_B, layout.row_T), None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the block, or of a sparse layer the first half. Where experts are dealt out over ranks, the host reads how
        many rows each has; and torch's compiler wrote a kernel for experts that races, and writes one for the norm between the
        halves (training/sizing/compiled.py)."""
        if isinstance(self.mlp, MoE):
            self.first_half = torch.compile(self.first_half, *args, **kwargs)  # type: ignore[method-assign]
        else:
            super().compile(*args, **kwargs)

    def _add(self, hidden_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        return hidden_BTD + (branch_BTD if self.residual_scale == 1.0 else branch_BTD * self.residual_scale)


class Trunk(nn.Module):
    """Holds all but the head, so that names begin as Hugging Face's do. A part of the model has only some of these."""

    embed_tokens: nn.Embedding
    embed_positions: nn.Embedding
    layers: nn.ModuleDict
    norm: nn.Module


class Decoder(nn.Module):
    """The model, or with `layers`, `first`, `last` the part of it that a pipeline stage keeps. With an `adapter` it is made on
    meta (lora/linear.py)."""

    def __init__(
        self,
        arch: Architecture,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        chunks: Chunks = USUAL,
        adapter: Adapter | None = None,
    ):
        super().__init__()
        self.arch, self.first, self.last, self.chunks = arch, first, last, chunks
        self.drops = bool(arch.dropout or (adapter and adapter.dropout))
        self.share = Share()  # of the stream's positions and of the heads; parallel/tensor.py sets it
        self.context: Context | None = None  # of the rows; parallel/context.py sets it
        kept = range(arch.num_layers) if layers is None else layers
        self.model = Trunk()
        if first:
            self.model.embed_tokens = nn.Embedding(arch.padded_vocab_size, arch.hidden_size)
            if arch.rope_theta is None:
                self.model.embed_positions = nn.Embedding(arch.max_positions, arch.hidden_size)
        sparse = arch.sparse_layers
        self.model.layers = nn.ModuleDict({str(index): Block(arch, index in sparse) for index in kept})
        self.routing = Routing(arch, [index for index in kept if index in sparse])
        self.source_losses = SourceLosses()
        if last:
            self.model.norm = make_norm(arch.hidden_size, arch)
            rows = arch.vocab_size, arch.padded_vocab_size
            self.lm_head = Head(arch.hidden_size, *rows, chunks.head_logits, arch.logit_cap)
        self.tie()
        adapt(self, arch, adapter)

    @property
    def blocks(self) -> list[Block]:
        """The layers it holds, in order: sharded, recomputed and compiled one by one."""
        return [cast(Block, block) for block in self.model.layers.values()]

    @property
    def end(self) -> list[nn.Module]:
        """Final norm and head, where they are with an embedding whose weight is another; else nothing."""
        return [self.model.norm, self.lm_head] if self.first and self.last and not self.arch.tied else []

    def tie(self) -> None:
        """Make head and embedding one Parameter again, where the model is tied and has both. Call it after to_empty."""
        if self.arch.tied and self.first and self.last:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        keys: Tensor | None = None,
        per_row: Tensor | None = None,
        by_row: bool = False,
        factor: Tensor | None = None,
        sources: Tensor | None = None,
        percent: Tensor | None = None,
    ) -> Tensor:
        """input_ids [B, T] (not `first`: hidden [B, T, D]) -> logits [B, T, vocab_size]; with targets [B, T] the summed loss in
        nats (at least fp32); not `last`: hidden. T: of rows that ranks share (`context`) this rank's positions. With a cache
        positions go on behind it, in each row's last document. `documents` [B, M]: where those of each whole row begin
        (attention/documents.py). `keys` [B]: of samples, for dropout. `sources`: head/source_losses.py. Others: head/loss.py."""
        arch, context, offset = self.arch, self.context, 0
        shares = (1 if self.first else self.share.num_ranks) * (context.num_ranks if context else 1)
        num_positions = input_ids.shape[1] * shares  # of the row; ids are all of this rank's, a stage's input its share
        if cache is not None:
            cache.check(num_positions)
            offset = cache.length
        end = offset + num_positions
        found = None if documents is None else find_documents(documents, end, offset)
        positions = torch.arange(offset, end, device=input_ids.device) if found is None else found.positions_BT + offset
        slices: tuple[Documents, ...] = ()
        if context is not None:
            positions = context.zigzag.take(positions)
            slices = context.slice_documents(documents, input_ids.shape[0], num_positions, input_ids.device)
        hidden_BTD = self._embed(input_ids, positions, end if cache is None else None) if self.first else input_ids
        dropped = self._layer_keys(keys) if self.drops and self.training else None  # None: no extra call
        row_T, stream_T, heads_H = (None,) * 3 if dropped is None else self._shares(num_positions, input_ids.device)
        if dropped is not None and self.first:
            hidden_BTD = dropout(hidden_BTD, self.arch.embd_dropout, dropped["embedding"], EMBEDDING, stream_T)
        counted = None if targets is None or not self.arch.num_experts else targets != NOT_COUNTED
        ropes = make_ropes(arch, positions, hidden_BTD.dtype)
        for index, block in self.model.layers.items():
            is_windowed = int(index) in self.arch.window_layers
            turned = None if int(index) in self.arch.unrotated_layers else ropes[is_windowed]
            window, cap = self.arch.window if is_windowed else None, self.arch.score_cap
            layout = AttentionLayout(offset, window, found, heads_H, row_T, stream_T, context, slices, self.chunks, cap)
            kept = None if cache is None else cache[index]
            out = block(hidden_BTD, turned, layout, kept, None if dropped is None else dropped[index], counted)
            hidden_BTD = out if isinstance(out, Tensor) else self.routing.collect(*out)
        hidden_BTD = self.routing.join(hidden_BTD, self.training)
        if cache is not None:
            cache.advance(num_positions)
        seen = self.source_losses.of(sources, targets)
        return self._end(hidden_BTD, targets, per_row, by_row, factor, seen, percent) if self.last else hidden_BTD

    def _end(self, hidden_BTD: Tensor, targets: Tensor | None, *of_the_loss: Any) -> Tensor:
        """Logits, or with targets the loss. `of_the_loss`: head/loss.py's arguments behind the targets, in their order."""
        is_tied = self.arch.tied and self.first
        assert not is_tied or self.lm_head.weight is self.model.embed_tokens.weight, "call tie() after to_empty"
        normed_BTD, scale = self.model.norm(hidden_BTD), self.arch.logit_scale
        return self.lm_head(normed_BTD if scale == 1.0 else normed_BTD * scale, targets, *of_the_loss)

    def _shares(self, num_positions: int, device: torch.device) -> tuple[Tensor | None, ...]:
        """Which positions matrices read here, which the stream has, and which heads are here; None for all of them."""
        if self.share.num_ranks == 1 and self.context is None:
            return None, None, None
        positions_T = torch.arange(num_positions, device=device)
        if self.context is not None:
            positions_T = self.context.zigzag.take(positions_T)
        heads_H = torch.arange(self.arch.num_heads, device=device)
        return positions_T, positions_T[self.share.of(len(positions_T))], heads_H[self.share.of(len(heads_H))]

    def _layer_keys(self, keys_B: Tensor | None) -> dict[str, Tensor] | None:
        """The keys of each layer it holds, by its index, and the embedding's; None where nothing is dropped."""
        if keys_B is None:
            assert not torch.is_grad_enabled(), "training with dropout needs a key per sample: the batch has no `keys`"
            return None
        layers = [int(index) for index in self.model.layers]
        numbers_L = torch.arange(layers[0], layers[-1] + 1, device=keys_B.device)
        found = {str(layer): keys_B for layer, keys_B in zip(layers, layer_keys(keys_B, numbers_L), strict=True)}
        return {**found, "embedding": fold_keys(keys_B, EMBEDDING)}

    def _embed(self, ids_BT: Tensor, positions: Tensor, end: int | None) -> Tensor:
        """Token rows, plus position rows where positions are learned; `end`: one past the last position, None to look for it."""
        hidden_BTD = self.model.embed_tokens(ids_BT)
        here = self.share.of(ids_BT.shape[1])  # the positions of the stream
        if self.arch.pad_row is not None:
            is_pad_BT1 = (ids_BT[:, here] == self.arch.pad_row)[:, :, None]
            hidden_BTD = torch.where(is_pad_BT1, hidden_BTD.detach(), hidden_BTD)
        if self.arch.embedding_scale != 1.0:
            hidden_BTD = hidden_BTD * self.arch.embedding_scale
        if self.arch.rope_theta is not None:
            return hidden_BTD
        end = int(positions.max()) + 1 if end is None else end
        if end > self.arch.max_positions:
            raise UserError(
                f"a sequence of {end} tokens",
                f"this model has {self.arch.max_positions} learned positions",
                f"use sequences of at most {self.arch.max_positions} tokens",
            )
        return hidden_BTD + self.model.embed_positions(positions[..., here])
