"""NF4: a matrix in four bits per element, as two plain tensors. It is frozen; a product makes it anew each time it is used.

    codes   [out, in / 2]   uint8, two elements per byte: which of 16 levels
    scales  [out, in / 64]  bf16, the largest magnitude of 64 consecutive elements of a row

    W[o, i] = LEVELS[code] * scale                     0.5 + 2 / 64 = 0.53125 bytes per element

The levels are quantiles of a normal distribution, scaled to [-1, 1] with an exact zero, so that each is used about equally often
by weights that are drawn from one. Blocks are parts of a row: rows may be cut anywhere, columns at multiples of 64. What a rank
quantises of its part is its part of the quantised whole, byte for byte.

Backward needs W only for the gradient of x, and makes it a second time: autograd would keep every dequantised matrix of the
model until its backward, 2 bytes per element in bf16.

A second quantisation of the scales (the paper's) would save 0.014 bytes per element; its blocks of 256 scales cross rows, so that
no cut of rows would be legal.

Source: Dettmers et al., QLoRA, arXiv 2305.14314, section 3 and appendix E.
"""

import itertools
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from windlass.model.lora.adapter import BLOCK

LEVELS: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
MIDDLES: Final = tuple((low + high) / 2 for low, high in itertools.pairwise(LEVELS))


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] in any floating dtype -> codes, scales. Each element takes the level nearest to it."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1).to(torch.bfloat16)
    unit = blocks / scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    codes = torch.bucketize(unit, torch.tensor(MIDDLES, device=weight.device)).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] << 4 | codes[..., 1::2], scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """-> [out, in] in `dtype`, in which level and scale are multiplied."""
    levels = torch.tensor(LEVELS, dtype=dtype, device=codes.device)
    index = torch.stack((codes >> 4, codes & 15), -1).flatten(-2).to(torch.int32)
    return (levels[index].unflatten(-1, (-1, BLOCK)) * scales.to(dtype)[..., None]).flatten(-2)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return functional.linear(x, dequantize(codes, scales, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        codes, scales = ctx.saved_tensors
        return grads[0] @ dequantize(codes, scales, grads[0].dtype), None, None


def product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x W^T in x's dtype. Kept for backward: codes and scales, which are there anyway."""
    out: Tensor = _Product.apply(x, codes, scales)
    return out
