"""Masters: a rank that computes in 16 bits, whose parameters no shard cuts, with nothing of FSDP's between the weights and the
products: one process, DDP's replicas (zero 0), and ranks of tp and pp without replicas and shards.

The model's parameters are in the computing dtype. Each has a master in fp32, which the optimizer steps, clip and checkpoints
read, and whose gradient is added up in fp32 (or, with `precision.gradients: bf16`, in bf16):

    master fp32 --optimizer's own pass--> parameter bf16 --products--> gradient bf16 --added--> master's gradient fp32

Kept, bytes per parameter: 4 of the master, 2 of the parameter (1 in fp8: fp8_weights.py), 4 of the gradient (2), 8 of AdamW's
moments. FSDP2 would hold the
2 only while a unit is gathered.

Moved, bytes per parameter and micro-batch: a product writes its gradient (2), which is read and added to the sum (2 + 4 + 4), 12
in all; in bf16 2 + (2 + 2 + 2) = 8. The first micro-batch of a step has no sum to read: 8 and 2. No weight is cast inside a
micro-batch; the optimizer writes the parameter once per step (2). FSDP2 on one rank moves 47.7: it casts and copies every weight,
in backward again. torch.autocast over weights in fp32, which is not used, moves 25.9, and keeps the stream in fp32. (Counted on
torch 2.13 by `python benchmarks/step_bytes.py`.) On a GPU the products of one process's blocks add to the sums themselves: 8
bytes, and 4 once per step (sums.py).

Why the gradient is right: the loss is divided by the count before backward, and either no other rank has a part of the gradient,
or the replicas' sums are added, once per step (parallel/ddp.py). The numbers are FSDP2's on one rank, bit for bit: the same
casts, and the same sums in fp32. (Where products add, nothing is rounded to 16 bits.)
Over tp parameters are DTensors, and so are masters. The gradient of one that every tensor rank holds whole is a part of a sum
(Partial): parts are added up in fp32, and the program sums them over tp once per step (parallel/ddp.py), where FSDP2 sums each
micro-batch's in 16 bits.

Source: Micikevicius et al., Mixed Precision Training, arXiv 1710.03740.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.precision.fp8 import codes_of
from windlass.precision.policy import Precision
from windlass.ranks.owned_part import local_tensor

COMPILED_FROM: Final = 1 << 20
"""Elements. Smaller tensors are torch's own kernels' work: torch.compile takes its blocks from the first tensor that it sees."""


class Slot(NamedTuple):
    """Where a parameter's gradient is added up in a bucket (parallel/ddp.py), and what is called after each micro-batch's was
    added."""

    total: Tensor
    added: Callable[[], Any]


NO_SLOTS: Final[Mapping[str, Slot]] = MappingProxyType({})


def has_masters(num_ranks: int, precision: Precision, zero: int, is_offloaded: bool) -> bool:
    """Where 16 bits compute from weights in fp32, and this rank holds all of them: no other has a part or a replica
    (`num_ranks`: of mesh.fsdp), or zero is 0. What is offloaded FSDP2 casts."""
    is_wide = precision.stored == torch.float32 and precision.is_mixed
    return (num_ranks == 1 or zero == 0) and is_wide and not is_offloaded


def apply_masters(
    model: nn.Module,
    precision: Precision,
    base: Collection[str] = (),
    is_compiled: bool = False,
    slots: Mapping[str, Slot] = NO_SLOTS,
) -> dict[str, nn.Parameter]:
    """The master of each parameter of `model`, by name, cut as the parameter is; `model` is in the computing dtype. Both are
    without values: fill the masters, then `fill_copies`. A frozen `base` has none. `is_compiled`: sums of 16-bit gradients in
    fp32 are added by a compiled kernel. `slots`: by name; without one a gradient has memory of its own."""
    masters = {}
    for name, parameter in model.named_parameters():
        if name not in base:
            in_fp8 = codes_of(parameter)
            whole = torch.empty_like(parameter.detach() if in_fp8 is None else in_fp8[0], dtype=precision.stored)
            masters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            masters[name].grad_dtype = precision.gradients
            if parameter.requires_grad:
                add = compiled_add() if is_compiled and local_tensor(parameter).numel() >= COMPILED_FROM else add_to
                hand_over = partial(_hand_over, masters[name], precision.gradients, add, slots.get(name))
                parameter.register_post_accumulate_grad_hook(hand_over)
    return masters


def _hand_over(
    master: nn.Parameter,
    dtype: torch.dtype,
    add: Callable[[Tensor, Tensor, bool], None],
    slot: Slot | None,
    parameter: Tensor,
) -> None:
    """Adds a micro-batch's gradient to the master's, and frees it. None: its product has added it (sums.py)."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return
    if gradient.dtype == dtype and slot is None:
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        return
    is_first = master.grad is None
    if master.grad is None:
        master.grad = _empty_like(gradient, dtype) if slot is None else slot.total
    # flat: one graph for matrices of any sizes
    add(local_tensor(master.grad).view(-1), local_tensor(gradient).view(-1), is_first)
    if slot is not None:
        slot.added()


def hand_over_rest(masters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Hands over gradients that no hook saw: torch's zero-bubble schedules write `.grad` themselves."""
    for name, parameter in model.named_parameters():
        if name in masters and parameter.grad is not None:
            dtype = masters[name].grad_dtype
            assert dtype is not None
            _hand_over(masters[name], dtype, add_to, None, parameter)


def _empty_like(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor that is placed as the gradient is: a part of a sum over `tp` would be the sum by torch's empty_like."""
    if not isinstance(gradient, DTensor):
        return torch.empty_like(gradient, dtype=dtype)
    empty, mesh, placements = (
        torch.empty_like(local_tensor(gradient), dtype=dtype),
        gradient.device_mesh,
        gradient.placements,
    )
    return DTensor.from_local(empty, mesh, placements, run_check=False, shape=gradient.shape, stride=gradient.stride())


def add_to(total: Tensor, gradient: Tensor, is_first: bool) -> None:
    """total = or += gradient, in total's wider dtype."""
    if is_first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


@cache
def compiled_add() -> Callable[[Tensor, Tensor, bool], None]:
    """`add_to` as a kernel of Triton's, with the same bits. torch's own kernels for two dtypes are slower: 2.8 TB/s where this
    one reaches 3.8 (H200, `python benchmarks/gpu/ground_truth.py --only sums`)."""
    return torch.compile(add_to, dynamic=True, fullgraph=True)


@torch.no_grad()
def fill_copies(named: Mapping[str, torch.Tensor], masters: Mapping[str, nn.Parameter]) -> None:
    """The values of the masters into the parameters of these names. (Those in eight bits fp8_weights.py casts.)"""
    for name, master in masters.items():
        if codes_of(named[name]) is None:
            named[name].copy_(master)
