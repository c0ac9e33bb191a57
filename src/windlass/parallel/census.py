"""What must hold after the techniques were applied, counted. Each of these was once a silent failure in the field.

units      a wrap policy that matches nothing shards nothing, without a warning: one unit per block, and the root
dtypes     parameters of another dtype than the policy's: states and reductions would follow them
optimizer  an optimizer made before sharding holds parameters that are never used again: the loss stays constant
gradients  zero-bubble schedules with resharding lose the gradients of whole stages, with the right loss
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from windlass.errors import BadLayout
from windlass.parallel.fsdp import fsdp_units
from windlass.parallel.records import Record


def check_units(model: nn.Module, blocks: Sequence[nn.Module], records: Sequence[Record]) -> None:
    """One FSDP unit per block and one root, and no parameter left whole. Models without units pass."""
    units = fsdp_units(model)
    if units and len(units) != len(blocks) + 1:
        raise BadLayout(
            f"{len(units)} FSDP units over {len(blocks)} blocks",
            f"every block is a unit and the rest is one more: {len(blocks) + 1}",
            "shard with parallel.build only; a module that was wrapped by hand before is counted too",
        )
    whole = [record.name for record in records if units and not isinstance(record.tensor, DTensor)]
    if whole:
        raise BadLayout(
            f"{len(whole)} parameters are not sharded, the first is {whole[0]}",
            "under FSDP every parameter is a DTensor; a plain one would get no reduced gradient",
            "do not replace parameters after the model was sharded",
        )


def check_dtypes(records: Sequence[Record], stored: torch.dtype) -> None:
    """Every parameter is stored in the policy's dtype."""
    wrong = [record for record in records if record.tensor.dtype != stored]
    if wrong:
        raise BadLayout(
            f"{wrong[0].name} is {wrong[0].tensor.dtype}, and {len(wrong) - 1} more differ from {stored}",
            "all parameters are stored in the dtype of precision.policy",
            "cast the model before it is sharded",
        )


def check_optimizer(optimizer: torch.optim.Optimizer, records: Sequence[Record]) -> None:
    """The optimizer steps exactly the parameters that the program uses."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    used = {id(record.tensor) for record in records}
    if held != used:
        raise BadLayout(
            f"the optimizer holds {len(held - used)} parameters that the model does not use and misses {len(used - held)}",
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
            "this layout would train another model: report it with the recipe, or use parallel.zero=0 meanwhile",
        )
