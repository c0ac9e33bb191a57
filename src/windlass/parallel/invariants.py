"""Counts what must hold once the techniques are applied. Each of these was once a silent failure in the field.

units      a wrap policy that matches nothing shards nothing, without a warning: a unit per `blocks_per_unit` blocks, and the ends
dtypes     parameters of another dtype than the policy's: states and reductions would follow them
optimizer  an optimizer made before sharding holds parameters that are never used again: the loss stays constant
gradients  zero-bubble schedules with resharding lose the gradients of whole stages, with the right loss
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from windlass.errors import BadLayout
from windlass.model.lora.adapter import CODES, SCALES
from windlass.parallel.fsdp import dealt_experts, fsdp_units
from windlass.parallel.records import Record
from windlass.precision.policy import Precision


def check_units(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    end: Sequence[nn.Module],
    records: Sequence[Record],
    blocks_per_unit: int = 1,
) -> None:
    """One FSDP unit per `blocks_per_unit` blocks, one per sparse layer whose experts are dealt out, one of the `end`, and one
    root, and no parameter left whole. Models without units pass."""
    units, dealt = fsdp_units(model), len(dealt_experts(model))
    expected = -(-len(blocks) // blocks_per_unit) + bool(end) + 1 + dealt
    if units and len(units) != expected:
        raise BadLayout(
            f"{len(units)} FSDP units over {len(blocks)} blocks",
            f"blocks form units of {blocks_per_unit}, and the rest is {'two' if end else 'one'} more"
            + f", and the experts of {dealt} layers one each" * (dealt > 0)
            + f": {expected}",
            "shard with parallel.build only; a module that was wrapped by hand before is counted too",
        )
    whole = [record.name for record in records if units and not isinstance(record.tensor, DTensor)]
    if whole:
        raise BadLayout(
            f"{len(whole)} parameters are not sharded, the first is {whole[0]}",
            "under FSDP every parameter is a DTensor; a plain one would get no reduced gradient",
            "do not replace parameters after the model was sharded",
        )


def check_dtypes(records: Sequence[Record], precision: Precision) -> None:
    """Every parameter is stored in the policy's dtype; an adapter's frozen base in the one that computes, or in NF4."""
    wrong = [record for record in records if record.tensor.dtype not in _allowed(record, precision)]
    if wrong:
        raise BadLayout(
            f"{wrong[0].name} is {wrong[0].tensor.dtype}, and {len(wrong) - 1} more differ from {precision.stored}",
            "all parameters are stored in the dtype of precision.policy",
            "cast the model before it is sharded",
        )


def _allowed(record: Record, precision: Precision) -> tuple[torch.dtype, ...]:
    if record.kept:
        return (precision.stored,)
    return {CODES: (torch.uint8,), SCALES: (torch.bfloat16,)}.get(record.name.rpartition(".")[2], (precision.compute,))


def check_optimizer(groups: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> None:
    """`groups`: the optimizer's param_groups. They hold exactly the parameters that the program trains."""
    held = {id(parameter) for group in groups for parameter in group["params"]}
    used = {id(record.tensor) for record in records if record.tensor.requires_grad}
    if held != used:
        raise BadLayout(
            f"the optimizer holds {len(held - used)} parameters that the model does not train and misses {len(used - held)}",
            "the optimizer is made after sharding, from program.records(): sharding replaces every parameter",
            "make the optimizer from the records of the built program",
        )


def check_gradients(records: Sequence[Record]) -> None:
    """After the first backward every trainable parameter has a gradient."""
    missing = [record.name for record in records if record.tensor.requires_grad and record.tensor.grad is None]
    if missing:
        raise BadLayout(
            f"{len(missing)} parameters got no gradient in the first step, the first is {missing[0]}",
            "every trainable parameter takes part in the loss",
            "this layout would train another model: report it with the recipe, or use parallel.zero=0 until it is fixed",
        )
