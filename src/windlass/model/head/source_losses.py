"""The loss of each source of a mixture, from the nats that the head computes anyway: two numbers per source, on the device.

A batch whose rows say which source they are of (`sources`, [B, S] bool) adds to them; the loop keeps `sources` only in batches of
logging steps. The sums are products with a matrix of zeros and ones, in fp64, so that they come out the same each time: an
indexed addition does not on a GPU.

Legend: B sequences, T positions of this rank, N = B T tokens, S sources.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.data.batch_fields import NOT_COUNTED
from windlass.errors import UserError


class SourceLosses:
    """The loss of each source, for one Decoder, added up over the micro-batches of a global batch."""

    def __init__(self) -> None:
        self.sums_S2: Tensor | None = None
        """Nats and counted targets of each source; None where no batch has `sources`."""

    def begin(self) -> None:
        self.sums_S2 = None

    def of(self, sources_BS: Tensor | None, targets_BT: Tensor | None) -> Callable[[Tensor], None] | None:
        """A function to call with the nats of each target of this micro-batch, [N]. Stages of a pipeline before the last never
        call it, and their sums stay 0. Raises UserError where rows and sources are not the same number."""
        if sources_BS is None or targets_BT is None or not torch.is_grad_enabled():
            return None
        if len(sources_BS) != len(targets_BT):
            raise UserError(
                f"a batch of {len(targets_BT)} rows, and `sources` of {len(sources_BS)}",
                "each row says which source it is of",
                "a source of batches that drops or adds rows does the same to every key of a batch, or removes `sources`",
            )
        if self.sums_S2 is None:
            self.sums_S2 = torch.zeros(sources_BS.shape[1], 2, dtype=torch.float64, device=sources_BS.device)
        sums_S2 = self.sums_S2

        def add(nats_N: Tensor) -> None:
            counted_B = (targets_BT != NOT_COUNTED).sum(1)
            rows_B2 = torch.stack((nats_N.view_as(targets_BT).double().sum(1), counted_B.double()), 1)
            sums_S2.add_(sources_BS.double().T @ rows_B2)

        return add
