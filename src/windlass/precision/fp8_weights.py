"""fp8 weights are cast once per global batch, before they are gathered or multiplied, and kept in eight bits.

    per parameter of these matrices      cast by products             cast ahead
    cast by a rank                       the whole matrix, twice      its part, once per
                                         per micro-batch              global batch
    kept beside a master                 2 bytes                      1
    kept beside a shard                  -                            1/S bytes
    gathered from S shards               2 bytes                      1
    sent by a gather                     2 (S-1)/S bytes              (S-1)/S

Before the first forward of a global batch, or of an evaluation, each rank finds the largest number in its part of every matrix,
and one all-reduce over the shards the largest of all parts. So the scale is that of the whole matrix in 16 bits, and rounding is
elementwise: products read the same bits either way.

Rowwise products cast W by its rows for forward and by its columns for backward, so they do it themselves, from 16 bits. So do
matrices whose rows S does not divide, and offloaded ones.

Where a rank has masters (masters.py) a weight of the model is in eight bits alone. FSDP2 asks a shard that has
`fsdp_pre_all_gather` and `fsdp_post_all_gather` what it sends and what becomes of it: here they are attributes of the shard's
tensor. So the optimizer and checkpoints see no subclass.

Source: torchao.float8 (enable_fsdp_float8_all_gather), whose tensor the products read.

Legend: S ranks that shard.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.precision.fp8 import Product, codes_of
from windlass.precision.masters import COMPILED_FROM


def cast_to(codes: Tensor, rows: Tensor, scale: Tensor, computed: torch.dtype) -> None:
    """codes = rows in `computed`, times scale, in eight bits: the bits that torchao's products make of a weight in `computed`."""
    largest = torch.finfo(codes.dtype).max
    codes.copy_((rows.to(computed).float() * scale).clamp(-largest, largest))


@cache
def compiled_cast() -> Callable[[Tensor, Tensor, Tensor, torch.dtype], None]:
    """`cast_to` as one kernel with the same bits. With the largest number it moves 10 bytes per weight, torch's own operators 37
    (counted: benchmarks/step_bytes.py). Without the option Inductor leaves out the rounding to `computed`."""
    return torch.compile(cast_to, dynamic=True, fullgraph=True, options={"emulate_precision_casts": True})


class _Weight:
    """What a rank has of a matrix: `rows` in fp32, from which `codes` in eight bits and the `scale` of the whole are made."""

    def __init__(self, rows: Tensor, codes: Tensor, scale: Tensor, product: Product):
        self.rows, self.product = rows, product
        self.codes, self._scale = codes, scale
        self._cast = compiled_cast() if product.is_compiled and rows.numel() >= COMPILED_FROM else cast_to

    def cast(self, scale: Tensor, computed: torch.dtype) -> None:
        self._scale.copy_(scale)
        self._cast(self.codes.view(-1), self.rows.view(-1), self._scale, computed)  # flat: one graph for all sizes

    def send(self, _mesh: Any, _size: Any, _stride: Any, _module: Any, _policy: Any) -> tuple[tuple[Tensor], Tensor]:
        """FSDP2's fsdp_pre_all_gather."""
        return (self.codes,), self._scale

    def receive(
        self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's fsdp_post_all_gather -> what products read, and the memory under it. `out`: that of an earlier call, whose
        memory was written anew."""
        return (self.product.weight(gathered[0], scale, dtype), gathered) if out is None else None


def keep_in_fp8(linears: Iterable[Any]) -> None:
    """Where a rank has masters: the weights of these `linears` (model/lora/linear.py) that can be cast ahead are in eight bits
    from here on, in place, without values."""
    for linear in linears:
        weight, product = linear.weight, linear.product
        if isinstance(product, Product) and product.casts_ahead:
            codes, scale = torch.empty_like(weight, dtype=product.of_weights), torch.ones((), device=weight.device)
            linear.weight = nn.Parameter(product.weight(codes, scale, weight.dtype), weight.requires_grad)


class CastWeights:
    """The weights that are cast ahead, none where no product is in fp8. `linears`: of this rank, by the names of their weights;
    `masters`: by name; `computed`: the dtype that scales are made for."""

    def __init__(self, linears: Mapping[str, Any], masters: Mapping[str, Tensor], computed: torch.dtype):
        self._computed, self._weights = computed, list[_Weight]()
        self.codes: dict[str, Tensor] = {}
        """By name: the eight bits that this rank keeps."""
        self._shards: dist.ProcessGroup | None = None
        for name, linear in linears.items():
            weight, product = linear.weight, linear.product
            if not isinstance(product, Product) or not product.casts_ahead:
                continue
            if (in_fp8 := codes_of(weight)) is not None:
                self._weights.append(_Weight(masters[name].detach(), *in_fp8, product))
            elif (
                isinstance(weight, DTensor) and len(weight) % weight.device_mesh.size(weight.device_mesh.ndim - 1) == 0
            ):
                self._weights.append(self._shard(weight, product))
            else:
                continue
            self.codes[name] = self._weights[-1].codes

    def _shard(self, weight: DTensor, product: Product) -> _Weight:
        rows, mesh = weight._local_tensor, weight.device_mesh
        codes, scale = torch.empty_like(rows, dtype=product.of_weights), torch.ones((), device=rows.device)
        shard = _Weight(rows, codes, scale, product)
        rows.fsdp_pre_all_gather = shard.send  # type: ignore[attr-defined]
        rows.fsdp_post_all_gather = shard.receive  # type: ignore[attr-defined]
        self._shards = mesh.get_group(mesh.ndim - 1)  # the last axis shards
        return shard

    @torch.no_grad()
    def cast(self) -> None:
        """Before the first forward after an update. Collective."""
        if not self._weights:
            return
        largest = torch.stack(torch._foreach_norm([weight.rows for weight in self._weights], float("inf")))
        if self._shards is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, self._shards)
        scales = self._weights[0].product.scales(largest.to(self._computed))
        for weight, scale in zip(self._weights, scales.unbind(), strict=True):
            weight.cast(scale, self._computed)
