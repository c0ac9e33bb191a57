"""fp8 weights are cast before FSDP2 gathers them: what is multiplied in eight bits is sent in eight, not in sixteen.

    per parameter of these matrices     cast after the gather                  cast before it
    sent by a gather                    2 (S-1)/S bytes                        (S-1)/S
    gathered                            2 bytes                                1
    cast by a rank                      the whole matrix, twice per            1/S of it, once per
                                        micro-batch                            global batch
    kept beside the shard               -                                      1/S bytes, and a scale per matrix

Before a global batch each rank finds the largest number in its part of every matrix, and one all-reduce the largest of all parts.
So the scale is that of the whole matrix in 16 bits, and rounding is elementwise: products read the same bits either way.

Rowwise products cast W by its rows for forward and by its columns for backward, so they gather 16 bits. So do matrices whose rows
S does not divide, and offloaded ones.

FSDP2 asks a shard that has `fsdp_pre_all_gather` and `fsdp_post_all_gather` what it sends and what becomes of it. Here they are
attributes of the shard's tensor: the optimizer and checkpoints see no subclass.

Source: torchao.float8 (enable_fsdp_float8_all_gather), whose tensor the products read.

Legend: S ranks that shard.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from windlass.precision.fp8 import Product


class _Shard:
    """This rank's rows of a matrix, in fp32 and in eight bits."""

    def __init__(self, rows: Tensor, product: Product):
        self.rows, self.product = rows, product
        self._codes, self._scale = torch.empty_like(rows, dtype=product.of_weights), torch.ones((), device=rows.device)
        rows.fsdp_pre_all_gather = self._send  # type: ignore[attr-defined]
        rows.fsdp_post_all_gather = self._receive  # type: ignore[attr-defined]

    def cast(self, scale: Tensor, computed: torch.dtype) -> None:
        self._scale.copy_(scale)
        self._codes.copy_(self.product.cast(self.rows.to(computed), scale))

    def _send(self, _mesh: Any, _size: Any, _stride: Any, _module: Any, _policy: Any) -> tuple[tuple[Tensor], Tensor]:
        return (self._codes,), self._scale

    def _receive(
        self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """-> what products read, and the memory under it. `out`: that of an earlier call, whose memory was written anew."""
        return (self.product.weight(gathered[0], scale, dtype), gathered) if out is None else None


class CastWeights:
    """The weights of `linears` (model/lora/linear.py) that are gathered in eight bits, none where no product is in fp8.
    `computed`: the dtype that the others are gathered in."""

    def __init__(self, linears: Iterable[Any], computed: torch.dtype):
        self._computed, self._shards = computed, list[_Shard]()
        self._group: dist.ProcessGroup | None = None
        for linear in linears:
            weight, product = linear.weight, linear.product
            if not isinstance(product, Product) or not product.is_tensorwise or not isinstance(weight, DTensor):
                continue
            mesh, rows = weight.device_mesh, weight._local_tensor
            last = mesh.ndim - 1  # along which weights are sharded
            if mesh.size(last) > 1 and len(weight) % mesh.size(last) == 0 and rows.device.type == mesh.device_type:
                self._shards.append(_Shard(rows, product))
                self._group = mesh.get_group(last)

    @torch.no_grad()
    def cast(self) -> None:
        """Before the first forward after an update. Collective."""
        if not self._shards:
            return
        largest = torch.stack(torch._foreach_norm([shard.rows for shard in self._shards], float("inf")))
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        scales = self._shards[0].product.scales(largest.to(self._computed))
        for shard, scale in zip(self._shards, scales.unbind(), strict=True):
            shard.cast(scale, self._computed)
