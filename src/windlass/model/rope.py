"""Rotary positions: the tables, and the rotation.

Channel pairs (i, i + K/2) of a head, or (2i, 2i + 1) where the rope is interleaved, turn by position * f_i, f_i = theta^(-2i/K)
(arXiv 2104.09864); a scaled rope changes the f_i, and yarn the length too (families/rope_scaling.py has the kinds and their
sources). Of a head with more channels than the tables the first K turn, and the rest stay. The tables are computed from
positions in each forward, so nothing is left to restore after `to_empty`. Angles are fp32, and fp64 where the model is:
in bf16 position 2,000 and 2,001 would be the same.

Legend: B sequences, T positions, H heads, K rotated channels per head, P = K/2 channel pairs.
"""

import math

import torch
from torch import Tensor

from windlass.model.architecture import Architecture
from windlass.model.families.rope_scaling import RopeScaling

Rope = tuple[Tensor, Tensor] | None
"""cos and sin; None: no rotation."""


def rope_tables(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles in `dtype`, each [T, K] for positions [T], or [B, 1, T, K] where rows have positions [B, T]
    of their own; computed in promote_types(dtype, float32)."""
    wide = torch.promote_types(dtype, torch.float32)
    channels_P = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide)
    powers_P = theta ** (channels_P / head_dim)
    frequencies_P = 1.0 / powers_P if scaling is None else scaled_frequencies(powers_P, head_dim, theta, scaling)
    half_TP = positions.to(wide)[..., None] * frequencies_P
    angles_TK = half_TP.repeat_interleave(2, -1) if interleaved else torch.cat((half_TP, half_TP), dim=-1)
    if positions.ndim == 2:
        angles_TK = angles_TK[:, None]  # for all heads
    magnitude = 1.0 if scaling is None else scaling.magnitude
    return (angles_TK.cos() * magnitude).to(dtype), (angles_TK.sin() * magnitude).to(dtype)


def make_ropes(arch: Architecture, positions: Tensor, dtype: torch.dtype) -> tuple[Rope, Rope]:
    """The tables of layers without and with a window; None for a family without rotary positions."""
    if arch.rope_theta is None:
        return None, None
    channels = arch.rotary_dim or arch.head_dim
    rope, other = (
        None if one is None else rope_tables(positions, channels, one[0], dtype, one[1], arch.rope_interleaved)
        for one in ((arch.rope_theta, arch.rope_scaling), arch.window_rope)
    )
    return rope, rope if other is None else other


def scaled_frequencies(powers_P: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Angles per position, from the unscaled ones' reciprocals; in transformers' order of operations."""
    kept_P, factor = 1.0 / powers_P, scaling.factor
    if scaling.kind == "linear":
        return kept_P / factor
    if scaling.kind == "yarn":
        low, high = scaling.ramp(head_dim, theta)
        pairs_P = torch.arange(head_dim // 2, device=powers_P.device, dtype=powers_P.dtype)
        kept_share_P = 1 - ((pairs_P - low) / (high - low)).clamp(0, 1)
        return 1.0 / (factor * powers_P) * (1 - kept_share_P) + kept_P * kept_share_P
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    length, low, high = scaling.original_positions, scaling.low_freq_factor, scaling.high_freq_factor
    waves_P = 2 * math.pi / kept_P  # positions per turn
    share_P = (length / waves_P - low) / (high - low)
    ramp_P = (1 - share_P) * kept_P / factor + share_P * kept_P
    scaled_P = torch.where(waves_P > length / low, kept_P / factor, ramp_P)
    return torch.where(waves_P < length / high, kept_P, scaled_P)


def rotate(x_BHTK: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Turn each pair of the first channels by its position's angle; as many as the tables have."""
    cos_TK, sin_TK = rope
    if (rotated := cos_TK.shape[-1]) < x_BHTK.shape[-1]:
        return torch.cat((rotate(x_BHTK[..., :rotated], rope, interleaved), x_BHTK[..., rotated:]), dim=-1)
    if interleaved:
        first, second = x_BHTK.unflatten(-1, (-1, 2)).unbind(-1)
        return x_BHTK * cos_TK + torch.stack((-second, first), dim=-1).flatten(-2) * sin_TK
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK
