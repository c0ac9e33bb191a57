"""What a training step often is and windlass's is not, put into windlass's for one measurement.

    dense loss          fp32 logits of all tokens at once, then cross_entropy (primitives.dense_loss)
    multi-tensor        torch's AdamW with foreach=True, the default of torch.optim.AdamW; a non-finite norm is not looked for
    masked attention    SDPA with a dense [1, 1, T, T] mask and repeated keys, as transformers 5 calls it under torch.compile

Legend: B sequences, T positions, H query heads, G key/value heads, K channels per head, D hidden size.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from primitives import dense_loss
from torch import Tensor, nn
from torch.nn import functional

import windlass.model.layers
from windlass.optim.clip import clip_divisor, divide_gradients
from windlass.optim.config import OptimConfig
from windlass.optim.groups import Parameter, parameter_groups, set_learning_rate, write_copies
from windlass.optim.rules import NO_RULES


def make_dense(model: nn.Module) -> None:
    head: Any = model.lm_head

    def forward(
        hidden_BTD: Tensor, targets_BT: Tensor, _per_row: None, _by_row: bool, factor: Tensor | None, *_seen: Any
    ) -> Tensor:
        loss = dense_loss(head, hidden_BTD, targets_BT)
        return loss if factor is None else loss * factor.view(loss.dtype)

    head.forward = forward


class MultiTensorAdamW:
    """In the place of windlass's AdamW."""

    def __init__(self, records: Sequence[Parameter], config: OptimConfig):
        betas, groups = (config.beta1, config.beta2), parameter_groups(records, config, NO_RULES)
        self._records, self._max_norm = records, config.max_norm
        self._engine = torch.optim.AdamW(groups, config.learning_rate, betas, config.epsilon, foreach=True)

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self._engine.param_groups, rate)

    def step(self, norm: Tensor) -> None:
        divide_gradients([record.tensor for record in self._records], clip_divisor(norm, self._max_norm))
        self._engine.step()
        write_copies(self._records)
        self._engine.zero_grad()


@contextlib.contextmanager
def masked(length: int, device: torch.device) -> Iterator[None]:
    """Every decoder's attention gets a dense mask meanwhile, for sequences of `length`."""
    with mock.patch.object(windlass.model.layers, "attend", masked_attention(length, device)):
        yield


def masked_attention(length: int, device: torch.device) -> Callable[..., Tensor]:
    """Causal by a dense [1, 1, T, T] mask, one for all layers, with every query head's own copy of the keys."""
    seen_TT = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]

    def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, *_layout: Any, **_more: Any) -> Tensor:
        repeats = q_BHTK.shape[1] // k_BGTK.shape[1]
        k_BHTK, v_BHTK = k_BGTK.repeat_interleave(repeats, 1), v_BGTK.repeat_interleave(repeats, 1)
        return functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=seen_TT)

    return attend
