"""The oracle's adapter: low-rank factors by hooks on transformers' own modules, and NF4 by its definition. Nothing of ours.

Each hook adds scale * B (A x) to what its module returns. A module that joins several matrices (GPT-2's c_attn) gets the factors
of each, side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn


@dataclass(frozen=True)
class LowRank:
    """Factors beside the matrices of the model, which is frozen but for the names that match `also_trained`.
    `factors`: Hugging Face's module -> the names and values of A [r, in] and B [out, r] of each of the matrices that it joins.
    `in_nf4`: modules whose matrix is rounded to NF4 first."""

    scale: float
    factors: Mapping[str, Sequence[Mapping[str, torch.Tensor]]]
    in_nf4: Sequence[str] = ()
    also_trained: Sequence[str] = ()


# NF4 by its definition: the level nearest to x / s of 16, s the largest magnitude of 64 consecutive inputs, kept in bfloat16
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)  # fmt: skip


def round_to_nf4(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] with each element as NF4 keeps it, in the same dtype."""
    levels = torch.tensor(_NF4, dtype=torch.float64)
    between = ((levels[1:] + levels[:-1]) / 2).float()
    rounded = torch.empty_like(weight)
    for start in range(0, weight.shape[1], 64):
        block = weight[:, start : start + 64].float()
        scale = block.abs().max(1, keepdim=True).values.bfloat16()
        nearest = (block[..., None] / scale.float()[..., None] > between).sum(-1)
        rounded[:, start : start + 64] = levels[nearest].to(weight.dtype) * scale.to(weight.dtype)
    return rounded


def adapted(model: nn.Module, adapter: LowRank, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Freezes the model, and adds factors by hooks -> what is trained, by name."""
    trained: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in adapter.also_trained))
        if parameter.requires_grad:
            trained[name] = parameter
    for name in adapter.in_nf4:
        weight = model.get_submodule(name).get_parameter("weight")
        is_transposed = type(model.get_submodule(name)).__name__ == "Conv1D"
        weight.data = round_to_nf4(weight.data.T).T if is_transposed else round_to_nf4(weight.data)
    for name, joined in adapter.factors.items():
        pairs = []
        for pair in joined:
            a, b = (nn.Parameter(value.to(dtype)) for value in pair.values())
            trained |= dict(zip(pair, (a, b), strict=True))
            pairs.append((a, b))
        model.get_submodule(name).register_forward_hook(
            lambda _module, inputs, output, pairs=pairs: (
                output + adapter.scale * torch.cat([inputs[0] @ a.T @ b.T for a, b in pairs], -1)
            )
        )
    return trained
