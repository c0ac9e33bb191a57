"""A cell of the matrix: a model and a layout, both written as words, and what holds its training against one process.

    "qwen3 tied blocks5"           a family and what its small model is changed in: MODEL_WORDS
    "pp2 shard2 zbv packed"        axes and their sizes, and settings: LAYOUT_WORDS

Left out: zero 3 and micro-batches of two rows, zero 1 and of one row in a pipeline; fp64; as many positions as the axes divide.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import cases
from tests.cases import Layout
from windlass.optim.config import OptimConfig
from windlass.proof.reference import Group, Trace, train_reference

DTYPE = {"fp64": torch.float64, "fp32": torch.float32}

DROPS = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "qwen3": {"attention_dropout": 0.1},
}
MODEL_WORDS: dict[str, dict[str, Any]] = {
    "unbalanced": {"output_router_logits": False},  # the routers' loss is refused beside pairs
    "window": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},  # all layers but the first
    "pad": {"pad_token_id": 7},  # whose row learns nothing
    "heads4": {"n_head": 4},  # which 2 and 4 ranks divide; 3 else
    "kv1": {"num_key_value_heads": 1},
    "deep": {"num_hidden_layers": 5, "mlp_only_layers": [0]},
    "wide": {"hidden_size": 64, "intermediate_size": 256, "head_dim": 32},  # whole blocks of NF4 on two ranks
    "even": {"num_hidden_layers": 2, "mlp_only_layers": [], "num_experts": 8, "moe_intermediate_size": 16},
}
LAYOUT_WORDS: dict[str, dict[str, Any]] = {
    "one": {},
    **{f"steps{steps}": {"steps": steps} for steps in (1, 2)},  # of three
    "packed": {"packed": True},
    "compile": {"compile": True},
    **{word: {"recompute": word} for word in ("full", "selective")},
    **{word: {"policy": word} for word in ("fp32", "bf16", "fp16", "bf16-pure", "fp8")},
}
SHARDING_WORDS: dict[str, dict[str, Any]] = {
    "offload": {"offload": True},
    "budget": {"activation_gib": 250 / 2**20},  # of blocks5 in fp64: some recompute all, some their products alone
    "budget-narrow": {"activation_gib": 100 / 2**20},
    "budget-wide": {"activation_gib": 500 / 2**20},
    **{word: {"schedule": word} for word in ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")},
    **{word: {"context_kind": word} for word in ("allgather", "ulysses")},
}
PRECISION_WORDS = {
    "states-bf16": ("states", "bf16"),
    "nearest": ("rounding", "nearest"),
    "products-fp32": ("parameters", "fp32"),
    "reduce-bf16": ("reduce", "bf16"),
    "gradients-bf16": ("gradients", "bf16"),
    "output-bf16": ("output", "bf16"),
    "rowwise": ("scaling", "rowwise"),
}
NUMBERS = {"units": "blocks_per_unit", "bucket": "bucket_mib"}
AXES = ("pp", "replicate", "shard", "context", "tp")

EMBEDDING = {"gpt2": ["transformer.wte.weight"]}
BLOCK, NORM = {"gpt2": "transformer.h.{}.*"}, {"gpt2": "*ln_*"}
QUERY = {"gpt2": "transformer.h.2.attn.c_attn.*"}


def groups_of(word: str, family: str) -> list[Group]:
    """The parameter groups that a word means, by the family's own names."""
    embedding = EMBEDDING.get(family, ["model.embed_tokens.weight"])
    block, norm = BLOCK.get(family, "model.layers.{}.*"), NORM.get(family, "*norm*")
    middle = [block.format(1), QUERY.get(family, "*.2.self_attn.*_proj.weight")]
    head = ["lm_head.weight"]
    stages = {
        "first": ["model.embed_tokens.weight", "model.layers.[012].*"],  # of 1f1b over two ranks: it trains nothing
        "middle": ["model.layers.2.*", "model.layers.*.self_attn.q_proj.weight"],
        "last": ["model.layers.[34].*", "model.norm.weight", *head],
    }
    return {
        "frozen-bottom": [
            Group([*embedding, *(["transformer.wpe.weight"] if family == "gpt2" else [])], frozen=True),
            Group([block.format(0)], frozen=True),
        ],
        "frozen-middle": [Group([norm]), Group(middle, frozen=True)],
        "rates": [  # a slower embedding without decay, norms that decay, a faster block
            Group(embedding, learning_rate_scale=0.1, weight_decay=0.0),
            Group([norm], weight_decay=0.5),
            Group([block.format(1)], learning_rate_scale=3.0),
        ],
        "muons": [
            *(Group([norm]), Group(middle, frozen=True)),
            Group([block.format(0)], learning_rate_scale=0.5, weight_decay=0.3),
        ],
        "muon": [],
        "unclipped": [],
        "tied-rates": [  # the tied pair, by its other name
            Group(head, learning_rate_scale=0.1, weight_decay=0.0),
            Group(["model.layers.3.*"], learning_rate_scale=3.0),
        ],
        **{f"frozen-{stage}-stage": [Group(names, frozen=True)] for stage, names in stages.items()},
    }[word]


