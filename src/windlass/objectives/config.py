"""The recipe's `objective:` section: what a step optimizes. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from pydantic import Field

from windlass.errors import UserError
from windlass.settings import Settings, Violation

BETA: Final = 0.1
TARGET_MARGIN: Final = 0.5
"""TRL's beta and simpo_gamma, where a recipe gives none."""
PreferenceLoss = Literal["sigmoid", "ipo", "robust", "hinge", "simpo", "orpo"]
WITHOUT_REFERENCE: Final = ("simpo", "orpo")


class ObjectiveConfig(Settings):
    kind: Literal["pretrain", "sft", "dpo"] = "pretrain"
    """pretrain: next-token prediction on every token that counts: all tokens of a text, or the answers of a chat. sft: the
    same, if every source has `format: chat`. dpo: of two answers to a prompt (`format: preference`) the chosen answer becomes
    more likely than the rejected one, compared with the model that the run began with."""
    loss: PreferenceLoss | None = None
    """Loss of dpo. sigmoid (default): direct preference optimization (arXiv 2305.18290). ipo: the squared distance of means per
    token from a target (2310.12036). robust: some labels are wrong (2403.00409). hinge: SLiC's (2309.06657). simpo: means per
    token, without a reference model (2405.14734). orpo: supervised finetuning on the chosen answers and the odds of the two,
    also without a reference model (2403.07691)."""
    beta: float | None = Field(None, gt=0)
    """With dpo, default 0.1: how much a difference of log-probabilities weighs. With a smaller value the model may go further
    from where it began."""
    label_smoothing: float | None = Field(None, gt=0, lt=0.5)
    """With dpo and `loss: robust`: the share of pairs whose answers are assumed to be the wrong way round."""
    target_margin: float | None = Field(None, ge=0)
    """With dpo and `loss: simpo`, default 0.5: by how much the chosen answer's reward must be larger (gamma)."""

    def rules(self) -> Sequence[Iterator[Violation]]:
        return self._of_dpo(), self._of_its_loss()

    def _of_dpo(self) -> Iterator[UserError]:
        given = [
            name for name in ("loss", "beta", "label_smoothing", "target_margin") if getattr(self, name) is not None
        ]
        if self.kind != "dpo" and given:
            yield UserError(
                f"{', '.join(f'objective.{name}' for name in given)} with objective.kind={self.kind}",
                "these settings are of preferences, whose sources have `format: preference`",
                "set objective.kind=dpo, or leave them out",
            )

    def _of_its_loss(self) -> Iterator[UserError]:
        if self.kind != "dpo":
            return
        for name, loss in (("label_smoothing", "robust"), ("target_margin", "simpo")):
            value = getattr(self, name)
            if value is not None and self.preference_loss != loss:
                yield UserError(
                    f"objective.{name}={value:g} with objective.loss={self.preference_loss}",
                    f"`{name}` is a setting of objective.loss={loss} alone",
                    f"set objective.loss={loss}, or leave it out",
                )
        if self.preference_loss == "robust" and self.label_smoothing is None:
            yield UserError(
                "objective.loss=robust without objective.label_smoothing",
                "robust assumes a share of pairs whose answers are the wrong way round; with none it is sigmoid",
                "give the share, such as objective.label_smoothing=0.1",
            )

    def errors_beside(
        self, sources: Mapping[str, str], sets: Mapping[str, str], micro_batch: int, scores_growing_data: bool
    ) -> Iterator[UserError]:
        """What the rest of a recipe does not allow. `sources`, `sets`: the format of each by its name; `scores_growing_data`:
        whether all pairs are scored before step 0, while they are still written."""
        formats = {**sources, **sets}
        texts = [name for name, format in sources.items() if format != "chat"]
        others = [name for name, format in formats.items() if format != "preference"]
        if self.kind == "sft" and texts:
            yield UserError(
                f"objective.kind=sft, and {texts[0]} has `format: {formats[texts[0]]}`",
                "supervised finetuning learns the answers of conversations (`format: chat`)",
                "set `format: chat` for every source, or use objective.kind=pretrain",
            )
        if self.kind != "dpo":
            return
        if others:
            yield UserError(
                f"objective.kind=dpo, and {others[0]} has `format: {formats[others[0]]}`",
                "of a pair one answer is preferred to another (`format: preference`: prompt, chosen, rejected)",
                "set `format: preference` for every source, or use objective.kind=sft or pretrain",
            )
        if micro_batch % 2:
            yield UserError(
                f"run.micro_batch={micro_batch} with objective.kind=dpo",
                "a pair is two sequences, one for each answer, which are in one micro-batch",
                f"use an even number, such as run.micro_batch={micro_batch + 1}",
            )
        if scores_growing_data:
            yield UserError(
                "objective.kind=dpo with data.order.first_epoch=written",
                "every pair is scored by the model that the run begins with, before step 0: the data is whole then",
                "leave data.order.first_epoch out; or train an adapter that begins at its base",
            )

    @property
    def preference_loss(self) -> PreferenceLoss:
        return self.loss or "sigmoid"

    @property
    def unit(self) -> Literal["targets", "pairs"]:
        """What a loss is a mean over: targets, in nats, or pairs."""
        return "pairs" if self.kind == "dpo" else "targets"

    @property
    def preference_beta(self) -> float:
        return BETA if self.beta is None else self.beta

    @property
    def preference_margin(self) -> float:
        return TARGET_MARGIN if self.target_margin is None else self.target_margin

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model that the run began with."""
        return self.kind == "dpo" and self.preference_loss not in WITHOUT_REFERENCE
