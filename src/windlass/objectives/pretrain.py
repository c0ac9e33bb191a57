"""Next-token prediction: every target that is not ignored counts once."""

import torch

from windlass.model.head.loss import IGNORED
from windlass.parallel.program import Batch, Program


class Pretrain:
    def weigh(self, batches: list[Batch], program: Program) -> tuple[list[Batch], torch.Tensor]:
        """-> the batches, and the number of counted targets over all ranks (0-dim, on the device)."""
        counts = [(batch["targets"] != IGNORED).sum() for batch in batches]
        local = counts[0] if len(counts) == 1 else torch.stack(counts).sum()
        return batches, program.mesh.sum_over_batch(local)

    def figures(self) -> dict[str, torch.Tensor]:
        return {}
