"""The one door to an optimizer: `optim.kind` made over the records of a built program."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from windlass.optim.adamw import AdamW
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.optim.groups import Parameter, trainable
from windlass.optim.muon import Muon
from windlass.optim.rules import NO_RULES, Rules


class Optimizer(Protocol):
    """Holds the trainable parameters of a program. What the loop, restore and checkpoints may know of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's form: a dict per group, with its `params` and their settings."""
        ...

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the next update; every group's scale is applied to it."""
        ...

    def step(self, norm: torch.Tensor) -> None:
        """One update by the gradients, whose norm is `norm` (0-dim, equal on all ranks), clipped to optim.max_norm; none where it
        is not finite. Then drops the gradients."""
        ...

    def lost_shares(self) -> dict[str, float]:
        """name -> share of the tensor's elements whose last counted update rounded to nothing. Collective."""
        ...

    def state_tensors(self, is_blank: bool = False) -> dict[str, torch.Tensor]:
        """All state by name, cut as the parameters are: a checkpoint keeps it, and a restore writes into it. `is_blank`: a
        restore will write all of it, so what is not there yet is made without zeros."""
        ...


class Nothing:
    """The optimizer of a rank that trains nothing: a pipeline's rank whose parameters are all frozen."""

    param_groups: list[dict[str, Any]] = []

    def set_learning_rate(self, rate: float) -> None:
        pass

    def step(self, norm: torch.Tensor) -> None:
        pass

    def lost_shares(self) -> dict[str, float]:
        return {}

    def state_tensors(self, is_blank: bool = False) -> dict[str, torch.Tensor]:
        return {}


def is_hidden(name: str, dimensions: int) -> bool:
    """Whether Muon steps the parameter of this name and number of (logical) dimensions: a matrix of a block."""
    return ".layers." in name and dimensions == 2


def make_optimizer(
    records: Sequence[Parameter],
    config: OptimConfig,
    rules: Rules = NO_RULES,
    compute: torch.dtype = torch.float32,
    storage: Storage = Storage(),  # noqa: B008  frozen
) -> Optimizer:
    """After sharding, which replaces every parameter. `rules`: of parameters named in optim.groups. `compute`: the dtype of
    matrix products, which Muon's are. `storage`: AdamW's; Muon's recipes have none."""
    if not trainable(records):
        return Nothing()
    if config.kind == "adamw":
        return AdamW(records, config, rules, storage)
    hidden: list[Parameter] = []
    rest: list[Parameter] = []
    for record in trainable(records):
        (hidden if is_hidden(record.name, len(record.logical_shape)) else rest).append(record)
    return Muon(hidden, config, rules, compute, AdamW(rest, config, rules) if rest else None)
