"""The oracle: the same training, written with torch and transformers and nothing of ours, so that our bugs cannot cancel.

One process holds the whole model and the whole global batch. Loss: cross-entropy summed over counted targets, divided by
their number. Clip: torch's own. AdamW: torch's own for-loop form, decay on parameters of two and more dimensions.

transformers computes norms, rotary angles and the loss in float32 even when the weights are float64, which costs 2.7e-7. For
float64 proofs those modules are replaced by the same formula without the detour; for float32 transformers runs as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Trace:
    """One entry per step; `gradients` (before the clip) of the first step and `weights` after the last, by HF name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    learning_rates: Sequence[float]
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0


class _RMSNorm(nn.Module):
    def __init__(self, weight: nn.Parameter, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


class _Rotary(nn.Module):
    """The family's own frequencies, scaled ropes included, by transformers' own formula in float64."""

    def __init__(self, original: Any):
        super().__init__()
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = original.rope_type
        formula = original.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
        with mock.patch.multiple(
            torch, float=torch.float64, float32=torch.float64
        ):  # the formulas name float32 themselves
            frequencies: tuple[torch.Tensor, float] = formula(original.config)
        self.inverse, self.magnitude = frequencies

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        angle = position_ids[..., None].double() * self.inverse
        angle = torch.cat((angle, angle), -1)
        return angle.cos() * self.magnitude, angle.sin() * self.magnitude


def load_model(directory: Path, dtype: torch.dtype) -> nn.Module:
    """transformers' model from a local directory; in float64 without its float32 detours."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
    if dtype != torch.float64:
        return model
    for name, module in list(model.named_modules()):
        parent = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        if type(module).__name__.endswith("RMSNorm"):
            setattr(parent, leaf, _RMSNorm(module.weight, module.variance_epsilon))
        elif type(module).__name__.endswith("RotaryEmbedding"):
            setattr(parent, leaf, _Rotary(module))
    return model


def train_reference(
    directory: Path,
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype,
    settings: Settings,
) -> Trace:
    """`batches`: one global batch per step, (ids_BT, targets_BT), targets already shifted, -100 = not counted."""
    model = load_model(directory, dtype).train()
    named = dict(model.named_parameters())
    decayed = [p for p in named.values() if p.ndim >= 2]
    rest = [p for p in named.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=1.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        foreach=False,
        fused=False,
    )
    losses, norms, gradients = [], [], {}
    for step, (ids_BT, targets_BT) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rates[step]
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        total = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        loss = total / (targets_BT != -100).sum()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), settings.max_norm, foreach=False)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Trace(losses, norms, gradients, {name: p.detach().clone() for name, p in named.items()})
