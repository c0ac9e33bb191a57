"""Which dtype stores, which computes, which reduces.

    policy             stored   computed  reduced  moments   bytes per parameter   for
                       weights  products  over                weights  moments
                                          ranks
    fp64               fp64     fp64      fp64     fp64       8        16          proofs on CPU
    fp32               fp32     fp32      fp32     fp32       4        8           the default on a CPU
    bf16               fp32     bf16      fp32     fp32       4        8           the default on GPUs since Ampere
    bf16, states bf16  fp32     bf16      fp32     bf16       4        4           models that fit no other way
    fp16               fp32     fp16      fp32     fp32       4        8           the default before Ampere; loss_scale.py
    bf16-pure          bf16     bf16      fp32     bf16       2        4           the least memory
    fp8                fp32     bf16      fp32     fp32       4        8           GPUs that have it (fp8.py): blocks' products

Gradients take as many bytes as weights. Where products are in another dtype than weights are stored in, a copy in it is made
for them: under FSDP2 that copy is what is gathered (2 bytes per parameter instead of 4), and on a rank that holds all of its
weights (one process, DDP's replicas, ranks of tp or pp without shards) it stays beside them, 2 bytes more
(precision/masters.py).

bf16 has 8 bits of mantissa: an update smaller than 1/512 of a weight is lost when it is rounded to the nearest, so the weights
that the optimizer steps stay in fp32 (Micikevicius et al., arXiv 1710.03740). bf16-pure instead rounds weights and moments
stochastically (optim/rounding). Measured at learning rate 1e-5: of weights of std 0.02, 85 % are what they were after ten steps
with rounding to the nearest, and 34 % with stochastic rounding; weights of 1.0 under a constant gradient never move with the one,
and as far as they should within 10 % in 400 steps with the other (tests/optim/test_elementwise).

`precision.output` casts what the model returns and nothing inside of it: an output dtype on every FSDP unit would hand fp32 from
block to block.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from windlass.precision.config import PrecisionConfig, Scaling

DTYPES: Final = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    states: torch.dtype
    """The dtype of the optimizer's moments."""
    gradients: torch.dtype
    """The dtype in which a rank adds up a step's gradients, where FSDP2 does not (precision/masters.py, parallel/ddp.py)."""
    output: torch.dtype | None
    """What the loss of a micro-batch is rounded to; None: left as the head sums it, in fp32 or fp64."""
    is_stochastic: bool
    """How the optimizer rounds what it stores in bf16."""
    scaling: Scaling | None = None
    """How products in fp8 are scaled; None: there are none."""

    @property
    def is_mixed(self) -> bool:
        return self.stored != self.compute

    @property
    def is_scaled(self) -> bool:
        """fp16 has 5 bits of exponent: gradients below 6e-8 would be zero without a factor."""
        return self.compute == torch.float16

    def fsdp(self) -> MixedPrecisionPolicy:
        """What FSDP2 gathers and reduces. The loss itself is summed in fp32 by the head."""
        return MixedPrecisionPolicy(
            param_dtype=self.compute if self.is_mixed else None,
            reduce_dtype=self.reduce if self.is_mixed or self.reduce != self.stored else None,
        )

    def as_output(self, loss: torch.Tensor) -> torch.Tensor:
        """A loss with the digits of `output`, in its own dtype: in that it is summed over ranks."""
        return loss if self.output is None else loss.to(self.output).to(loss.dtype)


def uniform(dtype: torch.dtype) -> Precision:
    """Everything in one dtype."""
    return Precision(dtype, dtype, dtype, dtype, dtype, None, is_stochastic=False)


def precision_of(config: PrecisionConfig) -> Precision:
    return Precision(
        stored=DTYPES[config.stored],
        compute=DTYPES[config.computed],
        reduce=DTYPES[config.reduced],
        states=DTYPES[config.kept],
        gradients=DTYPES[config.added],
        output=DTYPES[config.output] if config.output else None,
        is_stochastic=config.is_stochastic,
        scaling=config.fp8_scaling,
    )
