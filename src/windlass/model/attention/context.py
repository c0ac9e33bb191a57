"""Attention over rows that are cut over context ranks: the exchanges that bring each query all keys of its row.

N ranks share a row of T positions; each holds S = T / N of them, slice r and slice 2N - 1 - r of 2N (slices.Zigzag), so that all
have equal work under the causal mask. There are two ways, chosen by `Context.kind`:

    allgather  every rank gets all keys and values of the row and computes its own S queries: one all-gather of both, and in
               backward one reduce-scatter of their gradients (Llama 3, arXiv 2407.21783, section 3.3.2)
    ulysses    an all-to-all turns a cut by positions into a cut by heads: every rank computes H / N heads of the whole row,
               with the kernels of a row that is not cut, and a second all-to-all turns the result back (DeepSpeed-Ulysses,
               arXiv 2309.14509). Key/value heads that cannot be dealt out evenly are repeated before they are sent

Only this file puts slices in the row's order on the way in and back in the ranks' order on the way out. Bytes sent and kept:
parallel/context.py.

Legend: B rows, T positions of a row, S of them here, C of a slice, H query heads, G key/value heads, K channels per head, N
ranks, J heads of queries, keys and values that one rank computes.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from windlass.model.attention.documents import Documents, find_documents
from windlass.model.slices import Share, Zigzag

KINDS: Final = ("allgather", "ulysses")


@dataclass(frozen=True)
class Context:
    """The ranks that share each row, and how they exchange; parallel/context.py sets it on a decoder."""

    mesh: DeviceMesh
    index: int  # of this rank among them
    num_ranks: int
    kind: str

    @property
    def zigzag(self) -> Zigzag:
        return Zigzag(self.index, self.num_ranks)

    def slice_documents(
        self, starts_BM: Tensor | None, rows: int, length: int, device: torch.device
    ) -> tuple[Documents, ...]:
        """The documents that the queries of each slice meet, for the kind that computes slices."""
        if self.kind == "ulysses":
            return ()
        if starts_BM is None:
            starts_BM = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        return tuple(find_documents(starts_BM, part.stop, part.start) for part in self.zigzag.of(length))

    def heads(self, heads_H: Tensor | None, q_BHSK: Tensor) -> Tensor:
        """Numbers of the query heads that this rank computes, among all of the model. `heads_H`: of those it projects."""
        if heads_H is None:
            heads_H = torch.arange(q_BHSK.shape[1], device=q_BHSK.device)
        return heads_H[Share(self.index, self.num_ranks).of(len(heads_H))]


def gather_keys(k_BGSK: Tensor, v_BGSK: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """All keys and values of the row, in its order -> twice [B, G, T, K]. Backward: the sum of all ranks' gradients."""
    local_S2BGK = torch.stack((k_BGSK, v_BGSK)).permute(3, 0, 1, 2, 4).contiguous()
    whole = DTensor.from_local(local_S2BGK, context.mesh, [Shard(0)], run_check=False)
    ranks_S2BGK = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    both_T2BGK = in_row_order(ranks_S2BGK.unflatten(0, (context.num_ranks, -1)))
    k_BGTK, v_BGTK = both_T2BGK.permute(1, 2, 3, 0, 4)
    return k_BGTK, v_BGTK


def to_heads(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """All positions of this rank's share of the heads -> [B, H/N, T, K] and twice [B, G'/N, T, K], G' = G x `copies`."""
    num_ranks, times = context.num_ranks, copies(q_BHSK.shape[1], k_BGSK.shape[1], context.num_ranks)
    if times > 1:
        k_BGSK, v_BGSK = k_BGSK.repeat_interleave(times, 1), v_BGSK.repeat_interleave(times, 1)
    heads = [x.shape[1] // num_ranks for x in (q_BHSK, k_BGSK, v_BGSK)]
    shared = [x.unflatten(1, (num_ranks, -1)) for x in (q_BHSK, k_BGSK, v_BGSK)]
    to_NSBJK = torch.cat(shared, 2).permute(1, 3, 0, 2, 4).contiguous()
    row_TBJK = in_row_order(_Exchange.apply(to_NSBJK, context.mesh.get_group()))
    q_BHTK, k_BGTK, v_BGTK = row_TBJK.permute(1, 2, 0, 3).split(heads, 1)
    return q_BHTK, k_BGTK, v_BGTK


def to_positions(out_BHTK: Tensor, context: Context) -> Tensor:
    """All heads of this rank's positions, from its heads of all positions: [B, H/N, T, K] -> [B, H, S, K]."""
    to_NSBHK = in_rank_order(out_BHTK.permute(2, 0, 1, 3), context.num_ranks).contiguous()
    from_NSBHK = _Exchange.apply(to_NSBHK, context.mesh.get_group())
    return from_NSBHK.permute(2, 0, 3, 1, 4).flatten(1, 2)


def copies(num_heads: int, num_kv_heads: int, num_ranks: int) -> int:
    """Copies of each key/value head, so that every rank has equally many, and those that its query heads need."""
    groups = num_heads // num_kv_heads  # this many copies always suffice: a head for each query head
    return next(n for n in range(1, groups + 1) if groups % n == 0 and n * num_kv_heads % num_ranks == 0)


def in_row_order(x_NS: Tensor) -> Tensor:
    """What each rank holds of a row, [N, S, ...] -> the row, [T, ...]."""
    first_NC, second_NC = x_NS.unflatten(1, (2, -1)).unbind(1)
    return torch.cat((first_NC, second_NC.flip(0))).flatten(0, 1)


def in_rank_order(x_T: Tensor, num_ranks: int) -> Tensor:
    """The row, [T, ...] -> what each rank holds of it, [N, S, ...]."""
    first_NC, second_NC = x_T.unflatten(0, (2, num_ranks, -1)).unbind(0)
    return torch.stack((first_NC, second_NC.flip(0)), 1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """all-to-all: the n-th of N pieces goes to rank n, and what rank n sends becomes the n-th. Its own backward."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out_N = torch.empty_like(x_N)
        dist.all_to_all_single(out_N, x_N, group=group)
        return out_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad_N,) = grads
        out_N = torch.empty_like(grad_N, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out_N, grad_N.contiguous(), group=ctx.group)
        return out_N, None