UNCLIPPED = 100.0  # a norm that no step reaches
ADAPTER_WORDS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "alpha": 6.0},
    "nf4": {"rank": 4, "alpha": 6.0, "base": "nf4"},
    "lora-drops": {"rank": 4, "alpha": 6.0, "dropout": 0.2},
    "nf4-drops": {"rank": 4, "alpha": 6.0, "dropout": 0.2, "base": "nf4"},
    # seven masks in a block take the compiler minutes
    "lora-few-drops": {"rank": 4, "alpha": 6.0, "dropout": 0.2, "targets": ["q_proj", "down_proj"]},
    "lora-some": {
        "rank": 3,
        "rank_stabilized": True,
        "targets": ["q_proj", "down_proj"],
        "also_train": ["*norm*", "*embed_tokens*"],
    },
}
OBJECTIVE_WORDS: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo", "beta": 0.3},
    "ipo": {"kind": "dpo", "loss": "ipo"},
    "robust": {"kind": "dpo", "loss": "robust", "label_smoothing": 0.2},
    "hinge": {"kind": "dpo", "loss": "hinge", "beta": 0.05},
    "simpo": {"kind": "dpo", "loss": "simpo", "beta": 2.0, "target_margin": 0.3},
    "orpo": {"kind": "dpo", "loss": "orpo", "beta": 0.2},
}
OPTIM_WORDS = ("frozen-bottom", "frozen-middle", "rates", "muons", "muon", "tied-rates", "unclipped",
               "frozen-first-stage", "frozen-middle-stage", "frozen-last-stage")  # fmt: skip


def groups_in(model: str, layout: str) -> list[Group]:
    return [group for word in layout.split() if word in OPTIM_WORDS for group in groups_of(word, model.split()[0])]


def has_muon(layout: str) -> bool:
    return not {"muon", "muons"}.isdisjoint(layout.split())


def optim_of(model: str, layout: str) -> OptimConfig:
    """The same groups in a recipe's words."""
    groups = [
        {name: value for name, value in vars(group).items() if value is not None} for group in groups_in(model, layout)
    ]
    more: dict[str, Any] = {"kind": "muon"} if has_muon(layout) else {}
    more |= {"max_norm": UNCLIPPED} if "unclipped" in layout else {}
    return OptimConfig.model_validate(cases.OPTIM.model_dump() | {"groups": groups} | more)


def layout_of(model: str, words: str) -> Layout:
    """The layout that `words` describe, for a model."""
    sizes: dict[str, Any] = {}
    given: dict[str, Any] = {"optim": optim_of(model, words), "precision": ()}
    sharding: dict[str, Any] = {}
    for word in words.split():
        if word in LAYOUT_WORDS:
            given |= LAYOUT_WORDS[word]
        elif word in ADAPTER_WORDS:
            given["adapter"] = tuple(ADAPTER_WORDS[word].items())
        elif word in OBJECTIVE_WORDS:
            given["objective"] = tuple(OBJECTIVE_WORDS[word].items())
        elif word in SHARDING_WORDS:
            sharding |= SHARDING_WORDS[word]
        elif word in PRECISION_WORDS:
            given["precision"] += (PRECISION_WORDS[word],)
        elif word not in OPTIM_WORDS:
            name, number = re.fullmatch(r"([a-z]+)([\d.]+)", word).groups()
            sizes[name] = float(number) if "." in number else int(number)
    is_staged = sizes.get("pp", 1) > 1
    zero, micro = sizes.pop("zero", 1 if is_staged else 3), sizes.pop("micro", 1 if is_staged else 2)
    world = 1
    for axis in AXES:
        world *= sizes.get(axis, 1)
    rows = {axis: sizes.pop(axis, 1) for axis in ("replicate", "shard")}
    has_experts = model.startswith(("qwen3_moe", "mixtral"))
    length = 12 if "tp" in sizes or has_experts else cases.LENGTH
    if "context" in sizes and not has_experts:
        length = 24  # which 2, 3 and 4 ranks divide into two slices each
    sharding = {**{NUMBERS.get(name, name): number for name, number in sizes.items()}, **sharding}
    return Layout(world, zero, **rows, micro_batch=micro, length=length, sharding=tuple(sharding.items()), **given)


