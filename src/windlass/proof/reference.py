"""The oracle: the same training, written with torch and transformers and nothing of ours, so that our bugs cannot cancel.

One process holds the whole model and the whole global batch. Loss: cross-entropy summed over counted targets, divided by
their number. Clip: torch's own. AdamW: torch's own for-loop form, decay on parameters of two and more dimensions; Muon: torch's
own, for the matrices of the blocks. Groups by name set requires_grad, rate and decay of single parameters.

transformers computes norms, rotary angles, routers and some softmaxes in float32 even when the weights are float64, which
costs 2.7e-7. For float64 proofs its code, which names float32 itself, and torch's Muon, which casts to bfloat16, run under
`_Computing`, torch's own mode that sees each call: nothing of torch or transformers is patched. For float32 transformers runs as
it is.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from windlass.proof.reference_adapter import LowRank, adapted
from windlass.proof.reference_preference import Preferred, preferred
from windlass.proof.reference_routers import balance, loads


@dataclass(frozen=True)
class Trace:
    """One entry per step; by Hugging Face's names: `gradients` (before the clip) of the first step, `weights` after the last
    and `first_weights` after the first.
    `figures`: of models with experts, `router_loss` where they train on one besides the loss, `expert_loads` [sparse layers] and
    `expert_shares` [experts].
    `evaluations`: the sum of nats over the rows held out, before the first step and after the last.
    `streams`: of the first step, the sum of the residual stream and of its squares behind each layer; -1: before the first."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    first_weights: dict[str, torch.Tensor]
    figures: list[dict[str, torch.Tensor]] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    streams: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """What holds for parameters whose Hugging Face name matches one of `names`; the first such group decides."""

    names: Sequence[str]
    learning_rate_scale: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False


@dataclass(frozen=True)
class ReferenceSettings:
    learning_rates: Sequence[float]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_norm: float
    groups: Sequence[Group] = ()
    muon: bool = False
    adapter: LowRank | None = None
    preference: Preferred | None = None


class _Computing(TorchFunctionMode):
    """Calls made inside that name a floating dtype get `dtype` in its place."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.float, torch.Tensor.bfloat16):
            return args[0].to(self.dtype)
        named = {name: self._of(value) for name, value in (kwargs or {}).items()}
        return function(*map(self._of, args), **named)

    def _of(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value.is_floating_point else value


class _Exact:
    """A model's forward, computed in float64 where it names another floating dtype."""

    def __init__(self, forward: Any):
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Computing(torch.float64):
            return self.forward(*args, **kwargs)


def compute_in_float64(model: nn.Module) -> None:
    """transformers' model in float64, from here on without its float32 detours: its own code under `_Computing`, and constants
    that it rounded while it was built computed again."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in cast(list[Any], list(model.modules())):
        if type(module).__name__.endswith("RotaryEmbedding"):
            is_nested = isinstance(module.rope_type, dict)  # a rope for each kind of layer
            for layer_type, kind in (module.rope_type if is_nested else {None: module.rope_type}).items():
                formula = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
                with _Computing(torch.float64):
                    inverse, _ = formula(module.config, layer_type=layer_type)
                before = f"{layer_type}_" if is_nested else ""
                setattr(module, f"{before}inv_freq", inverse)
                setattr(module, f"{before}original_inv_freq", inverse.clone())
        elif type(module).__name__.endswith("ScaledWordEmbedding"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    cast(Any, model).forward = _Exact(model.forward)


def load_model(directory: Path, dtype: torch.dtype) -> nn.Module:
    """transformers' model from a local directory, experts one by one; in float64 without its float32 detours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    has_experts = "num_experts_per_tok" in AutoConfig.from_pretrained(directory).to_dict()
    plain = {"experts_implementation": "eager"} if has_experts else {}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **plain)
    if dtype == torch.float64:
        compute_in_float64(model)
    return model


def train_reference(
    directory: Path,
    batches: Sequence[tuple[torch.Tensor, ...]],
    dtype: torch.dtype,
    settings: ReferenceSettings,
    held_out: Sequence[tuple[torch.Tensor, ...]] = (),
) -> Trace:
    """`batches`: one global batch per step, (ids_BT, targets_BT), targets already shifted, -100 = not counted; for rows of
    several documents also positions_BT that restart at each, by which transformers keeps attention inside. `held_out`: the same,
    scored only."""
    model = load_model(directory, dtype).train()
    config: Any = model.config
    preference = _preference(directory, dtype, settings)
    named = adapted(model, settings.adapter, dtype) if settings.adapter else dict(model.named_parameters())
    named = {_in_files(name, config.model_type): parameter for name, parameter in named.items()}
    optimizers, losses, norms, figures = _optimizers(named, settings), [], [], []
    gradients: dict[str, torch.Tensor] = {}
    first_weights: dict[str, torch.Tensor] = {}
    streams: dict[int, torch.Tensor] = {}
    evaluations = [_score(model, held_out, preference)]
    for step, (ids_BT, targets_BT, *positions) in enumerate(batches):
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = settings.learning_rates[step] * group["scale"]
        with _noting(model, streams) if step == 0 else contextlib.nullcontext():
            out, total, count = _forward(model, preference, ids_BT, targets_BT, *positions)
        loss = total / count
        if _has_experts(model):
            figures.append(loads(out.router_logits, targets_BT != -100, config.num_experts_per_tok))
        if config.to_dict().get("output_router_logits"):
            router_loss = balance(out.router_logits, targets_BT != -100, config) / count
            (loss + config.router_aux_loss_coef * router_loss).backward()
            figures[-1]["router_loss"] = router_loss.detach()
        else:
            loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), settings.max_norm, foreach=False)))
        with _Computing(dtype):  # torch's Muon casts to bfloat16 by itself
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        weights = {name: p.detach().clone() for name, p in named.items()}
        first_weights = first_weights or weights
    evaluations.append(_score(model, held_out, preference))
    return Trace(losses, norms, gradients, weights, first_weights, figures, evaluations, streams)


