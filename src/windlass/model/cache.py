"""Keys and values of the positions already seen, kept for generation; refused where gradients are recorded.

The room for all positions is allocated once: 2 * layers * B * G * capacity * K elements. Each forward appends its own
positions to every layer, then the decoder advances the length once.

Legend: B sequences, G key/value heads, T new positions, S positions so far, K channels per head.
"""

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.model.architecture import Architecture


class LayerCache:
    """One block's keys and values; `length` positions are filled."""

    def __init__(self, keys_BGSK: Tensor, values_BGSK: Tensor):
        self._keys_BGSK, self._values_BGSK = keys_BGSK, values_BGSK

    def append(self, k_BGTK: Tensor, v_BGTK: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Write the new positions after the first `length`; returns keys and values of all positions so far."""
        end = length + k_BGTK.shape[2]
        self._keys_BGSK[:, :, length:end] = k_BGTK
        self._values_BGSK[:, :, length:end] = v_BGTK
        return self._keys_BGSK[:, :, :end], self._values_BGSK[:, :, :end]

    def keep(self, rows: Tensor) -> None:
        self._keys_BGSK, self._values_BGSK = self._keys_BGSK[rows], self._values_BGSK[rows]


class KVCache:
    """Keys and values for `batch_size` sequences of at most `capacity` positions, for the blocks named by `layers`."""

    def __init__(
        self,
        arch: Architecture,
        batch_size: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layers: range | None = None,
    ):
        self.capacity, self.length = capacity, 0
        shape = (batch_size, arch.num_kv_heads, capacity, arch.head_dim)
        self._layers = {
            str(layer): LayerCache(
                torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
            )
            for layer in (range(arch.num_layers) if layers is None else layers)
        }

    def __getitem__(self, layer: str) -> LayerCache:
        return self._layers[layer]

    def keep(self, rows: Tensor) -> None:
        """Go on with the sequences `rows` alone, by their numbers."""
        for layer in self._layers.values():
            layer.keep(rows)

    def check(self, num_new: int) -> None:
        """Raise UserError where a cache cannot be used (gradients) or has no room for `num_new` positions."""
        if torch.is_grad_enabled():
            raise UserError(
                "a KV cache in a forward that records gradients",
                "kept keys and values belong to older weights: training with them is wrong",
                "leave the cache out, or generate under torch.no_grad()",
            )
        if self.length + num_new > self.capacity:
            raise UserError(
                f"{self.length} positions in the KV cache and {num_new} new ones",
                f"it was made for {self.capacity}",
                "generate fewer tokens or make the cache larger",
            )

    def advance(self, num_new: int) -> None:
        """All blocks have appended `num_new` positions."""
        self.length += num_new
