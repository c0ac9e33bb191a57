"""Tensor parallelism with sequence parallelism: every matrix is cut over `tp` ranks, and so is the residual stream.

The picture, for a block (Megatron-LM, arXiv 1909.08053; the stream cut by positions: arXiv 2205.05198). t = tp:

    stream [B, T/t, D] -> norm -> GATHER -> [B, T, D] -> q k v (columns: heads/t) -> attention -> o (rows) -> SCATTER, + stream
                       -> norm -> GATHER -> [B, T, D] -> gate up (columns: F/t) -> activation -> down (rows) -> SCATTER, + stream

A matrix cut by its output features (columns of x W^T) computes some heads or channels from the whole input. The matrix after
it, cut by its input features (rows), computes from those one part of a sum. SCATTER adds the parts and leaves each rank its
positions (reduce-scatter); GATHER collects all positions (all-gather). Each is the other's backward. Norms, dropout and
residual sums run on T/t positions, once. Embedding and head are cut by rows of the vocabulary: a rank looks up the tokens it
has, zeros for the others, and SCATTER adds; the head's softmax exchanges three numbers per token (model/head/loss.py), never the
logits.

    kept per rank    1/t of all matrices, gradients and states; whole, and cut by FSDP2 alone: norms, row biases, position table,
                     keys' and values' matrices of fewer heads than t. Of a block's activations 1/t, but for the two gathered
                     inputs (n each, whole); recompute: full exactly 1/t
    sent per rank    n = B T D b bytes, b per element. Per block and micro-batch: 2 GATHERs and 2 SCATTERs in forward, the same in
                     backward: 8 collectives of n (t-1)/t bytes, as many bytes as the 4 all-reduces of an uncut stream;
                     recompute: full repeats 2 GATHERs and 1 SCATTER, selective the 2 GATHERs (1 where experts are dealt out).
                     Embedding: 1 SCATTER, in backward 1 GATHER; final norm: 1 GATHER, in backward 1 SCATTER; head: per chunk
                     all-reduces of 1 and of 2 numbers per token; norms over all heads (OLMo 2): a GATHER of one number per token
                     and rank each, in backward its SCATTER; norm weights, row biases, position table, whole factors of an
                     adapter, whole matrices of keys and values: an all-reduce of their size each, per micro-batch (with zero 0
                     and beside masters per step), where they are trained

Where t ranks outnumber the heads of keys and values, each of t / heads ranks computes the one that its queries read. The two
matrices are then whole on every rank, and their gradients are parts of a sum, as those of norms are.

Parameters are DTensors over `tp`, which FSDP2 (applied also over one rank: it brings gradients into the parameters' layout) cuts
further over `fsdp`; with zero 0, and beside masters (16 bits and no shards), they stay so, and ddp.py sums after the last
backward, once per step. So norms, optimizer and checkpoints see one DTensor with one logical shape. Inside a module only local
tensors compute, and the picture shows every place that communicates.

Why the gradient is right. A part that is cut gets its complete gradient. A parameter that every rank holds whole (norms, biases
after a SCATTER, the position table) has seen only this rank's positions or heads: its gradient is one part of a sum over `tp`,
and is declared so (`Partial`). The loss is one number on all ranks of `tp` and is not summed over them. Pipeline stages pass on
a rank's positions.

Legend: B sequences, T positions, S = T/t of them, D hidden size, F MLP width, V rows of the vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn import functional

from windlass.model.chunks import head_tokens
from windlass.model.dropout import dropout
from windlass.model.head.head import Head
from windlass.model.head.loss import Cut, LossForm, head_loss
from windlass.model.lora.linear import Factors, Linear, multiply
from windlass.model.slices import Share
from windlass.model.transformer import Decoder
from windlass.parallel.cut import (
    BY_COLUMNS,
    BY_ROWS,
    WHOLE,
    GatheredNorm,
    Norm,
    cut_if_present,
    cut_parameter,
    gathered,
    of_heads,
    own,
    scatter,
    shared,
)

Read = Callable[[nn.Parameter], Tensor]


class _CutLinear(nn.Module):
    """What a matrix cut by rows, one cut by columns and a whole one share: its parameters, as in model/lora/linear.py, each cut
    where the matrix is. Of the factors one is cut with it and the other whole, and the product of the cut ones is this rank's
    part of the whole: no message more, but for the sum of the whole one's gradient."""

    cut: Placement
    weight: nn.Parameter | None
    codes: nn.Parameter | None
    scales: nn.Parameter | None

    def __init__(self, linear: Linear, mesh: DeviceMesh):
        super().__init__()
        self.mesh, self.scale, self.dropout, self.site = mesh, linear.scale, linear.dropout, linear.site
        for name in ("weight", "codes", "scales"):
            self.register_parameter(name, cut_if_present(getattr(linear, name), mesh, self.cut))
        is_rows = self.cut == BY_ROWS
        self.bias = cut_if_present(linear.bias, mesh, BY_ROWS if is_rows else WHOLE)
        self.lora_A, self.lora_B = linear.lora_A, linear.lora_B
        if self.lora_A is not None and self.lora_B is not None:
            self.lora_A.weight = cut_parameter(
                self.lora_A.weight, mesh, BY_COLUMNS if self.cut == BY_COLUMNS else WHOLE
            )
            self.lora_B.weight = cut_parameter(self.lora_B.weight, mesh, BY_ROWS if is_rows else WHOLE)

    def multiply(self, x: Tensor, dropped: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
        read = self.read
        matrix = read(self.weight) if self.codes is None else (read(self.codes), read(self.scales))
        return multiply(x, dropped, matrix, bias, factors, self.scale)

    def read(self, parameter: nn.Parameter | None) -> Tensor:
        """What this rank multiplies of the matrix, its bias, codes or scales."""
        return own(parameter)

    def factors(self, read_a: Read, read_b: Read) -> Factors:
        """A and B as this rank computes with them: its part of the cut one, the whole of the other."""
        a, b = self.lora_A, self.lora_B
        return None if a is None or b is None else (read_a(a.weight), read_b(b.weight))


class ColumnLinear(_CutLinear):
    """[B, T, D] -> this rank's output features [B, T, F/t]. A is whole, B cut by rows."""

    cut = BY_ROWS

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None, positions_T: Tensor | None = None) -> Tensor:
        dropped_BTD = dropout(x_BTD, self.dropout, keys_B, self.site, positions_T)
        bias = None if self.bias is None else own(self.bias)
        return self.multiply(x_BTD, dropped_BTD, bias, self.factors(shared, own))


