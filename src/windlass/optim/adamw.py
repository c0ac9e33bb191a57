"""AdamW over records: groups, the step that may be skipped on the device, and the state as named tensors.

    m <- b1 m + (1-b1) g      v <- b2 v + (1-b2) g^2      w <- (1 - lr decay) w - lr m^ / (sqrt(v^) + eps)

Groups are keyed by (decayed or not, mesh). Whether a parameter decays is decided by its *logical* shape: a flat shard of a
matrix has one dimension and would never decay (seen in the field: 0 of 20 parameters). torch cannot mix meshes in one foreach
call.

A non-finite gradient norm must not touch weights or moments, on any rank. The norm is the same number everywhere, so every
rank decides alike; the fused kernel takes the decision as a tensor (`found_inf`), without a host read. The foreach kernel has no
such entry: there the norm is read once per step.

Source: Loshchilov & Hutter, arXiv 1711.05101. Kept per parameter: m and v in the parameter's dtype and sharding, one counter.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from windlass.optim.config import OptimConfig


class Parameter(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> torch.nn.Parameter: ...
    @property
    def logical_shape(self) -> torch.Size: ...
    @property
    def counted(self) -> bool: ...


class AdamW:
    """torch's AdamW over the records of a built program. `torch_optimizer` is the engine."""

    def __init__(self, records: Sequence[Parameter], config: OptimConfig):
        self._records, self._fused = list(records), config.kernel == "fused"
        groups: dict[tuple[bool, object], list[torch.nn.Parameter]] = {}
        for record in records:
            mesh = record.tensor.device_mesh if isinstance(record.tensor, DTensor) else None
            groups.setdefault((len(record.logical_shape) >= 2, mesh), []).append(record.tensor)
        self.torch_optimizer: Any = torch.optim.AdamW(
            [
                {"params": tensors, "weight_decay": config.weight_decay if is_decayed else 0.0}
                for (is_decayed, _), tensors in groups.items()
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=self._fused,
            foreach=not self._fused,
        )

    def set_learning_rate(self, rate: float) -> None:
        for group in self.torch_optimizer.param_groups:
            group["lr"] = rate

    def step(self, norm: torch.Tensor) -> None:
        """One update, or none where `norm` (0-dim, equal on all ranks) is not finite. Then zeroes the gradients."""
        if self._fused:
            # 1.0 where norm is nan or infinite, else 0.0. Two operations, where isfinite and a cast are six
            self.torch_optimizer.found_inf = (norm - norm).ne_(0).float()
            self.torch_optimizer.step()
        elif torch.isfinite(norm):  # the one host read per step that the foreach kernel costs
            self.torch_optimizer.step()
        self.torch_optimizer.zero_grad()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """`<name>.exp_avg`, `<name>.exp_avg_sq`, `<name>.step` of every counted parameter: what a checkpoint keeps.
        They exist from the start (zeros), so that a restore has somewhere to write."""
        state = self.torch_optimizer.state
        tensors: dict[str, torch.Tensor] = {}
        for record in self._records:
            if record.tensor not in state:
                state[record.tensor] = self._fresh_state(record.tensor)
            if record.counted:
                tensors |= {f"{record.name}.{key}": value for key, value in state[record.tensor].items()}
        return tensors

    def _fresh_state(self, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor]:
        # the counter lies where torch's own initialisation puts it: on the parameter's device for the fused kernel
        device = parameter.device if self._fused else torch.device("cpu")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