class References:
    """Models and what one process trains of them, each made once. `ranks`: for what our own decoder trains on one."""

    def __init__(self, base: Path, ranks: Any):
        self._base, self._ranks = base, ranks
        self.directory = functools.cache(self._directory)
        self.trace = functools.cache(self._trace)
        self._alone: dict[tuple[str, str], dict] = {}

    def _directory(self, model: str) -> Path:
        family, *words = model.split()
        fields: dict[str, Any] = {}
        for word in words:
            if word == "drops":
                fields |= DROPS[family]
            elif word.startswith("blocks"):
                fields["n_layer" if family == "gpt2" else "num_hidden_layers"] = int(word.removeprefix("blocks"))
            elif word != "tied":
                fields |= MODEL_WORDS[word]
        return cases.write_model(self._base / model.replace(" ", "-"), family, "tied" in words, **fields)

    def _trace(
        self,
        model: str,
        policy: str,
        packed: bool,
        length: int,
        optim: str = "",
        steps: int = cases.STEPS,
        adapter: str = "",
        objective: str = "",
    ) -> Trace:
        """What torch and transformers train, with the rules of the words `optim`."""
        groups = groups_in(model, optim)
        if "tied" in model.split():  # transformers knows the pair by one name
            both = {"lm_head.weight", "model.embed_tokens.weight"}
            groups = [replace(g, names=[*g.names, *both] if both & set(g.names) else g.names) for g in groups]
        max_norm = optim_of(model, optim).max_norm
        settings = replace(cases.SETTINGS, groups=groups, muon=has_muon(optim), max_norm=max_norm)
        if adapter:
            added = cases.reference_adapter(str(self.directory(model)), ADAPTER_WORDS[adapter])
            settings = replace(settings, adapter=added)
        batches = cases.packed_batches(length) if packed else cases.global_batches(length)
        if objective:
            settings = replace(settings, preference=cases.reference_preference(OBJECTIVE_WORDS[objective]))
            batches = cases.pair_batches(length)
        return train_reference(self.directory(model), batches[:steps], DTYPE[policy], settings)

    def of(self, model: str, words: str, policy: str = "") -> Trace:
        """The reference of a cell, in `policy` or the layout's own."""
        case = layout_of(model, words)
        optim = " ".join(word for word in words.split() if word in OPTIM_WORDS)
        adapter = " ".join(word for word in words.split() if word in ADAPTER_WORDS)
        objective = " ".join(word for word in words.split() if word in OBJECTIVE_WORDS)
        return self.trace(model, policy or case.policy, case.packed, case.length, optim, case.steps, adapter, objective)

    def alone(self, model: str, case: Layout) -> dict:
        """What our own decoder trains on one process."""
        key = model, repr(case)
        if key not in self._alone:
            (self._alone[key],) = self._ranks.run(1, cases.train_layout, str(self.directory(model)), case)
        return self._alone[key]


def run(
    references: References, ranks: Any, model: str, case: Layout, function: Callable = cases.train_layout, *first: Any
) -> list[dict]:
    """`function(*first, directory, case)` on each of the layout's ranks."""
    try:
        limit_s = 900 if case.world > 8 else 600
        return ranks.run(case.world, function, *first, str(references.directory(model)), case, timeout_s=limit_s)
    finally:
        if case.world > 8:
            ranks.close()  # other tests need 8 ranks at most
