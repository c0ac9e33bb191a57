"""What a recipe may set about the optimizer. No torch."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import Field

from windlass.errors import UserError
from windlass.settings import Count, Settings, Violation

WARMUP_PART: Final = 50
MAX_WARMUP_STEPS: Final = 2000
"""`warmup_steps: auto` is a fiftieth of the run (chosen), and no more than Llama 2 took (arXiv 2307.09288)."""


class GroupConfig(Settings):
    """Settings for some parameters only. The first group that names a parameter decides for it; the rest of the model follows
    `optim`. A group that sets nothing exempts its names from the groups after it."""

    names: list[str] = Field(min_length=1)
    """Hugging Face's parameter names (for GPT-2 its own), or patterns of them: `*` matches anything, including dots."""
    learning_rate_scale: float = Field(1.0, gt=0)
    """Factor on the learning rate of every step."""
    weight_decay: float | None = Field(None, ge=0)
    """Decay of all parameters named here, including norms and biases. If not given: as `optim.weight_decay`."""
    frozen: bool = False
    """Do not train these parameters: they have no gradient and no optimizer state, and nothing is sent for them. They are saved
    and exported like the rest."""

    @property
    def effect(self) -> dict[str, object]:
        """What it sets, without the names it sets it for."""
        return self.model_dump(exclude={"names"}, exclude_defaults=True)


class MuonConfig(Settings):
    momentum: float = Field(0.95, ge=0, lt=1)
    """Share of the old momentum that remains in each step."""
    nesterov: bool = True
    """Look ahead: mix the momentum with the gradient once more before it is orthogonalised."""
    steps: int = Field(5, ge=1, le=20)
    """Newton-Schulz iterations per matrix and step; each costs three matrix products."""


class OptimConfig(Settings):
    kind: Literal["adamw", "muon"] = "adamw"
    """muon: orthogonalised momentum updates the matrices of the blocks, AdamW the rest, both at `learning_rate` (Muon's updates
    are scaled to the size of AdamW's). It halves the optimizer state of those matrices, and needs about 5 x hidden size /
    tokens per step more FLOPs."""
    learning_rate: float = Field(3e-4, gt=0)
    """The highest learning rate, reached after warm-up."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """The course of the learning rate after warm-up. cosine: half a cosine down to the floor. wsd: constant, then linear to the
    floor over the last `decay_fraction` of the steps. linear: straight down to the floor. constant: no decay."""
    warmup_steps: Annotated[Count, Field(ge=0)] | Literal["auto"] = "auto"
    """Optimizer steps over which the learning rate rises linearly from 0. auto: 2 % of the run's steps, at most 2,000; a run
    under 50 steps has no warm-up. A run that becomes longer keeps its warm-up."""
    floor: float = Field(0.1, ge=0, le=1)
    """The last learning rate, as a fraction of `learning_rate`."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """With wsd only: the share of all steps that decays."""
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
    """fused: torch's one kernel. foreach: each tensor by plain operations, the same numbers at a tenth of the speed; tensors
    that are stored in bf16 always use it. Both skip a non-finite step on the device, without a host read."""
    max_skips: int = Field(20, ge=1)
    """Steps in a row that may be skipped, because their gradient norm is not finite, before the run ends with an error; checked
    on logging steps. fp16 skips up to 16 while its loss scale falls from 65536 to 1."""
    muon: MuonConfig = MuonConfig()
    """Settings of kind muon."""
    groups: list[GroupConfig] = []
    """Learning rate, decay and freezing by parameter name."""

    def decay_steps(self, steps: int) -> int:
        """The steps at the end of a run of `steps` over which a rate decays that was constant before."""
        return max(1, round(self.decay_fraction * steps)) if self.schedule == "wsd" else 0

    def within(self, steps: int) -> Self:
        """With the warm-up of a run of `steps`, as a number."""
        if self.warmup_steps != "auto":
            return self
        share = min(steps // WARMUP_PART, MAX_WARMUP_STEPS)
        return self.changed(warmup_steps=max(0, min(share, steps - self.decay_steps(steps))))

    def errors_beside(self, is_offloaded: bool) -> Iterator[UserError]:
        """The violated rule on `parallel.offload`."""
        if self.kind == "muon" and is_offloaded:
            yield UserError(
                "optim.kind=muon with parallel.offload=true",
                "Muon multiplies matrices in every step, and offloaded ones are in host memory, for the host's cores to multiply",
                "set parallel.offload=false, or optim.kind=adamw",
            )

    def rules(self) -> Sequence[Iterator[Violation]]:
        return self._decay(), self._muon(), self._frozen()

    def _decay(self) -> Iterator[UserError]:
        default = type(self).model_fields["decay_fraction"].default
        if self.decay_fraction != default and self.schedule != "wsd":
            yield UserError(
                f"optim.decay_fraction={self.decay_fraction} with optim.schedule={self.schedule}",
                "decay_fraction shapes the wsd schedule only; here it would have no effect",
                "remove it, or set optim.schedule=wsd",
            )

    def _muon(self) -> Iterator[UserError]:
        if self.kind != "muon" and self.muon != MuonConfig():
            yield UserError(
                f"optim.muon with optim.kind={self.kind}",
                "its settings belong to Muon; here they would have no effect",
                "remove optim.muon, or set optim.kind=muon",
            )

    def _frozen(self) -> Iterator[UserError]:
        for index, group in enumerate(self.groups):
            useless = [key for key in group.effect if key != "frozen"]
            if group.frozen and useless:
                yield UserError(
                    f"optim.groups[{index}] has frozen=true with {' and '.join(f'{k}={group.effect[k]}' for k in useless)}",
                    "what is frozen is not updated: rate and decay would have no effect on it",
                    f"remove {' and '.join(useless)}, or frozen",
                )
