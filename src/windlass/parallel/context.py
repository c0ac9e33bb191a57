"""Context parallelism: N ranks share each row of tokens, so each keeps 1/N of its activations.

The picture, for N = 2 ranks and a row in 2 N = 4 slices. A causal query sees the positions before it, so the later half of a row
costs three times the earlier one; a slice from the front and its mirror from the back cost every rank the same:

    row      | 0 | 1 | 2 | 3 |      rank 0 has 0 and 3,  rank 1 has 1 and 2      keys seen by slice n: n + 1/2 slices

`cut_rows` cuts the row once, where a batch enters the program: after targets are shifted and counted, so neither depends on the
cut. Embedding, norms, MLP, head and loss see a rank's own positions, with their positions in the row. Attention alone needs the
other ranks' keys, and gets them by one of two exchanges (model/attention/context.py continues the picture).

    kept per rank    of a block's activations 1/N, and attention's output once more, B S H K b; with allgather keys and values
                     are whole rows, n = 2 B T G K b; with recompute selective or full exactly 1/N of what is kept without
                     context. Parameters, gradients and states: cut over shard x context (zero 1 to 3), as if context ranks
                     were more of shard
    sent per rank    per block and micro-batch:
                     allgather   an all-gather of n bytes, in backward a reduce-scatter: n (N-1)/N each; with recompute
                                 selective or full the all-gather again
                     ulysses     two all-to-alls, of B S (H + 2 G') K b and of B S H K b bytes, (N-1)/N of each, in backward
                                 the same; with recompute selective or full both again
                     The reductions of loss and gradients run over context too, without additional messages

Ulysses sends less where N > (H + G') / G. B rows, T positions, S = T / N, H query heads, G key/value heads, G' = G where N
divides it, else G x the copies that make it so; K channels per head, b bytes per element; under tp H and G are a rank's own. Key
and value gradients are summed over ranks in the dtype in which they are computed.

Why the gradient is right. Each position's loss is computed by one rank, and reductions are sums: parameters see the sum over
all ranks' positions, through FSDP2 or DDP over replicate x shard x context. The backward of the exchange returns the gradients
of keys and values to the rank that made them. The count is of whole rows, which all context ranks read, so it is summed over
replicate and shard alone (mesh.sum_over_batch). Dropout hashes positions in the whole row.

Sources: Llama 3, arXiv 2407.21783 (all-gather, slices from both ends); DeepSpeed-Ulysses, arXiv 2309.14509.
"""

import torch

from windlass.model.attention.context import Context
from windlass.model.slices import Zigzag
from windlass.model.transformer import Decoder
from windlass.parallel.mesh import Mesh

PER_TOKEN = ("input_ids", "targets", "percent")  # [B, T]; documents and keys describe whole rows
PER_ROW = "per_row"  # [B, 2], bits: a weight, and an offset of the loss that one of the ranks that share a row adds


def apply_context(model: Decoder, mesh: Mesh, kind: str) -> None:
    """Sets on `model` that its ids are this rank's slices of their rows. Does nothing where rows are whole."""
    if mesh.context is not None:
        model.context = Context(mesh.context, mesh.coordinate["context"], mesh.layout.context, kind)


def cut_rows(batch: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """A batch of whole rows -> this rank's positions of them, [B, T / context] where the batch has a number per token."""
    if mesh.context is None:
        return batch
    zigzag = Zigzag(mesh.coordinate["context"], mesh.layout.context)
    rows = {name: zigzag.take(value) if name in PER_TOKEN else value for name, value in batch.items()}
    if mesh.coordinate["context"] > 0 and PER_ROW in rows:
        rows[PER_ROW] = rows[PER_ROW] * rows[PER_ROW].new_tensor([1, 0])  # no bits are 0.0
    return rows
