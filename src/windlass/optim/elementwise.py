"""AdamW tensor by tensor: stores in any dtype, skips a step on the device, counts the updates that round to nothing.

Each element is updated in at least fp32 and rounded once, when it is stored, so weights and moments may have different dtypes;
torch's fused and foreach kernels need one dtype, and foreach needs a host read to skip a step. Here `found_inf`
(0-dim, 1.0 or 0.0) selects between old and new values: where it is 1.0 nothing changes, counters included.

Temporaries: about ten pieces of PIECES elements in fp32; compiled, none. Measured (4.2 million elements, one CPU thread, pure
bf16, ns per element): to nearest 6.1 and stochastic 11.4 in pieces of 2^18, 7.1 and 23.2 in one piece; compiled 0.6 and 2.9,
bit-equal to eager; torch's fused kernel in fp32 0.6. Compiled on an H200, for 8 billion parameters with moments in bf16: 53 ms.

torchao's low-bit optimizers (8 and 4 bit, fp8, bf16 weights with stochastic rounding) are not used: they need torch.compile
everywhere, draw the noise from the global generator, so that a layout or a restart changes the training, and take no
found_inf.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from windlass.optim.rounding import numbering_of, rounded_to, step_keys, stream_keys, two_noises
from windlass.ranks.owned_part import local_part

PIECES: Final = {"cpu": 1 << 18, "cuda": 1 << 24}  # cpu: measured above; cuda: 64 MiB per temporary, not measured

NO_COPIES: Final[Mapping[Tensor, Tensor]] = MappingProxyType({})


class Constants(NamedTuple):
    """What one step's updates of a group have in common; tensors are 0-dim. Skipped before the first step: a division by 0, not
    used."""

    skip: Tensor
    divisor: Tensor
    """What the gradient is divided by."""
    shrink: Tensor
    """Learning rate x decay."""
    size: Tensor
    """Learning rate / (1 - beta1^step)."""
    root: Tensor
    """sqrt(1 - beta2^step)."""
    beta1: float
    beta2: float
    epsilon: float


@dataclass(frozen=True)
class Storage:
    """How the optimizer stores. `states`: dtype of both moments; `gradients`: that of gradients; None: the weights'.
    `stochastic`: how bf16 is rounded. `seed`: of the rounding's noise. `compiled`: the update is one compiled kernel per tensor.
    `watch_every`: steps between two counts of the updates that round to nothing; 0: never."""

    states: torch.dtype | None = None
    stochastic: bool = False
    seed: int = 0
    compiled: bool = False
    watch_every: int = 0
    gradients: torch.dtype | None = None

    def is_rounded(self, weights: torch.dtype) -> bool:
        """Whether an update is stored in another dtype than it is computed in; torch's own kernels cannot do that."""
        return torch.bfloat16 in (weights, self.states)


def update(
    weight_N: Tensor,
    gradient_N: Tensor,
    mean_N: Tensor,
    square_N: Tensor,
    copy_N: Tensor | None,
    elements_N: Tensor | None,
    keys_22: Tensor | None,
    constants: Constants,
) -> tuple[Tensor, Tensor]:
    """One update of a flat piece, in place -> its old and new weights before rounding. Without `elements_N` and keys, to nearest.
    `copy_N`: the weights in the dtype of products, written in the same pass."""
    skip, divisor, shrink, size, root, beta1, beta2, epsilon = constants
    wide = torch.promote_types(weight_N.dtype, torch.float32)
    gradient_N, old_N = gradient_N.to(wide) / divisor, weight_N.to(wide)
    new_mean_N = mean_N.to(wide).lerp(gradient_N, 1 - beta1)
    new_square_N = square_N.to(wide) * beta2 + (1 - beta2) * gradient_N * gradient_N
    new_N = old_N - (shrink * old_N + size * (new_mean_N / (new_square_N.sqrt() / root + epsilon)))
    noise_weight = noise_mean = noise_square = None
    if elements_N is not None and keys_22 is not None:
        noise_mean, noise_square = two_noises(elements_N, keys_22[0])
        noise_weight = two_noises(elements_N, keys_22[1])[0] if weight_N.dtype != wide else None
    stored_N = torch.where(skip, weight_N, rounded_to(new_N, weight_N.dtype, noise_weight))
    weight_N.copy_(stored_N)
    if copy_N is not None:
        copy_N.copy_(stored_N)
    mean_N.copy_(torch.where(skip, mean_N, rounded_to(new_mean_N, mean_N.dtype, noise_mean)))
    square_N.copy_(torch.where(skip, square_N, rounded_to(new_square_N, square_N.dtype, noise_square)))
    return old_N, new_N


