"""Next-token prediction: every target that is not ignored counts once, or with its weight."""

import torch

from windlass.data.batch_fields import NOT_COUNTED, Batch
from windlass.parallel.program import Program


class Pretrain:
    def weigh(self, batches: list[Batch], program: Program) -> tuple[list[Batch], torch.Tensor]:
        """-> the batches, and the number of counted targets over all ranks (0-dim, on the device): of weights their sum, so
        that a loss is a mean by weight."""
        counts = [counted_targets(batch) for batch in batches]
        local = counts[0] if len(counts) == 1 else torch.stack(counts).sum()
        return batches, program.mesh.sum_over_batch(local)

    def figures(self) -> dict[str, torch.Tensor]:
        return {}


def counted_targets(batch: Batch) -> torch.Tensor:
    """How many targets of a batch count, by their weights where it has some: the head's loss is a sum by weight then."""
    is_counted_BT = batch["targets"] != NOT_COUNTED
    if "percent" not in batch:
        return is_counted_BT.sum()
    return batch["percent"].where(is_counted_BT, 0).sum().double() / 100
