"""The loss scale of fp16: gradients are multiplied by it in backward and divided by it before anyone sees them.

fp16's smallest number is 6e-8, and much of a gradient is below that. With a factor S on the loss

    scaled gradient = S x gradient          S halves when one is not finite, and doubles after GROWTH_STEPS good steps in a row

Backward stays in fp16's range; a step that is not finite is skipped by the optimizer like any other. S and the counter of good
steps live on the device and follow from the gradient norm, which is one number on all ranks: they are equal everywhere, no
host reads them, and a checkpoint keeps them. S is a power of two, so scaling and unscaling round nothing.

Source: Micikevicius et al., arXiv 1710.03740; the numbers are those of torch.amp.GradScaler.
"""

from typing import Final

import torch
from torch import Tensor

FIRST_SCALE: Final = 65536.0
GROWTH_STEPS: Final = 2000


class LossScale:
    """S on `device`."""

    def __init__(self, device: torch.device):
        self.scale = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.float32, device=device)

    def unscale(self, gradients: list[Tensor]) -> None:
        """In place; what is infinite stays so. A rank that trains nothing has none."""
        if gradients:
            torch._foreach_mul_(gradients, self.scale.reciprocal())

    def adapt(self, norm: Tensor) -> None:
        """After a step whose gradient norm was `norm`."""
        is_finite = torch.isfinite(norm)
        self.good_steps.add_(1).mul_(is_finite)
        grows = self.good_steps == GROWTH_STEPS
        self.scale.mul_(torch.where(is_finite, 1.0 + grows.float(), 0.5))
        self.good_steps.mul_(~grows)

    def state_tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps}