def _update_numbered(weight_N: Tensor, *others: Any) -> None:
    """`update` of a whole part that is one run of elements from `first` on: compiled, so that no temporary is kept."""
    gradient_N, mean_N, square_N, copy_N, first, keys_22, constants = others
    numbers = None
    if first is not None:
        numbers = (torch.arange(weight_N.numel(), dtype=torch.int64, device=weight_N.device) + first).to(torch.int32)
    update(weight_N, gradient_N, mean_N, square_N, copy_N, numbers, keys_22, constants)


def _compiled() -> Callable[..., None]:
    """dynamo keeps at most eight graphs per code object, over all runs of a process: a copy of the function has its own."""
    copy = FunctionType(_update_numbered.__code__.replace(), _update_numbered.__globals__)
    return torch.compile(copy, dynamic=True, fullgraph=True)


def new_state(parameter: Tensor, dtype: torch.dtype | None, is_blank: bool) -> dict[str, Tensor]:
    """A counter at 0, and moments in `dtype` (None: the parameter's): zeros, or with `is_blank` memory as it was."""
    made = torch.empty_like if is_blank else torch.zeros_like
    counter = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": counter, **{kind: made(parameter, dtype=dtype) for kind in ("exp_avg", "exp_avg_sq")}}


class ElementwiseAdamW(torch.optim.Optimizer):
    """torch's AdamW in its groups and state (`step`, `exp_avg`, `exp_avg_sq` per parameter), stored by the rules of `storage`.
    `names`: of every parameter, for the noise. `copies`: what each update writes too, by parameter. `found_inf`, and the
    `divisor` of the gradients: set them before each step."""

    found_inf: Tensor
    divisor: Tensor

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        names: Mapping[Tensor, str],
        storage: Storage,
        copies: Mapping[Tensor, Tensor] = NO_COPIES,
        **defaults: Any,
    ):
        super().__init__(groups, defaults)
        self._storage, self._copies = storage, copies
        self.parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self._names = [names[parameter] for parameter in self.parameters]
        keys = [[stream_keys(storage.seed, f"{name}.{kind}") for kind in ("moments", "weight")] for name in self._names]
        self._keys_P22 = torch.tensor(keys, dtype=torch.int32, device=self.parameters[0].device)
        self._numberings = [numbering_of(parameter) for parameter in self.parameters]
        device = self.parameters[0].device
        self._firsts = [
            torch.full((), numbering.first, dtype=torch.int64, device=device) for numbering in self._numberings
        ]
        self._compiled = _compiled() if storage.compiled else None

    def fresh_state(self, parameter: Tensor, is_blank: bool = False) -> dict[str, Tensor]:
        return new_state(parameter, self._storage.states, is_blank)

    @torch.no_grad()
    def step(self, closure: None = None, lost_P: Tensor | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. `lost_P`, where given (one number per parameter): gets how many
        elements of this rank's part should have changed and did not, because the change was rounded away."""
        assert closure is None
        start = 0
        for group in self.param_groups:
            indices = range(start, start + len(group["params"]))
            start = indices.stop
            present = [index for index in indices if self.parameters[index].grad is not None]
            if not present:
                continue
            counters = [self._state(index)["step"] for index in present]
            torch._foreach_add_(counters, [1 - self.found_inf] * len(counters))  # one tensor for all would be read
            constants = self._constants(group, counters[0])  # the counters of a group are equal
            keys_P22 = self._keys(counters[0])
            for index in present:
                keys_22 = None if keys_P22 is None else keys_P22[index]
                self._step_one(index, constants, keys_22, None if lost_P is None else lost_P[index])

    def _state(self, index: int) -> dict[str, Any]:
        parameter = self.parameters[index]
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(self.fresh_state(parameter))
        return state

    def _keys(self, step: Tensor) -> Tensor | None:
        """Every parameter's keys for this step, [P, 2, 2], at once: one by one they were 16 launches for each tensor."""
        if not self._storage.stochastic:
            return None
        return step_keys(self._keys_P22.view(-1, 2), step).view(-1, 2, 2)

    def lost_shares(self, lost_P: Tensor) -> dict[str, float]:
        """What `step` counted, over all ranks: name -> share of the whole tensor's elements. Collective; reads on the host."""
        total_P = lost_P.clone()
        cut: dict[tuple[DeviceMesh, int], list[int]] = {}  # mesh and axis -> the parameters that are cut along it
        for index, parameter in enumerate(self.parameters):
            if isinstance(parameter, DTensor):
                for axis, placement in enumerate(parameter.placements):
                    if not placement.is_replicate():
                        cut.setdefault((parameter.device_mesh, axis), []).append(index)
        for (mesh, axis), indices in cut.items():
            part = total_P[indices]
            dist.all_reduce(part, group=mesh.get_group(axis))
            total_P[indices] = part
        sizes = [parameter.numel() for parameter in self.parameters]
        return {name: lost / size for name, lost, size in zip(self._names, total_P.tolist(), sizes)}

    def _constants(self, group: Mapping[str, Any], step: Tensor) -> Constants:
        (beta1, beta2), rate, count = group["betas"], group["lr"], step.double()
        rate_now = torch.full((), rate, dtype=torch.float64, device=step.device)
        skip = self.found_inf != 0
        size, root = rate_now / (1 - beta1**count), (1 - beta2**count).sqrt()
        shrink = rate_now * group["weight_decay"]
        return Constants(skip, self.divisor, shrink, size, root, beta1, beta2, group["eps"])

    def _step_one(self, index: int, constants: Constants, keys_22: Tensor | None, lost: Tensor | None) -> None:
        parameter, state = self.parameters[index], self._state(index)
        assert parameter.grad is not None
        weight, gradient = _flat(parameter), _flat(parameter.grad)
        mean, square = _flat(state["exp_avg"]), _flat(state["exp_avg_sq"])
        copy = _flat(self._copies[parameter]) if parameter in self._copies else None
        numbering, count, device = self._numberings[index], weight.numel(), weight.device
        if self._compiled is not None and numbering.run == numbering.stride and lost is None and count:
            first = self._firsts[index] if keys_22 is not None else None
            self._compiled(weight, gradient, mean, square, copy, first, keys_22, constants)
            return
        size = PIECES.get(device.type, PIECES["cuda"])
        for start in range(0, count, size):
            stop = min(start + size, count)
            weight_N = weight[start:stop]
            numbers_N = numbering.numbers(start, stop, device) if keys_22 is not None else None
            before_N = weight_N.clone() if lost is not None else None
            copy_N = None if copy is None else copy[start:stop]
            mean_N, square_N = mean[start:stop], square[start:stop]
            old_N, new_N = update(
                weight_N, gradient[start:stop], mean_N, square_N, copy_N, numbers_N, keys_22, constants
            )
            if lost is not None:
                lost += ((new_N != old_N) & (weight_N == before_N)).sum() * (1 - self.found_inf)


def _flat(tensor: Tensor) -> Tensor:
    """This rank's part as one row that shares its memory."""
    return local_part(tensor).view(-1)