_Preference = tuple[nn.Module, Preferred] | None
"""The reference model and the loss of pairs."""


def _preference(directory: Path, dtype: torch.dtype, settings: ReferenceSettings) -> _Preference:
    if settings.preference is None:
        return None
    began, adapter = load_model(directory, dtype), settings.adapter
    if adapter is not None:
        adapted(began, replace(adapter, factors={}) if settings.preference.of_base else adapter, dtype)
    return began, settings.preference


def _forward(
    model: nn.Module,
    preference: _Preference,
    ids_BT: torch.Tensor,
    targets_BT: torch.Tensor,
    positions_BT: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """transformers' output; the nats summed over the counted targets, or the losses over the pairs; and how many these are."""
    asked = {"output_router_logits": True} if _has_experts(model) else {}
    out = model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False, **asked)
    if preference is not None:
        began, how = preference
        with torch.no_grad():
            began_BTV = began(input_ids=ids_BT, use_cache=False).logits
        return out, *preferred(out.logits, began_BTV, targets_BT, how)
    nats = functional.cross_entropy(out.logits.flatten(0, 1), targets_BT.flatten(), reduction="sum")
    return out, nats, (targets_BT != -100).sum()


@contextlib.contextmanager
def _noting(model: nn.Module, streams: dict[int, torch.Tensor]) -> Iterator[None]:
    """Writes `streams` of the forward passes inside, by hooks on the decoder's layers."""

    def note(number: int, inputs: tuple[Any, ...], output: Any) -> None:
        stream = (output if isinstance(output, torch.Tensor) else output[0]).detach()
        streams[number] = torch.stack((stream.sum(), stream.square().sum()))
        if number == 0:
            streams[-1] = torch.stack((inputs[0].detach().sum(), inputs[0].detach().square().sum()))

    decoder = cast(Any, model).get_decoder()
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers
    hooks = [
        layer.register_forward_hook(lambda _layer, inputs, output, number=number: note(number, inputs, output))
        for number, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _has_experts(model: nn.Module) -> bool:
    return "num_experts_per_tok" in cast(Any, model.config).to_dict()


@torch.no_grad()
def _score(model: nn.Module, batches: Sequence[tuple[torch.Tensor, ...]], preference: _Preference) -> float:
    model.eval()
    total = sum(float(_forward(model, preference, *batch)[1]) for batch in batches)
    model.train()
    return total


def _optimizers(named: Mapping[str, nn.Parameter], settings: ReferenceSettings) -> list[torch.optim.Optimizer]:
    """One parameter per group; what is frozen is in none."""
    adamw: list[dict[str, Any]] = []
    muon: list[dict[str, Any]] = []
    for name, parameter in named.items():
        rule = next((g for g in settings.groups if any(fnmatchcase(name, pattern) for pattern in g.names)), Group(()))
        parameter.requires_grad_(not rule.frozen)
        if rule.frozen:
            continue
        decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
        decay = decay if rule.weight_decay is None else rule.weight_decay
        is_hidden = settings.muon and parameter.ndim == 2 and ".layers." in name
        (muon if is_hidden else adamw).append(
            {"params": [parameter], "weight_decay": decay, "scale": rule.learning_rate_scale}
        )
    betas, epsilon = (settings.beta1, settings.beta2), settings.epsilon
    made: list[torch.optim.Optimizer] = []
    if adamw:
        made.append(torch.optim.AdamW(adamw, lr=1.0, betas=betas, eps=epsilon, foreach=False, fused=False))
    if muon:
        made.append(torch.optim.Muon(muon, lr=1.0, adjust_lr_fn="match_rms_adamw"))
    return made


def by_matrix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers joins gate and up of all experts in memory; in files, and here, each is a matrix of its own."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        experts, _, own = name.rpartition(".")
        if not experts.endswith(".experts"):
            found[name] = tensor
            continue
        kinds = ("w1", "w3", "w2") if ".block_sparse_moe." in name else ("gate_proj", "up_proj", "down_proj")
        parts = tensor.chunk(2, dim=1) if own == "gate_up_proj" else (tensor,)
        for kind, part in zip(kinds if own == "gate_up_proj" else kinds[2:], parts, strict=False):
            found[f"{experts}.*.{kind}.weight"] = part
    return found


def _in_files(name: str, model_type: str) -> str:
    """mixtral's files call the MLP of a sparse layer otherwise than transformers does in memory."""
    return name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name
