"""AdamW over records: the step that may be skipped on the device, and the state as named tensors.

    m <- b1 m + (1-b1) g      v <- b2 v + (1-b2) g^2      w <- (1 - lr decay) w - lr m^ / (sqrt(v^) + eps)

g is the gradient by the clip's divisor (optim/clip); both engines divide in their own pass, and torch's kernel writes the
quotient back, 4 bytes per parameter that nobody reads.

A non-finite gradient norm must not touch weights, moments or counters, on any rank. The norm is the same number everywhere, so
every rank decides alike, and no host reads it: both engines take the decision as a tensor (`found_inf`).

torch's fused kernel is the engine where weights, gradients and moments are of one dtype and rounded to the nearest; elsewhere,
and with `optim.kernel: foreach`, it is optim/elementwise. That writes copies of the weights in the dtype of products
(precision/masters.py) in its own pass, and is the engine where it is compiled; after torch's kernel they take a pass of their
own, 6 bytes per parameter.

Source: Loshchilov & Hutter, arXiv 1711.05101. Kept per parameter: m and v, cut as the parameter is, and one counter.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from windlass.optim.clip import clip_divisor, divide_gradients
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import ElementwiseAdamW, Storage, new_state
from windlass.optim.groups import Parameter, parameter_groups, set_learning_rate, trainable, write_copies
from windlass.optim.rules import NO_RULES, Rules


class AdamW:
    """torch's AdamW over the trainable records of a built program. `torch_optimizer` is the engine."""

    def __init__(
        self,
        records: Sequence[Parameter],
        config: OptimConfig,
        rules: Rules = NO_RULES,
        storage: Storage = Storage(),  # noqa: B008  frozen
    ):
        self._records = trainable(records)
        self._found_inf = torch.zeros((), device=self._records[0].tensor.device)
        self._max_norm, self._watch_every, self._num_steps = config.max_norm, storage.watch_every, 0
        self._lost_P: torch.Tensor | None = None
        groups = parameter_groups(records, config, rules)
        settings: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": (config.beta1, config.beta2),
            "eps": config.epsilon,
        }
        self._elementwise: ElementwiseAdamW | None = None
        copies: dict[torch.Tensor, torch.Tensor] = {
            record.tensor: record.copy for record in self._records if record.copy is not None
        }
        if config.kernel == "foreach" or not self._is_fused(storage, bool(copies)):
            names: dict[torch.Tensor, str] = {record.tensor: record.name for record in self._records}
            self._elementwise = ElementwiseAdamW(groups, names, storage, copies, **settings)
        self.torch_optimizer: Any = self._elementwise or torch.optim.AdamW(groups, fused=True, **settings)

    def _is_fused(self, storage: Storage, has_copies: bool) -> bool:
        """Whether torch's kernel can step the parameters, and is the fastest: a compiled update writes copies in its own pass."""
        tensor = self._records[0].tensor
        is_one_dtype = not storage.is_rounded(tensor.dtype) and storage.gradients in (None, tensor.dtype)
        return is_one_dtype and not (has_copies and storage.compiled)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's own."""
        groups: list[dict[str, Any]] = self.torch_optimizer.param_groups
        return groups

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self.torch_optimizer.param_groups, rate)

    def step(self, norm: torch.Tensor) -> None:
        """One update by the gradients, whose norm is `norm` (0-dim, equal on all ranks), clipped; none where it is not finite.
        Then zeroes the gradients."""
        divisor = clip_divisor(norm, self._max_norm)
        if self._elementwise is not None:
            self._elementwise.divisor = divisor
        elif norm.dtype == torch.float32:
            self.torch_optimizer.grad_scale = divisor
        else:  # torch's kernel takes it in fp32 only
            divide_gradients([record.tensor for record in self._records], divisor)
        # 1.0 where norm is nan or infinite, else 0.0. Two operations, where isfinite and a cast are six
        self.torch_optimizer.found_inf = torch.ne(norm - norm, 0, out=self._found_inf)
        self._num_steps += 1
        if self._elementwise is not None and self._watch_every and self._num_steps % self._watch_every == 0:
            self._lost_P = torch.zeros(len(self._records), dtype=torch.float64, device=norm.device)
            self._elementwise.step(lost_P=self._lost_P)
        else:
            self.torch_optimizer.step()
        if self._elementwise is None:
            write_copies(self._records)
        self.torch_optimizer.zero_grad()

    def lost_shares(self) -> dict[str, float]:
        """name -> share of the tensor's elements whose last counted update rounded to nothing; empty where none was counted
        since the last call. Collective."""
        lost_P, self._lost_P = self._lost_P, None
        return {} if lost_P is None or self._elementwise is None else self._elementwise.lost_shares(lost_P)

    def state_tensors(self, is_blank: bool = False) -> dict[str, torch.Tensor]:
        """`<name>.exp_avg`, `<name>.exp_avg_sq`, `<name>.step` of every counted parameter: what a checkpoint keeps.
        They exist from the start, so that a restore has somewhere to write: zeros, or with `is_blank` whatever was in memory."""
        state = self.torch_optimizer.state
        tensors: dict[str, torch.Tensor] = {}
        for record in self._records:
            if record.tensor not in state:
                # what no checkpoint counts is not written by a restore either
                state[record.tensor] = self._fresh_state(record.tensor, is_blank and record.counted)
            if record.counted:
                tensors |= {f"{record.name}.{key}": value for key, value in state[record.tensor].items()}
        return tensors

    def _fresh_state(self, parameter: torch.nn.Parameter, is_blank: bool) -> Mapping[str, torch.Tensor]:
        if self._elementwise is not None:
            return self._elementwise.fresh_state(parameter, is_blank)
        return new_state(parameter, None, is_blank)