class SharedHeads(_CutLinear):
    """Keys or values of a model that has fewer heads of them than there are ranks: [B, T, D] -> the head that this rank's queries
    read, [B, T, K]. Every rank holds the matrix and both factors whole, and its gradient is that of one head: a part of a sum."""

    cut = WHOLE

    def __init__(self, linear: Linear, mesh: DeviceMesh, num_heads: int):
        super().__init__(linear, mesh)
        size = linear.out_features // num_heads
        first = mesh.get_local_rank() * num_heads // mesh.size() * size
        self.rows = slice(first, first + size)

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None, positions_T: Tensor | None = None) -> Tensor:
        dropped_BTD = dropout(x_BTD, self.dropout, keys_B, self.site, positions_T)
        bias = None if self.bias is None else self.read(self.bias)
        return self.multiply(x_BTD, dropped_BTD, bias, self.factors(shared, self.read))

    def read(self, parameter: nn.Parameter | None) -> Tensor:
        return shared(parameter)[self.rows]


class SharedLinear(nn.Module):
    """A small matrix that every rank holds and multiplies whole: the router of experts, whose work on them is cut."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh):
        super().__init__()
        self.weight = cut_if_present(linear.weight, mesh, WHOLE)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.linear(x_BTD, shared(self.weight))


class RowLinear(_CutLinear):
    """This rank's input features [B, T, F/t] -> its positions of the whole product [B, S, D]. The bias is added once, after. A
    is cut by columns, B whole."""

    cut = BY_COLUMNS

    def forward(self, x_BTF: Tensor, keys_B: Tensor | None = None, positions_T: Tensor | None = None) -> Tensor:
        num = x_BTF.shape[2]
        columns_F = torch.arange(num, device=x_BTF.device, dtype=torch.int32) + self.mesh.get_local_rank() * num
        dropped_BTF = dropout(x_BTF, self.dropout, keys_B, self.site, positions_T, columns_F)
        out_BSD = scatter(self.multiply(x_BTF, dropped_BTF, None, self.factors(own, shared)), self.mesh)
        return out_BSD if self.bias is None else out_BSD + shared(self.bias)


class VocabularyEmbedding(nn.Module):
    """Token ids of all positions [B, T] -> rows of this rank's positions [B, S, D]."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        self.weight = cut_if_present(embedding.weight, mesh, BY_ROWS)

    def forward(self, ids_BT: Tensor) -> Tensor:
        weight_VD = own(self.weight)
        rows_BT = ids_BT - self.mesh.get_local_rank() * weight_VD.shape[0]
        here_BT = (rows_BT >= 0) & (rows_BT < weight_VD.shape[0])
        part_BTD = functional.embedding(rows_BT.where(here_BT, 0), weight_VD)
        return scatter(part_BTD.where(here_BT[:, :, None], 0), self.mesh)


