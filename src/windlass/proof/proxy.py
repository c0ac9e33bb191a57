"""The tiny proxy model of a recipe: everything that a layout can get wrong, in a model of fifty thousand parameters.

Kept: family, tie, biases, norms, activation, factors and caps, rope with its scaling, windows and layers without positions,
grouped heads, dropout; the layout, recomputation, units, offload; isolation of documents; the optimizer, its groups and its
clip.
Small: every size. Sizes are odd and unequal where the layout allows, the vocabulary divides by nothing, and shards have
rows left over: a slice that is off by one, a sum over padding or a scale by the wrong count then changes a number.
Changed: fp64 (which separates rounding, 1e-13, from a mistake, 1e-6); a learning rate that moves weights; a clip that cuts some
steps and not others (`verify` sets it between their norms); weights drawn wide enough that norms and biases matter.

A layer of the proxy model represents a layer of the model: the recipe's groups and frozen names apply to it by that layer's name.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from windlass.adapters.config import AdapterConfig
from windlass.config import RunConfig, check_recipe
from windlass.model.architecture import Architecture
from windlass.model.attention.context import copies
from windlass.model.chunks import Chunks
from windlass.model.lora.adapter import adapted_shapes, adapter_of, called, trained_shapes
from windlass.optim.rules import assign
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.pipeline import micro_batch_errors
from windlass.parallel.rules.schedules import owners
from windlass.proof.fold_layout import Cell
from windlass.proof.proxy_adapter import adapter_section, represented, widened
from windlass.proof.proxy_data import write_pairs, write_text
from windlass.proof.watch import vocabulary_borders
from windlass.training.parts.open_program import can_compile

STEPS: Final = 3
VOCABULARY: Final = 269  # 256 bytes, the end of a text, merges; a prime
POSITIONS: Final = 67  # of a learned table
LENGTH: Final = 13  # or the next that the layout can cut
LAYERS: Final = 3
EXPERTS: Final = 6  # of each sparse layer, or the next number that expert ranks divide
EXPERTS_PER_TOKEN: Final = 3
ROUTER_LOSS: Final = 0.05  # large enough that a router's loss averaged wrongly is a wrong gradient
WINDOW: Final = 5  # keys: fewer than a sequence has
MAX_NORM: Final = 0.1  # of the trial that shows the steps' norms
LEARNING_RATE: Final = 1e-3
EPSILON: Final = 1e-8
BUCKET_MIB: Final = 0.05  # of 0.4 of gradients: several, and the last is not full
PIECE_WEIGHTS: Final = (
    200  # of attention's weights at a time, where they are materialised: one query of each head, or two
)


@dataclass(frozen=True)
class ProxyModel:
    """`config` trains below `directory`; `unproved`: sentences on what of the recipe is not in it."""

    config: RunConfig
    architecture: Architecture
    directory: Path
    unproved: tuple[str, ...]
    is_drawn: bool
    """Whether the recipe begins with weights of its own drawing."""
    head_tokens: int
    """Tokens of a whole chunk of the head: a micro-batch on a rank has one or two, and a rest."""
    chunks: Chunks

    def borders(self, tp: int) -> list[int]:
        """Tokens that are put into the rows: see watch.odd."""
        return [] if self.config.data.is_preference else vocabulary_borders(self.architecture, tp)


def make_proxy(config: RunConfig, architecture: Architecture, cell: Cell, directory: Path) -> ProxyModel:
    """Writes model and text of the proxy model below `directory`. `architecture`: the recipe's own."""
    layers = choose_layers(config, architecture, cell)
    small = shrink(architecture, cell, layers, config.parallel)
    if config.adapter.base == "nf4":
        small = widened(small, cell.layout.tp)
    unproved: list[str] = []
    parallel = _parallel(cell, unproved)
    micro = min(2, config.micro_batch)
    length = _length(cell)
    num_micro = _num_micro(cell, micro, length)
    if architecture.num_experts:
        unproved.append("the grouped product of experts: the proxy model's experts run one by one")
    if cell.layout.tp > 1 and small.num_kv_heads == 1 < architecture.num_kv_heads:
        unproved.append("which key/value head a tensor rank reads: the proxy model has one, shared by all")
    if config.run.start_from is not None:
        unproved.append("run.start_from: the proxy model begins with weights of its own")
    if config.data.is_preference:
        unproved.append("rows at the borders of the vocabulary's parts: pairs are compared as they are prepared")
    (write_pairs if config.data.is_preference else write_text)(directory / "text")
    section = adapter_section(config, architecture, small, layers, directory / "adapter")
    adapter = adapter_of(AdapterConfig.model_validate(section), small)
    tree = {
        "run": {
            "directory": str(directory / "run"),
            "steps": STEPS,
            "tokens_per_step": length * micro * num_micro * cell.layout.batch_ranks,
            "micro_batch": micro,
            "seed": 11,
        },
        "model": {"from": str(directory / "model")},
        "data": _data(config, length, directory),
        "objective": config.objective.model_dump() if config.data.is_preference else {},
        "adapter": section,
        "parallel": parallel,
        "precision": {"policy": "fp64"},
        "optim": _optim(config, architecture, called(small, adapter), layers, unproved),
        "checkpoint": {"every_steps": 1, "every_minutes": None, "keep_last": STEPS + 1},
        "evaluate": {"every_steps": STEPS, "sequences": 8},
        "report": {"every_steps": 1},
    }
    is_drawn = config.model.from_ is None and config.run.start_from is None
    head_tokens = chunk_of(tokens := micro * length // cell.layout.context)
    if tokens % head_tokens == 0:
        unproved.append(
            f"the rest of the head's chunks: a rank has {tokens} tokens of a micro-batch of the proxy model"
        )
    head_logits = head_tokens * small.padded_vocab_size // cell.layout.tp
    chunks = Chunks(head_logits, attention_weights=PIECE_WEIGHTS)
    return ProxyModel(check_recipe(tree), small, directory, tuple(unproved), is_drawn, head_tokens, chunks)


def chunk_of(tokens: int) -> int:
    """Tokens of a chunk of the head: `tokens` make two and a rest, where they are few one and a rest, and of two none."""
    return next(chunk for chunk in (tokens // 3 + 1, tokens // 2 + 1) if tokens % chunk or tokens < 3)


def choose_layers(config: RunConfig, architecture: Architecture, cell: Cell) -> list[int]:
    """The layers of the model that the proxy model's represent: one of each kind, spread over the depth, in rising order."""
    adapter = adapter_of(config.adapter, architecture)
    rules = assign(config.optim.groups, called(architecture, adapter))
    kinds: dict[Any, int] = {}
    shapes, trained = adapted_shapes(architecture, adapter), trained_shapes(architecture, adapter)
    for layer in range(architecture.num_layers):
        inside = {name.split(".", 3)[3]: name for name in shapes if f".layers.{layer}." in name}
        groups = tuple(
            (own, name in trained, str(rules[name].effect) if name in rules else "") for own, name in inside.items()
        )
        listed = (architecture.window_layers, architecture.unrotated_layers, architecture.dense_layers)
        kinds.setdefault((*(layer in one for one in listed), groups), layer)
    stages = len(owners(cell.parallel.schedule, cell.layout.pp))
    wanted = min(architecture.num_layers, max(LAYERS, stages + 1 if cell.layout.pp > 1 else 0, len(kinds)))
    chosen = set(list(kinds.values())[:wanted])
    spread = [round(at * (architecture.num_layers - 1) / max(1, wanted - 1)) for at in range(wanted)]
    for layer in [*spread, *range(architecture.num_layers)]:
        if len(chosen) < wanted:
            chosen.add(layer)
    return sorted(chosen)


def share_heads(architecture: Architecture, cell: Cell, whole: ParallelConfig) -> tuple[int, int]:
    """Query and key/value heads of the proxy model: the fewest whose order still matters. `whole`: the recipe's layout.

    A rank of tp has two key/value heads where the recipe's has more than one, else one, which as many ranks share as do in the
    recipe. Where the recipe's ulysses ranks copy heads, to a query head each or to some of them, the proxy model's do the same;
    where they do not, nor does it.
    """
    heads, kv_heads = (max(1, n // whole.tp) for n in (architecture.num_heads, architecture.num_kv_heads))
    groups, sharers = heads // kv_heads, -(-whole.tp // architecture.num_kv_heads) if cell.layout.tp > 1 else 1
    times = copies(heads, kv_heads, whole.context if whole.context_kind == "ulysses" else 1)
    ranks = cell.layout.context if cell.parallel.context_kind == "ulysses" else 1
    alike = (times > 1 and ranks > 1, times < groups or ranks == 1)
    if groups == 1 and cell.layout.tp == ranks == 1:
        return min(3, heads), min(3, heads)
    least = min(2, kv_heads)
    wanted = min(3 if cell.layout.tp == 1 or least == 1 else 2, groups)
    for few, group in itertools.product(range(least, 2 * ranks + 3), (wanted, *range(2, 2 * ranks + 1))):
        if few * group % ranks or (group > 1) != (groups > 1):
            continue
        own = copies(few * group, few, ranks)
        if (own > 1, own < group or ranks == 1) == alike:
            return cell.layout.tp * few * group, max(1, cell.layout.tp * few // sharers)
    raise AssertionError(f"no heads of the proxy model for {cell.name}")


def shrink(architecture: Architecture, cell: Cell, layers: list[int], whole: ParallelConfig) -> Architecture:
    """The architecture in small: heads by the ranks that share them, the rest odd. `whole`: the recipe's own layout."""
    arch, layout = architecture, cell.layout
    heads, kv_heads = share_heads(arch, cell, whole)
    head_dim = 11 if arch.rope_theta is None else 10 if arch.rotary_dim is None else 16
    is_square = arch.num_heads * arch.head_dim == arch.hidden_size
    hidden = (
        heads * head_dim if is_square else heads * 9 if arch.norm_adds_one else 37
    )  # Gemma's is a multiple of the heads
    scaling = arch.rope_scaling
    is_rooted = arch.embedding_scale == arch.hidden_size**0.5
    return replace(
        arch,
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        embedding_scale=hidden**0.5 if is_rooted else arch.embedding_scale,
        rotary_dim=None if arch.rotary_dim is None else 2 * max(1, head_dim * arch.rotary_dim // arch.head_dim // 2),
        intermediate_size=53 * layout.tp,
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=POSITIONS if arch.rope_theta is None else max(POSITIONS, arch.max_positions),
        rope_scaling=scaling,
        window=None if arch.window is None else WINDOW,
        window_layers=tuple(at for at, layer in enumerate(layers) if layer in arch.window_layers),
        unrotated_layers=tuple(at for at, layer in enumerate(layers) if layer in arch.unrotated_layers),
        num_experts=min(arch.num_experts, -(-EXPERTS // layout.expert) * layout.expert),
        experts_per_token=min(arch.experts_per_token, EXPERTS_PER_TOKEN),
        expert_size=min(arch.expert_size, 13 * layout.tp),
        router_loss_scale=ROUTER_LOSS if arch.router_loss and arch.router_loss_scale else arch.router_loss_scale,
        dense_layers=tuple(at for at, layer in enumerate(layers) if layer in arch.dense_layers),
        bos_token_id=None,
        eos_token_id=None if arch.eos_token_id is None else 0,
        pad_token_id=None if arch.pad_token_id is None else 101,
    )


def _data(config: RunConfig, length: int, directory: Path) -> dict[str, Any]:
    rows = {"format": "preference", "too_long": "drop"} if config.data.is_preference else {}
    return {
        "sources": [{"path": str(directory / "text"), **rows}],
        "tokenizer": {"train": VOCABULARY},
        "directory": str(directory / "data"),
        "sequence_length": length,
        "isolate": config.data.isolate,
        "packing": config.data.packing,
        "validation": 0.1,
    }


def _length(cell: Cell) -> int:
    """Positions: the first odd multiple of what the layout cuts that is not less than LENGTH."""
    unit = cell.layout.tp * (2 * cell.layout.context if cell.layout.context > 1 else 1)
    return next(unit * odd for odd in range(1, 2 * LENGTH, 2) if unit * odd >= LENGTH)


def _num_micro(cell: Cell, micro: int, length: int) -> int:
    """Micro-batches per rank and step: 3, or the next number that the schedule takes."""
    for count in range(3, 64):
        tokens = micro * cell.layout.batch_ranks * length
        if not any(micro_batch_errors(cell.parallel.schedule, cell.parallel.pp, count, tokens, micro)):
            return count
    raise AssertionError(f"no number of micro-batches for {cell.name}")


def _parallel(cell: Cell, unproved: list[str]) -> dict[str, Any]:
    given = cell.parallel.model_dump()
    if cell.parallel.compiles or (cell.parallel.compile == "auto" and can_compile("cuda")):
        unproved.append("parallel.compile: the proxy model's blocks run uncompiled")
    if given["activation_gib"] is not None:
        unproved.append("parallel.activation_gib: all of the proxy model's blocks recompute selectively")
    if given["zero"] == 0:
        given["bucket_mib"] = BUCKET_MIB
    given |= {"compile": False, "activation_gib": None}
    given |= {"blocks_per_unit": min(2, given["blocks_per_unit"]), "prefetch": min(1, given["prefetch"])}
    return given


def _optim(
    config: RunConfig,
    architecture: Architecture,
    names: Mapping[str, tuple[str, ...]],
    layers: list[int],
    unproved: list[str],
) -> dict[str, Any]:
    optim = config.optim
    given = optim.model_dump()
    given |= {"learning_rate": LEARNING_RATE, "warmup_steps": 0, "max_norm": MAX_NORM}
    given["epsilon"] = max(optim.epsilon, EPSILON)
    given["groups"] = _groups(config, architecture, names, layers)
    if len(given["groups"]) < sum(bool(group.effect) for group in optim.groups):
        unproved.append("optim.groups: some name layers only that the proxy model has no room for")
    return given


def _groups(
    config: RunConfig, architecture: Architecture, own: Mapping[str, tuple[str, ...]], layers: list[int]
) -> list[dict[str, Any]]:
    """The recipe's groups, each with the names of the proxy model's parameters that represent its own. `own`: all of those."""
    rules = assign(config.optim.groups, called(architecture, adapter_of(config.adapter, architecture)))
    groups = []
    for group in config.optim.groups:
        names = [name for name in own if rules.get(represented(name, layers)) is group]
        if names and group.effect:  # one without an effect exempts its names, and here no later group names them
            groups.append(group.model_dump() | {"names": sorted({one for name in names for one in own[name]})})
    return groups
