"""The recipe's `objective:` section: what a step optimizes. No torch."""

from typing import Literal

from windlass.settings import Settings


class ObjectiveConfig(Settings):
    kind: Literal["pretrain", "sft"] = "pretrain"
    """pretrain: next-token prediction on every token that counts, all of a text or the answers of a chat. sft: the same, where
    every source has `format: chat`."""
