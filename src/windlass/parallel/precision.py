"""Which dtype stores, which computes, which reduces.

    policy   stored (master, optimizer states)   compute (matrix products)   reduction of gradients
    fp64     fp64                                fp64                        fp64
    fp32     fp32                                fp32                        fp32
    bf16     fp32                                bf16                        fp32

bf16 has 8 bits of mantissa: an update smaller than 1/256 of a weight is lost, so the weights that the optimizer steps stay
in fp32 (Micikevicius et al., arXiv 1710.03740) and a bf16 copy is made for the products. Under FSDP2 that copy is what is
gathered (2 bytes per parameter instead of 4); under DDP autocast makes it. Sums over ranks are in fp32.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from windlass.parallel.config import PrecisionConfig


@dataclass(frozen=True)
class Precision:
    stored: torch.dtype
    compute: torch.dtype

    @property
    def is_mixed(self) -> bool:
        return self.stored != self.compute

    def fsdp(self) -> MixedPrecisionPolicy:
        """What FSDP2 gathers and reduces. The loss itself is summed in fp32 by the head."""
        if not self.is_mixed:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.stored)

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """For modules that FSDP2 does not wrap: products in the compute dtype."""
        return torch.autocast(device_type, self.compute) if self.is_mixed else nullcontext()


def precision_of(config: PrecisionConfig) -> Precision:
    stored = torch.float64 if config.policy == "fp64" else torch.float32
    return Precision(stored, torch.bfloat16 if config.policy == "bf16" else stored)
