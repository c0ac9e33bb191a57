"""What optimizer, clip and checkpoint know of a parameter: they work from records alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Record:
    """One parameter of this rank. `name`: its Hugging Face name, the same in every layout. `tensor`: the parameter, a DTensor
    when it is sharded, frozen where it needs no gradient. `logical_shape`: the shape before any cut. `counted`: False for the
    second copy of a tied pair, which is stepped but neither named in files, nor counted in the norm, nor saved. `kept`: whether
    a checkpoint has it: the frozen base of an adapter is in the files that it was read from. `copy`: what products read in its
    place, in another dtype (precision/masters.py); the optimizer writes it with each update."""

    name: str
    tensor: torch.nn.Parameter
    logical_shape: torch.Size
    counted: bool = True
    kept: bool = True
    copy: torch.nn.Parameter | None = None


def local_gradients(records: Sequence[Record]) -> list[torch.Tensor]:
    """This rank's parts; frozen parameters have none."""
    gradients = [gradient for record in records if (gradient := record.tensor.grad) is not None]
    return [local_tensor(gradient) for gradient in gradients]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor this rank's part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
