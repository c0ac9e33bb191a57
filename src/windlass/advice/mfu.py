"""What a share of the peak means: MFU = tokens/s per device x FLOPs per token / peak FLOP/s.

The numerator is the work that the maths needs: causal attention, nothing that is computed twice. The largest matrix products
reach 790 of an H200's 989 TFLOP/s (the rate that benchmarks/gpu/floor reckons with), so 80 % is the limit of products alone. With
attention, elementwise kernels and the optimizer 64 to 70 % is the limit of a step in bf16 (a model of the step), and above 73 %
something is counted wrongly. With `recompute: full` the device does up to a third more than the MFU shows.
"""

from dataclasses import dataclass
from typing import Final

LEVELS: Final = (
    (0.2, "something is in the way: data, reads, micro-batches too small for the device, or products in fp32"),
    (0.3, "usual without parallel.compile, with recompute: full, or for models under a billion parameters"),
    (0.4, "usual for trainers that are set well: bf16, compiled, little recomputed"),
    (0.5, "what the best published runs of dense models reach in bf16 on one host"),
)
LIMIT: Final = 0.73


@dataclass(frozen=True)
class Level:
    """What a run's model does on a device at one MFU. `hours`: of one device, for a billion tokens."""

    mfu: float
    tokens_per_s: float
    hours: float
    meaning: str


def levels(flops_per_token: float, peak_flops: float) -> list[Level]:
    """Per device."""
    rates = [(share, share * peak_flops / flops_per_token, meaning) for share, meaning in LEVELS]
    return [Level(share, rate, 1e9 / rate / 3600, meaning) for share, rate, meaning in rates]
