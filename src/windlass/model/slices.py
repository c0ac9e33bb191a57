"""Which part of a whole this rank holds: of a logical tensor, of the positions and heads that tensor ranks share, and of the
rows that context ranks share.

FSDP2 and tensor parallelism cut a dim as torch.chunk does: pieces of ceil(n / ranks), the last ones shorter or empty. Where both
cut the same dim, tensor ranks cut first and FSDP2 cuts each of their pieces, though its axis comes first in the mesh: torch
calls that placement _StridedShard. So a rank's part is one range of global indices per dim in every layout. Reading weights and
drawing initial ones both take their ranges from here, and touch only that part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from windlass.model.weight_files import ROWS_AT_ONCE


@dataclass(frozen=True)
class Share:
    """One of `ranks` equal parts."""

    rank: int = 0
    ranks: int = 1

    def of(self, size: int) -> slice:
        """This rank's part of `size` things, which `ranks` divides."""
        assert size % self.ranks == 0, (size, self)
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True)
class Zigzag:
    """Two of 2 `ranks` equal slices of a row: the `rank`-th from its beginning and the `rank`-th from its end. Under a causal
    mask position t sees t + 1 keys; what the two slices see together is the same on every rank."""

    rank: int
    ranks: int

    def of(self, size: int) -> tuple[slice, slice]:
        """This rank's slices of `size` positions, which 2 `ranks` divides."""
        assert size % (2 * self.ranks) == 0, (size, self)
        each, last = size // (2 * self.ranks), 2 * self.ranks - 1 - self.rank
        return slice(self.rank * each, (self.rank + 1) * each), slice(last * each, (last + 1) * each)

    def take(self, x: Tensor) -> Tensor:
        """This rank's positions of [..., T] -> [..., T / ranks]."""
        first, second = self.of(x.shape[-1])
        return torch.cat((x[..., first], x[..., second]), -1)


def owned_ranges(tensor: Tensor) -> list[range]:
    """Global indices that the local part covers, one range per dim; the whole of each dim for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return [range(size) for size in tensor.shape]
    mesh = tensor.device_mesh
    ranges = ranges_at(tensor, [mesh.get_local_rank(axis) for axis in range(mesh.ndim)])
    assert tuple(map(len, ranges)) == tensor.to_local().shape, (ranges, tensor.to_local().shape)
    return ranges


def ranges_at(tensor: DTensor, coordinate: Sequence[int]) -> list[range]:
    """As `owned_ranges`, of the rank at `coordinate` of the tensor's mesh."""
    ranges = [range(size) for size in tensor.shape]
    for axis, dim in cutting_axes(tensor):
        ranges[dim] = _chunk(ranges[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return ranges


def cutting_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """(mesh axis, dim) of every cut, in the order in which they are made."""
    first, second = [], []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is Shard:
            first.append((axis, placement.dim))
        else:
            assert isinstance(placement, _StridedShard), f"{placement}: a part that is no range of indices"
            second.append((axis, placement.dim))
    return first + second


def local_part(tensor: Tensor) -> Tensor:
    """The elements this rank holds, as a plain tensor that shares their memory."""
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _chunk(whole: range, num_pieces: int, index: int) -> range:
    size = -(-len(whole) // num_pieces)
    return whole[min(index * size, len(whole)) : min((index + 1) * size, len(whole))]


class GrownRows:
    """A tensor of the vocabulary with more rows than its file has, read as a lazy slice of safetensors is. Each new row is the
    mean of the file's: rows of zeros, or random ones, would be far from all that the model has learned."""

    def __init__(self, stored: Any, num_rows: int):
        self._stored, self._num_rows, self._old = stored, num_rows, stored.get_shape()[0]

    def get_shape(self) -> list[int]:
        return [self._num_rows, *self._stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self._num_rows)
        found: Tensor = self._stored[(slice(min(start, self._old), min(stop, self._old)), *columns)]
        num_new = stop - max(start, self._old)
        return torch.cat((found, self._mean(columns).to(found.dtype).expand(num_new, -1))) if num_new > 0 else found

    def _mean(self, columns: list[slice]) -> Tensor:
        starts = range(0, self._old, ROWS_AT_ONCE)
        sums = [self._stored[(slice(i, min(i + ROWS_AT_ONCE, self._old)), *columns)].double().sum(0) for i in starts]
        return torch.stack(sums).sum(0) / self._old
