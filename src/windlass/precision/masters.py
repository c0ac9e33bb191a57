"""Masters: one process that computes in 16 bits, with nothing of FSDP's between the weights and the products.

The model's parameters are in the computing dtype. Each has a master in fp32, which the optimizer steps, clip and checkpoints
read, and whose gradient is added up in fp32 (or, with `precision.gradients: bf16`, in bf16):

    master fp32 --optimizer's own pass--> parameter bf16 --products--> gradient bf16 --added--> master's gradient fp32

Kept, bytes per parameter: 4 of the master, 2 of the parameter, 4 of the gradient (2), 8 of AdamW's moments. FSDP2 would hold the
2 only while a unit is gathered.

Moved, bytes per parameter and micro-batch: a product writes its gradient (2), which is read and added to the sum (2 + 4 + 4), 12
in all; in bf16 2 + (2 + 2 + 2) = 8. The first micro-batch of a step has no sum to read: 8 and 2. No weight is cast inside a
micro-batch; the optimizer writes the parameter once per step (2). FSDP2 on one rank moves 55.7: it casts and copies every weight,
in backward again, and divides every gradient by 1.0. Autocast moves 25.9, and keeps the residual stream in fp32. (Counted on
torch 2.13 by `python benchmarks/step_bytes.py`.)

Why the gradient is right: nothing is summed over ranks, and the loss is divided by the count before backward. The numbers are
FSDP2's on one rank, bit for bit: the same casts, and the same sums in fp32.

Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from windlass.precision.policy import Precision


def has_masters(world: int, precision: Precision, zero: int, is_offloaded: bool) -> bool:
    """One process that computes in 16 bits from weights in fp32. With zero 0 autocast does it, offloaded FSDP2."""
    is_wide = precision.stored == torch.float32 and precision.is_mixed
    return world == 1 and is_wide and zero != 0 and not is_offloaded


def apply_masters(model: nn.Module, precision: Precision) -> dict[str, nn.Parameter]:
    """Makes each parameter that is stored in fp32 one of the computing dtype, in place -> its master, by name, with the memory
    that the parameter had. Both are without values: fill the masters, then `fill_copies`. A frozen base has none: it is stored
    as it computes."""
    masters = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype == precision.stored:
            masters[name] = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            masters[name].grad_dtype = precision.gradients
            parameter.data = torch.empty_like(parameter, dtype=precision.compute)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_hand_over, masters[name], precision.gradients))
    return masters


def _hand_over(master: nn.Parameter, dtype: torch.dtype, parameter: torch.Tensor) -> None:
    """Adds a micro-batch's gradient to the master's, and frees it."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(dtype)
    else:
        master.grad.add_(gradient)


@torch.no_grad()
def fill_copies(named: Mapping[str, torch.Tensor], masters: Mapping[str, nn.Parameter]) -> None:
    """The values of the masters into the parameters of these names."""
    for name, master in masters.items():
        named[name].copy_(master)
