"""Storing fp32 numbers in bf16 without losing what is smaller than a step of bf16: stochastic rounding by counter.

bf16 keeps 8 bits of a number: neighbours of w are w/128 to w/256 apart, and round-to-nearest drops every change smaller than
half of that. Stochastic rounding rounds up or down with the probability that makes the mean right:

    bf16 is the upper half of fp32's 32 bits, so           round(x) = upper half of (bits of x + z),  z uniform in 0 .. 65535

has the mean x, exactly, for every finite x; a number that bf16 holds does not change, nor do infinities and NaN.

z is a hash of (seed, name, step, element of the *whole* tensor) and of nothing else: the same in every layout, after every
restart, and no generator is touched (counter-based, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). The
hash is lowbias32 (C. Wellons, hash-prospector) with a second key added midway, so that two streams agree only where all 64 bits
agree; one hash gives two z. Integers wrap on purpose; torch's >> keeps the sign, so shifted-in bits are masked off.

Measured (second moment of 4,000 elements, gradients of std 1, then 3,000 steps of 0.1): at beta2 0.95 the three agree
within 1e-4; at 0.99 nearest is 5 % high after the first 3,000 steps, at 0.995 9 % low after the last; at 0.999 it never
falls (1.236, where fp32 has 0.0567 and stochastic 0.0567).
Source: Gupta et al., arXiv 1502.02551; bf16 training with it: Zamirai et al., arXiv 2010.06192.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

A: Final = 0x7FEB352D
B: Final = 0x846CA68B - (1 << 32)  # as a signed number
GOLDEN: Final = 0x9E3779B9 - (1 << 32)  # 2^32 / golden ratio: steps of a counter that touch every bit


def stream_keys(seed: int, name: str) -> tuple[int, int]:
    """Two signed 32-bit keys of the tensor called `name` in a run of `seed`."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def hash32(x: Tensor, key: Tensor) -> Tensor:
    """int32 -> int32, uniform over all 32 bits for consecutive x."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * A
    x = x ^ key
    x = (x ^ ((x >> 15) & 0x1FFFF)) * B
    return x ^ ((x >> 16) & 0xFFFF)


def step_keys(keys_K2: Tensor, step: Tensor) -> Tensor:
    """Keys of K tensors [K, 2] int32 and a 0-dim counter -> their keys for that step [K, 2]."""
    return hash32(keys_K2 + step.to(torch.int32) * GOLDEN, keys_K2.flip(1))


def two_noises(elements_N: Tensor, key_2: Tensor) -> tuple[Tensor, Tensor]:
    """int32 element numbers -> two independent draws from 0 .. 65535 for each."""
    x_N = hash32(elements_N * GOLDEN + key_2[0], key_2[1])
    return x_N & 0xFFFF, (x_N >> 16) & 0xFFFF


def rounded_to(value: Tensor, dtype: torch.dtype, noise: Tensor | None) -> Tensor:
    """`value` (fp32) in `dtype`: rounded up or down by `noise` where that is bf16, to the nearest where `noise` is None."""
    if noise is None or dtype != torch.bfloat16:
        return value.to(dtype)
    return ((value.view(torch.int32) + noise) & -65536).view(torch.float32).to(dtype)


@dataclass(frozen=True)
class Numbering:
    """Which elements of the whole tensor (row-major) this rank's part holds: runs of `run`, `stride` apart, from `first` on."""

    first: int
    run: int
    stride: int

    def numbers(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The numbers of the part's elements start .. stop - 1, as int32 that wraps."""
        at_N = torch.arange(start, stop, dtype=torch.int64, device=device)
        if self.run != self.stride:
            at_N = at_N // self.run * self.stride + at_N % self.run
        return (at_N + self.first).to(torch.int32)


def numbering_of(tensor: Tensor) -> Numbering:
    """The numbering of a plain tensor, or of a DTensor that is cut along dim 0, along one further dim, or along both."""
    first, sizes = _box(tensor)
    whole = list(tensor.shape)
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    inner = [dim for dim in range(1, len(whole)) if sizes[dim] != whole[dim]]
    assert len(inner) <= 1, f"{tensor.shape} cut to {sizes}: along two inner dims"
    start = sum(one * stride for one, stride in zip(first, strides))
    if not inner:
        return Numbering(start, 1, 1)
    return Numbering(start, math.prod(sizes[inner[0] :]), math.prod(whole[inner[0] :]))


def _box(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Where this rank's part begins and how long it is, per dim. torch cuts as torch.chunk does: pieces of ceil(n / ranks)."""
    first, sizes = [0] * tensor.dim(), list(tensor.shape)
    if isinstance(tensor, DTensor):
        cuts = [(axis, cut) for axis, cut in enumerate(tensor.placements) if not isinstance(cut, Replicate)]
        # torch's _StridedShard: FSDP2 cuts again, along the same dim, what tensor ranks have cut, though its axis comes first
        for axis, placement in sorted(cuts, key=lambda cut: isinstance(cut[1], _StridedShard)):
            assert isinstance(placement, Shard | _StridedShard), f"{placement}: a part that is no box of elements"
            dim, ranks, at = placement.dim, tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
            piece = -(-sizes[dim] // ranks)
            start = min(at * piece, sizes[dim])
            first[dim], sizes[dim] = first[dim] + start, min(piece, sizes[dim] - start)
        assert tuple(sizes) == tensor.to_local().shape, (sizes, tensor.to_local().shape)
    return first, sizes
