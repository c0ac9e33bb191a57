"""What the optimizer, the clip and the checkpoint may know of a parameter: they work from records alone."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Record:
    """One parameter of this rank. `name`: its Hugging Face name, the same in every layout. `tensor`: the parameter, a DTensor
    when it is sharded. `logical_shape`: the shape before any cut. `counted`: False for the second copy of a tied pair, which
    is stepped but neither named in files, nor counted in the norm, nor saved."""

    name: str
    tensor: torch.nn.Parameter
    logical_shape: torch.Size
    counted: bool = True
