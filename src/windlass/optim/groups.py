"""The parameter groups of an optimizer: which tensors share a rate, a decay and one foreach call.

Groups are keyed by (decay, scale of the learning rate, mesh). Whether a parameter decays is decided by its *logical* shape,
where no rule names it: a flat shard of a matrix has one dimension and would never decay (seen in the field: 0 of 20
parameters). torch cannot mix meshes in one foreach call. A frozen parameter is in no group: it has neither gradient nor state,
and even decay must not move it.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor

from windlass.optim.config import OptimConfig
from windlass.optim.rules import Rules
from windlass.ranks.owned_part import local_tensor


class Parameter(Protocol):
    """What an optimizer needs to know of one parameter (parallel's Record)."""

    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> torch.nn.Parameter: ...
    @property
    def logical_shape(self) -> torch.Size: ...
    @property
    def counted(self) -> bool: ...
    @property
    def copy(self) -> torch.nn.Parameter | None: ...


P = TypeVar("P", bound=Parameter)


def trainable(records: Sequence[P]) -> list[P]:
    """The records that are not frozen."""
    return [record for record in records if record.tensor.requires_grad]


def decay_of(record: Parameter, config: OptimConfig, rules: Rules) -> float:
    """A rule's own decay, whatever the shape; else optim.weight_decay for two or more logical dimensions, and 0 below."""
    rule = rules.get(record.name)
    if rule is not None and rule.weight_decay is not None:
        return rule.weight_decay
    return config.weight_decay if len(record.logical_shape) >= 2 else 0.0


def learning_rate_scale(record: Parameter, rules: Rules) -> float:
    rule = rules.get(record.name)
    return 1.0 if rule is None else rule.learning_rate_scale


def parameter_groups(records: Sequence[Parameter], config: OptimConfig, rules: Rules) -> list[dict[str, Any]]:
    """torch's param_groups of the trainable `records`: tensors with their weight_decay and lr, and `lr_scale` for
    set_learning_rate."""
    groups: dict[tuple[float, float, object], list[torch.nn.Parameter]] = {}
    for record in trainable(records):
        mesh = record.tensor.device_mesh if isinstance(record.tensor, DTensor) else None
        key = (decay_of(record, config, rules), learning_rate_scale(record, rules), mesh)
        groups.setdefault(key, []).append(record.tensor)
    return [
        {"params": tensors, "weight_decay": decay, "lr": config.learning_rate * scale, "lr_scale": scale}
        for (decay, scale, _), tensors in groups.items()
    ]


def write_copies(records: Sequence[Parameter]) -> None:
    """After an update, or a restore: what products read in place of the parameters follows them."""
    pairs = [(record.copy, record.tensor) for record in records if record.copy is not None]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_(
                [local_tensor(copy) for copy, _ in pairs], [local_tensor(tensor) for _, tensor in pairs]
            )


def set_learning_rate(groups: Sequence[dict[str, Any]], rate: float) -> None:
    """Sets each group's rate: the schedule's `rate` times the group's own scale."""
    for group in groups:
        group["lr"] = rate * group["lr_scale"]
