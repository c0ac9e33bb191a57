"""Which part of a whole this rank has: of the positions and heads that tensor ranks share, of the rows that context ranks share;
and rows of a vocabulary that its file has not.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.model.weight_files import ROWS_AT_ONCE


@dataclass(frozen=True)
class Share:
    """One of `num_ranks` equal parts: the `index`-th."""

    index: int = 0
    num_ranks: int = 1

    def of(self, size: int) -> slice:
        """This rank's part of `size` things, which `num_ranks` divides."""
        assert size % self.num_ranks == 0, (size, self)
        each = size // self.num_ranks
        return slice(self.index * each, (self.index + 1) * each)


@dataclass(frozen=True)
class Zigzag:
    """Two of 2 `num_ranks` equal slices of a row: the `index`-th from its beginning and the `index`-th from its end. Under a
    causal mask position t sees t + 1 keys; what the two slices see together is the same on every rank."""

    index: int
    num_ranks: int

    def of(self, size: int) -> tuple[slice, slice]:
        """This rank's slices of `size` positions, which 2 `num_ranks` divides."""
        assert size % (2 * self.num_ranks) == 0, (size, self)
        each, last = size // (2 * self.num_ranks), 2 * self.num_ranks - 1 - self.index
        return slice(self.index * each, (self.index + 1) * each), slice(last * each, (last + 1) * each)

    def take(self, x: Tensor) -> Tensor:
        """This rank's positions of [..., T] -> [..., T / num_ranks]."""
        first, second = self.of(x.shape[-1])
        return torch.cat((x[..., first], x[..., second]), -1)


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
