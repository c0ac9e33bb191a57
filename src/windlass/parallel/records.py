"""What optimizer, clip and checkpoint know of a parameter (they work from records alone), and which gradients share a bucket."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch.nn import Parameter

from windlass.precision.fp8 import codes_of
from windlass.ranks.owned_part import local_tensor
from windlass.units import MIB


@dataclass(frozen=True)
class Record:
    """One parameter of this rank. `name`: its Hugging Face name, the same in every layout. `tensor`: the parameter, a DTensor
    when it is sharded, frozen where it needs no gradient. `logical_shape`: the shape before any cut. `counted`: False for the
    second copy of a tied pair, which is stepped but neither named in files, nor counted in the norm, nor saved. `kept`: whether
    a checkpoint has it: the frozen base of an adapter is in the files that it was read from. `copy`: what products read in its
    place, in another dtype (precision/masters.py); the optimizer writes it with each update. `codes`: what they read, or gather,
    in eight bits (precision/fp8_weights.py), written before the next forward."""

    name: str
    tensor: torch.nn.Parameter
    logical_shape: torch.Size
    counted: bool = True
    kept: bool = True
    copy: torch.nn.Parameter | None = None
    codes: torch.Tensor | None = None

    @property
    def copies(self) -> list[torch.Tensor]:
        """What this rank keeps of the parameter beside `tensor`."""
        return [one for one in (self.copy, self.codes) if one is not None]


NO_MASTERS: Final[Mapping[str, Parameter]] = MappingProxyType({})


def parameter_record(
    name: str, parameter: Parameter, base: Collection[str], masters: Mapping[str, Parameter]
) -> Record:
    """The record of a parameter of the model, which has a master or none. `base`: parameters that no checkpoint keeps."""
    copy = parameter if name in masters and codes_of(parameter) is None else None
    tensor, shape = masters.get(name, parameter), torch.Size(parameter.shape)
    return Record(name, tensor, shape, kept=name not in base, copy=copy)


def local_gradients(records: Sequence[Record]) -> list[torch.Tensor]:
    """This rank's parts; frozen parameters have none."""
    gradients = [gradient for record in records if (gradient := record.tensor.grad) is not None]
    return [local_tensor(gradient) for gradient in gradients]


def in_buckets(sizes: Iterable[int], bucket_mib: float) -> Iterator[slice]:
    """Which gradients share a bucket. `sizes`: bytes of each, as sent. A bucket ends with the one that fills it; none is cut."""
    begin = end = num_bytes = 0
    for end, size in enumerate(sizes, 1):
        num_bytes += size
        if num_bytes >= bucket_mib * MIB:
            yield slice(begin, end)
            begin, num_bytes = end, 0
    if begin < end:
        yield slice(begin, end)