class PositionEmbedding(nn.Module):
    """Rows of this rank's positions; every rank holds the table."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__()
        self.weight = cut_if_present(embedding.weight, mesh, WHOLE)

    def forward(self, positions: Tensor) -> Tensor:
        return functional.embedding(positions, shared(self.weight))


class VocabularyHead(nn.Module):
    """The summed loss of all positions, over the rows of all ranks; the same number on each."""

    def __init__(self, head: Head, mesh: DeviceMesh):
        super().__init__()
        self.mesh, self.vocab_size, self.cap = mesh, head.vocab_size, head.cap
        self.weight = cut_if_present(head.weight, mesh, BY_ROWS)
        # as many logits at a time as the whole head, of fewer columns
        self.chunk_tokens = head_tokens(head.chunk_logits * mesh.size(), head.weight.shape[0])

    def forward(
        self,
        hidden_BTD: Tensor,
        targets_BT: Tensor | None = None,
        per_row_B2: Tensor | None = None,
        by_row: bool = False,
        factor: Tensor | None = None,
        seen: Callable[[Tensor], None] | None = None,
        percent_BT: Tensor | None = None,
    ) -> Tensor:
        assert targets_BT is not None, (
            "logits of a cut head: evaluation asks for losses, generation uses the whole model"
        )
        weight_VD = own(self.weight)
        rows = Cut(self.mesh.get_group(), self.mesh.get_local_rank() * weight_VD.shape[0])
        form = LossForm(self.vocab_size, self.chunk_tokens, rows, self.cap)
        return head_loss(hidden_BTD, weight_VD, targets_BT, form, per_row_B2, by_row, factor, seen, percent_BT)


Make = Callable[[Any, DeviceMesh], nn.Module]

BLOCK: Final[dict[str, Make]] = {
    "input_layernorm": gathered,
    "self_attn.q_proj": ColumnLinear,
    "self_attn.k_proj": ColumnLinear,  # where ranks outnumber the heads of keys and values: SharedHeads, for both
    "self_attn.v_proj": ColumnLinear,
    "self_attn.q_norm": of_heads,
    "self_attn.k_norm": of_heads,
    "self_attn.o_proj": RowLinear,
    "post_self_attn_layernorm": Norm,
    "post_attention_layernorm": gathered,
    "mlp.gate": SharedLinear,  # the experts beside it: expert.py
    "mlp.gate_proj": ColumnLinear,
    "mlp.up_proj": ColumnLinear,
    "mlp.down_proj": RowLinear,
    "post_mlp_layernorm": Norm,
}
ENDS: Final[dict[str, Make]] = {
    "model.embed_tokens": VocabularyEmbedding,
    "model.embed_positions": PositionEmbedding,
    "model.norm": GatheredNorm,
    "lm_head": VocabularyHead,
}


def overlap_exchanges(tp: DeviceMesh, is_asked: bool) -> None:
    """Before blocks are compiled, where `is_asked`: a GATHER and the products that read it become one operator of torch's, which
    multiplies the pieces as they come (symmetric memory between GPUs of one host). A product and its SCATTER likewise. Of a
    block's 8 exchanges these are 6: backward's SCATTERs add up the gradients of several products. With one row they are 2:
    torch's patterns miss how GATHERs are laid out then. Nothing over a trial's group, which sends nothing.

    Source: Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959; torch._inductor.fx_passes.micro_pipeline_tp.
    """
    group, tag = tp.get_group(), "async_tp"
    if dist.get_backend(group) == "fake" or (not is_asked and torch.compiler.config.cache_key_tag != tag):
        return
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    if is_asked:
        enable_symm_mem_for_group(group.group_name)
    # both are the process's, and an earlier program may have asked; the first is private, and so no part of the cache's key
    config._micro_pipeline_tp = is_asked
    torch.compiler.config.cache_key_tag = tag if is_asked else ""


def apply_tensor(model: Decoder, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Replaces the modules of `model`, on meta, by their cut forms over `mesh` (the axis tp); names stay. Nothing on one rank."""
    if mesh.size() == 1:
        return
    heads = model.arch.num_kv_heads
    shared_heads = partial(SharedHeads, num_heads=heads) if heads % mesh.size() else ColumnLinear
    for block in blocks:
        _replace(block, BLOCK | dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), shared_heads), mesh)
    _replace(model, ENDS, mesh)
    model.tie()
    model.share = Share(mesh.get_local_rank(), mesh.size())
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not whole, f"no rule for {whole}"


def _replace(module: nn.Module, plan: dict[str, Make], mesh: DeviceMesh) -> None:
    present = dict(module.named_modules())
    for name, make in plan.items():
        if name in present:
            parent, _, child = name.rpartition(".")
            present[parent].register_module(child, make(present[name], mesh))
