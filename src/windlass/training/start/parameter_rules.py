"""What of the model is trained, and how: `optim.groups` matched with the model's own names, and printed."""

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from windlass.adapters.config import AdapterConfig
from windlass.adapters.peft_config import base_named
from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.flops import count_parameters
from windlass.model.lora.adapter import (
    Adapter,
    adapted_shapes,
    adapter_of,
    called,
    frozen_base,
    is_factor,
    trained_shapes,
)
from windlass.model.names import hugging_face_names
from windlass.optim.optimizer import is_hidden
from windlass.optim.rules import Rules, assign, frozen_names
from windlass.units import format_count

MAX_KINDS: Final = 4  # half of torch._dynamo.config.recompile_limit, 8 in torch 2.11 to 2.13; past it fullgraph raises


def rules_of(config: RunConfig, architecture: Architecture) -> Rules:
    """Parameter name -> the group of the recipe that decides for it. Raises UserError for names that the model does not have,
    and for a loss of its routers beside pairs."""
    _check_router_loss(config, architecture)
    adapter = adapter_of(config.adapter, architecture)
    trained = called(architecture, adapter)
    others = [one for name, words in hugging_face_names(architecture).items() if name not in trained for one in words]
    rules = assign(config.optim.groups, trained, others)
    frozen = frozen_names(rules) | frozen_base(architecture, adapter)
    shapes = parameter_shapes(architecture)
    if config.optim.kind == "muon" and all(n in frozen for n, s in shapes.items() if is_hidden(n, len(s))):
        raise UserError(
            "optim.kind=muon with every matrix of the blocks frozen",
            "Muon steps the matrices of the blocks; here AdamW would do all the work",
            "set optim.kind=adamw, or freeze fewer of them",
        )
    if config.parallel.compiles:
        _check_graphs(architecture.num_layers, adapted_shapes(architecture, adapter), frozen)
    return rules


def _check_router_loss(config: RunConfig, architecture: Architecture) -> None:
    """A loss over tokens has no place in a mean over pairs. Raises UserError."""
    if config.objective.kind == "dpo" and architecture.sparse_layers and architecture.router_loss:
        raise UserError(
            "objective.kind=dpo with the routers' load-balancing loss (model.output_router_logits=true)",
            "a preference loss is a mean over pairs, and the routers' loss is a mean over tokens",
            "set model.output_router_logits=false",
        )


def _check_graphs(num_layers: int, names: Collection[str], frozen: frozenset[str]) -> None:
    """A compiled block has one graph per kind: which of its parameters are frozen, and whether a gradient flows below it."""
    kinds, flows = set(), any("embed" in name and name not in frozen for name in names)
    for layer in range(num_layers):
        inside = {n.split(".", 3)[3]: n in frozen for n in names if f".layers.{layer}." in n}
        kinds.add((flows, tuple(inside.values())))
        flows = flows or not all(inside.values())
    if len(kinds) > MAX_KINDS:
        raise UserError(
            f"parallel.compile=true with optim.groups that freeze blocks in {len(kinds)} different ways",
            f"each way is a graph in training and one in evaluation, and torch.compile keeps at most {2 * MAX_KINDS} of a block",
            "freeze the same parameters in every block, or whole blocks, or set parallel.compile=false",
        )


def describe_trainable(config: RunConfig, architecture: Architecture, rules: Rules) -> dict[str, str]:
    """Lines for the table of what was derived; none where all is trained alike."""
    frozen, adapter = frozen_names(rules), adapter_of(config.adapter, architecture)
    lines = _muon(architecture, frozen) if config.optim.kind == "muon" else {}
    if adapter is not None:
        return lines | _adapter(config.adapter, architecture, adapter)
    if not config.optim.groups:
        return lines
    lines |= {
        "trainable": _share(architecture, [name for name in parameter_shapes(architecture) if name not in frozen])
    }
    if frozen:
        pair = hugging_face_names(architecture)["model.embed_tokens.weight"]
        tied = f"; {' and '.join(pair)} are one" if len(pair) > 1 and "model.embed_tokens.weight" in frozen else ""
        lines["frozen"] = _share(architecture, sorted(frozen)) + tied
    for index, group in enumerate(config.optim.groups):
        own = [name for name, rule in rules.items() if rule is group]
        settings = ", ".join(
            f"{key} {value:g}"
            for key, value in group.model_dump(exclude={"names", "frozen"}).items()
            if key in group.effect
        )
        if settings:
            lines[f"optim.groups[{index}]"] = f"{settings}: {_share(architecture, own)}"
    return lines


def count_trained(config: RunConfig, architecture: Architecture) -> int:
    """Elements of the tensors that a run of this recipe trains. Raises UserError as `rules_of`."""
    adapter, frozen = adapter_of(config.adapter, architecture), frozen_names(rules_of(config, architecture))
    if adapter is not None:
        return _elements(trained_shapes(architecture, adapter))
    return _elements({name: shape for name, shape in parameter_shapes(architecture).items() if name not in frozen})


def _elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _adapter(config: AdapterConfig, architecture: Architecture, adapter: Adapter) -> dict[str, str]:
    shapes = adapted_shapes(architecture, adapter)
    trained = _elements(trained_shapes(architecture, adapter))
    whole = count_parameters(architecture) + _elements({n: shape for n, shape in shapes.items() if is_factor(n)})
    base = ", base in NF4" if adapter.quantized else ""
    also = f", and {len(adapter.also_trained)} tensors of the model whole" if adapter.also_trained else ""
    matrices = f"LoRA of rank {adapter.rank} beside {len(adapter.targets)} matrices, scale {adapter.scale:g}"
    drops = f", dropout {adapter.dropout:g}" if adapter.dropout else ""
    begun = f"; begun with {config.from_}" if config.from_ else ""
    begun += f", made beside {named}" if config.from_ and (named := base_named(Path(config.from_))) else ""
    share = f"{trained:,} of {whole:,} parameters ({trained / whole:.2%})"
    return {"adapter": f"{matrices}{drops}{also}{base}{begun}", "trainable": share}


def _muon(architecture: Architecture, frozen: frozenset[str]) -> dict[str, str]:
    shapes = {name: shape for name, shape in parameter_shapes(architecture).items() if name not in frozen}
    hidden = {name: math.prod(shape) for name, shape in shapes.items() if is_hidden(name, len(shape))}
    matrices, rest = _tensors(architecture, hidden), _tensors(architecture, shapes.keys() - hidden.keys())
    muon = f"Muon for {matrices} hidden {'matrix' if matrices == 1 else 'matrices'}"
    numbers = f"of {format_count(sum(hidden.values()))} parameters"
    return {"optimizer": f"{muon} {numbers}, AdamW for {rest} other tensor{'s' * (rest != 1)}"}


def _tensors(architecture: Architecture, names: Iterable[str]) -> int:
    """How many tensors, as Hugging Face counts them: GPT-2's query, key and value are one."""
    called = hugging_face_names(architecture)
    return len({called[name][0] for name in names})


def _share(architecture: Architecture, names: list[str]) -> str:
    """`1.2M of 8.4M parameters in 4 tensors`."""
    counts = {name: math.prod(shape) for name, shape in parameter_shapes(architecture).items()}
    tensors = _tensors(architecture, names)
    part, whole = sum(counts[name] for name in names), sum(counts.values())
    return f"{format_count(part)} of {format_count(whole)} parameters in {tensors} tensor{'s' * (tensors != 1)}"
