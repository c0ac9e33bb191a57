"""What a recipe may set about the optimizer. No torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from windlass.errors import UserError
from windlass.settings import Settings


class OptimConfig(Settings):
    learning_rate: float = Field(3e-4, gt=0)
    """The highest learning rate, reached after warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up. cosine: half a cosine down to the floor. wsd: constant, then linearly to the floor over the last
    `decay_fraction` of the steps. constant: no decay."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    floor: float = Field(0.1, ge=0, le=1)
    """The last learning rate, as a fraction of `learning_rate`."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """wsd only: the share of all steps that decays."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of every parameter of two or more dimensions (logical shape); norms and biases are not decayed."""
    max_norm: float = Field(1.0, gt=0)
    """Gradients are scaled so that their global norm is at most this."""
    kernel: Literal["fused", "foreach"] = "fused"
    """fused: one kernel, and a non-finite step is skipped on the device. foreach: torch's multi-tensor form; a non-finite
    step costs one scalar read per step to find."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        default = type(self).model_fields["decay_fraction"].default
        if self.decay_fraction != default and self.schedule != "wsd":
            raise UserError(
                f"optim.decay_fraction={self.decay_fraction} with optim.schedule={self.schedule}",
                "decay_fraction shapes the wsd schedule only; here it would have no effect",
                "remove it, or set optim.schedule=wsd",
            )
        return self
