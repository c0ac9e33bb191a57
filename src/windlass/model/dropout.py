"""Dropout by counter: a mask is a function of (seed, sample, site, element), and of nothing else.

Idea: hash the coordinates of each element in the *whole* tensor instead of drawing from a generator (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"). So the mask of a sample is the same on any rank, in any micro-batch, after
any restart and when a block is recomputed; a rank that holds a slice hashes the slice's own coordinates. No generator is
touched, and nothing is stored that a hash can compute again.

A batch brings one key per sample, keys_B: the hash of (seed, position of the sample in the training stream). The position
determines the step too. Keys are refined one by one, each time by a round of SplitMix64 (Steele et al. 2014):

    fold(key, number) = mix64(key + (number + 1) * golden64)       over names: the layers, a site in a layer
    fold(key, number) = mix64(key ^ number)                        over counts: layer, head, position

which leaves 64 bits per *row*. Along the row, the last coordinate c is hashed in 32 bits, where the elements are many:

    x = ((low32(row) + c) * golden32) ^ high32(row);   x ^= x >> 16;   x *= A;   x ^= x >> 15;   x *= B
    element c is kept where x, read as a signed number, is at least the p-quantile of all 32-bit numbers

lowbias32 (A, B and shifts: C. Wellons, hash-prospector) over a walk that begins at one half of the row's bits and is turned by
the other, so that two rows share a run of numbers only where all 64 bits agree. Its last xor-shift is left out: it changes the
low half of x, and the comparison depends on the high one.

Integers wrap on purpose; torch's >> keeps the sign, so shifted-in bits are masked off. int32 and int64 operations only: eager
and compiled, CPU and CUDA, and every floating dtype, see the same mask. Numbers that are counted (positions, columns) are mixed
with a key before they are multiplied: Inductor computes arange times a constant as an index that must not overflow, where C++
leaves the result undefined (torch 2.13: c * golden32 gave other masks in fp64 with 36 columns, the right ones in fp32).

Cost (measured: 2 x 1,024 x 768 fp32 elements, forward and backward, one thread of a 2-core Zen 4, CPU ms, median of 41): 15
eager, 2 compiled; torch's own dropout 13 and 31. Backward keeps the mask, one byte per element, as torch's dropout does: hashing
again instead costs 24 in eager. Compiled, and under recomputation, the mask is hashed again.

Legend: B sequences, T positions, D hidden size, C columns: the last dim of whatever is masked.
"""

from typing import Final

import torch
from torch import Tensor

GOLDEN_64: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number
GOLDEN_32: Final = 0x9E3779B9 - (1 << 32)

# The sites of dropout in a block and in the model. Their numbers are part of the mask: changing one changes every run.
ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT = 0, 1, 2
FACTORS: Final = {"q_proj": 3, "k_proj": 4, "v_proj": 5, "o_proj": 6, "gate_proj": 7, "up_proj": 8, "down_proj": 9}
LAYERS: Final = -2  # all layers' keys are folded from this
EMBEDDING: Final = -1  # as a layer: the one before layer 0; as a site in it: the only one


def _mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def fold_keys(keys: Tensor, number: Tensor | int) -> Tensor:
    """Keys of part `number` of what `keys` identifies, int64; both broadcast."""
    if isinstance(number, Tensor):
        return _mix64(keys ^ number)
    return _mix64(keys + (((number + 1) * GOLDEN_64 + 2**63) % 2**64 - 2**63))  # an int does not wrap by itself


def layer_keys(keys_B: Tensor, layers: Tensor) -> Tensor:
    """keys_B [B] and layer numbers [L] of the whole model -> [L, B]."""
    return fold_keys(fold_keys(keys_B, LAYERS), layers[:, None])


def row_keys(keys_B: Tensor, site: int, *coordinates: Tensor) -> Tensor:
    """[B, *len of each coordinate] int64: one key per row. `coordinates`: 1-dim integers, positions in the whole tensor."""
    rows = fold_keys(keys_B, site)
    for coordinate in coordinates:
        rows = fold_keys(rows[..., None], coordinate)
    return rows


def keep_mask(rows: Tensor, columns_C: Tensor, probability: float) -> Tensor:
    """rows [...] int64, columns [C] integers -> bool [..., C]: False with `probability`, each element independently."""
    low, high = rows.to(torch.int32)[..., None], (rows >> 32).to(torch.int32)[..., None]
    x = (low + columns_C.to(torch.int32)) * GOLDEN_32 ^ high
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x >= round(probability * 2**32) - 2**31


def dropout(
    x_BTD: Tensor,
    probability: float,
    keys_B: Tensor | None,
    site: int,
    positions_T: Tensor | None = None,
    columns_D: Tensor | None = None,
) -> Tensor:
    """x with each element zeroed with `probability` and the others scaled by 1 / (1 - probability).

    keys_B: of this layer; None drops nothing. A rank that holds a slice gives positions_T or columns_D: the positions of its
    elements in the whole tensor. Default: from 0.
    """
    if keys_B is None or not probability:
        return x_BTD
    if positions_T is None:
        positions_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    if columns_D is None:
        columns_D = torch.arange(x_BTD.shape[2], device=x_BTD.device, dtype=torch.int32)
    kept_BTD = keep_mask(row_keys(keys_B, site, positions_T), columns_D, probability)
    return torch.where(kept_BTD, x_BTD * (1 / (1 - probability)), 0)
