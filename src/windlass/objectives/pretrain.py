"""What a step optimises: which targets count, with which weight, and over how many the loss is averaged.

The loop asks an objective to weigh a global batch before it is run; every objective is another data format and another
count, never another loop.
"""

import torch

from windlass.model.loss import IGNORED
from windlass.parallel.program import Batch, Program


class Pretrain:
    """Next-token prediction: every target that is not ignored counts once."""

    def weigh(self, batches: list[Batch], program: Program) -> tuple[list[Batch], torch.Tensor]:
        """-> the batches, and the number of counted targets over all ranks (0-dim, on the device)."""
        counts = [(batch["targets"] != IGNORED).sum() for batch in batches]
        local = counts[0] if len(counts) == 1 else torch.stack(counts).sum()
        return batches, program.mesh.sum_over_batch(local)
