"""The recipe's `objective:` section: what a step optimizes. No torch."""

from typing import Literal

from windlass.settings import Settings


class ObjectiveConfig(Settings):
    kind: Literal["pretrain"] = "pretrain"
    """pretrain: next-token prediction on every token."""
