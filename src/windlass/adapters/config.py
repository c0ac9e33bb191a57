"""The recipe's `adapter:` section: low-rank factors that are trained in place of the model's matrices. No torch."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field, field_validator

from windlass.errors import UserError
from windlass.other_names.target_names import listed_targets
from windlass.settings import Settings, Violation, Violations


class AdapterConfig(Settings):
    kind: Literal["none", "lora"] = "none"
    """none: train all parameters. lora: train two small factors beside each of the chosen matrices; the model is frozen."""
    rank: int = Field(16, ge=1)
    """Rows of A and columns of B. The run trains rank x (inputs + outputs) numbers per matrix."""
    alpha: float = Field(32.0, gt=0)
    """The product of the factors is multiplied by alpha / rank, so that the learning rate need not follow the rank."""
    rank_stabilized: bool = False
    """Multiply by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732): for ranks of 64 and more."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Probability with which an element of A's input is zeroed in training; the matrix itself gets all of its input. 0.05 or
    0.1 is usual for small data sets."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """The matrices that get factors: `all-linear` is every matrix of attention and MLP, but not head and experts. Or names such
    as [q_proj, v_proj], the last parts of Hugging Face's names."""
    base: Literal["plain", "nf4"] = "plain"
    """How the matrices of attention and MLP are stored. plain: in the dtype that computes. nf4: in four bits (QLoRA), 0.53
    bytes per parameter."""
    from_: str | None = Field(None, alias="from")
    """A PEFT directory (adapter_config.json, adapter_model.safetensors). A new run begins with its factors, and with the
    parameters that it holds whole (modules_to_save)."""
    also_train: list[str] = []
    """Patterns of the model's own parameters that are trained in full beside the factors, such as ["*norm*"]. An exported
    adapter holds them too."""

    @field_validator("targets", mode="before")
    @classmethod
    def _a_list(cls, value: object) -> object:
        if isinstance(value, str) and value != "all-linear":
            rule = "targets are `all-linear`, or a list of the last parts of names"
            raise Violations([UserError(f"adapter.targets={value}", rule, f"use {listed_targets(value)}")])
        return value

    @field_validator("rank", mode="before")
    @classmethod
    def _some_rank(cls, value: object) -> object:
        if value == 0:
            rule = "A has `rank` rows and B as many columns: at least 1"
            change = "use 8 or 16, or leave the section `adapter` out to train all parameters"
            raise Violations([UserError("adapter.rank=0", rule, change)])
        return value

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (self._nothing_without_an_adapter(), self._some_target())

    def _nothing_without_an_adapter(self) -> Iterator[UserError]:
        fields = type(self).model_fields
        changed = [name for name in sorted(self.model_fields_set) if getattr(self, name) != fields[name].get_default()]
        if self.kind == "none" and changed:
            yield UserError(
                ", ".join(f"adapter.{fields[name].alias or name}" for name in changed) + " with adapter.kind=none",
                "without an adapter all parameters are trained, and no matrix carries factors",
                "set adapter.kind=lora, or remove the rest of the section",
            )

    def _some_target(self) -> Iterator[UserError]:
        if not self.targets:
            yield UserError(
                "adapter.targets=[]",
                "an adapter trains factors of at least one matrix",
                "use adapter.targets=all-linear, or names such as [q_proj, v_proj]",
            )

    @property
    def begins_as_base(self) -> bool:
        """Whether a model with a new adapter is its base: B of the factors begins at 0, and nothing else is trained."""
        return self.kind != "none" and self.from_ is None and not self.also_train

    @property
    def scale(self) -> float:
        """What the factors' product is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)
