"""A sharding, a precision, a schedule or an optimizer in any tool's spelling, and lengths with a unit. No torch.

Sources: torch.distributed.fsdp.ShardingStrategy (names and numbers), accelerate's FSDP plugin, DeepSpeed's stages, Lightning's
Trainer(precision=...), transformers' TrainingArguments, torchtitan's mixed_precision_param, LLM Foundry's amp_bf16.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

_NODE: Final = "parallel.replicate=-1 parallel.shard=8 (the ranks of a node, here 8)"
SHARDINGS: Final = {  # in the order of torch's enumeration: FULL_SHARD is 1
    "FULL_SHARD": "parallel.zero=3 parallel.shard=-1",
    "SHARD_GRAD_OP": "parallel.zero=2 parallel.shard=-1",
    "NO_SHARD": "parallel.zero=0",
    "HYBRID_SHARD": f"parallel.zero=3 {_NODE}",
    "_HYBRID_SHARD_ZERO2": f"parallel.zero=2 {_NODE}",
}
_ALIASES: Final = {
    "HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2",
    "HSDP": "HYBRID_SHARD",
    "FSDP": "FULL_SHARD",
    "FSDP2": "FULL_SHARD",
    "DDP": "NO_SHARD",
}
_SPELLINGS: Final = {
    "bf16": "bf16 bfloat16 bf16-mixed mixed-bf16 bfloat16-mixed mixed-bfloat16 amp-bf16 amp-bfloat16",
    "fp16": "fp16 16 float16 half 16-mixed fp16-mixed mixed-fp16 float16-mixed mixed-float16 amp-fp16 amp-float16 amp",
    "fp32": "fp32 32 float32 float single full no none false 32-true fp32-true",  # YAML 1.1 reads `no` as false
    "fp64": "fp64 64 float64 double 64-true fp64-true",
    "bf16-pure": "bf16-pure bf16-true bfloat16-true pure-bf16 true-bf16",
    "fp32 (whether its products run in TF32 is torch's setting)": "tf32 tensorfloat32",
    "fp16 (weights stay in fp32: fp16 ones lose most updates)": "16-true fp16-true pure-fp16",
    "fp8": "fp8 float8 fp8-mixed transformer-engine fp8-e4m3 mixed-fp8 amp-fp8",
}
WORDS: Final = {word: policy for policy, words in _SPELLINGS.items() for word in words.split()}


def sharding_of(value: Any, is_numbered: bool = False) -> str | None:
    """Our settings for a sharding in any common spelling: FULL_SHARD, zero-3, stage3, "3"; a number of torch's enumeration where
    it `is_numbered`. Of Trainer's words beside it `offload` is a setting, and `auto_wrap` none: blocks are always wrapped. None
    for words that no tool has."""
    beside = set(value.split()) & {"auto_wrap", "offload"} if isinstance(value, str) else set[str]()
    if beside:
        ours = sharding_of(" ".join(word for word in value.split() if word not in beside))
        return f"{ours} parallel.offload=true" if ours and "offload" in beside else ours
    if is_numbered and isinstance(value, int) and 1 <= value <= len(SHARDINGS):
        return list(SHARDINGS.values())[value - 1]
    name = str(value).rpartition(".")[2].strip().upper().replace("-", "_").replace(" ", "_")
    stage = re.fullmatch(r"(?:ZERO|STAGE|DEEPSPEED_STAGE|ZERO_STAGE)?_*([0-3])", name)
    return f"parallel.zero={stage[1]}" if stage else SHARDINGS.get(_ALIASES.get(name, name))


def policy_of(value: Any) -> str | None:
    """`precision.policy=...` for a precision in any common spelling; None for words that no tool has."""
    policy = WORDS.get(str(value).rpartition(".")[2].strip().lower().replace("_", "-").replace(" ", "-"))
    return None if policy is None else f"precision.policy={policy}"


KINDS: Final = ("adamw", "muon")
_SCHEDULES: Final = {
    "cosine": "cosine_with_warmup cosine_with_min_lr cosine_warmup_with_min_lr cosine_annealing",
    "linear": "linear_with_warmup linear_decay_with_warmup",
    "constant": "constant_with_warmup",
    "wsd": "warmup_stable_decay",
}
_SCHEDULE_WORDS: Final = {word: ours for ours, words in _SCHEDULES.items() for word in words.split()}


def schedule_of(value: Any) -> Any:
    """A schedule by our name, where it is one of ours; else as it was given."""
    return _SCHEDULE_WORDS.get(str(value).lower(), value)


def optimizer_kind(value: Any) -> Any:
    """An optimizer by our name: transformers' adamw_torch_fused, torch's AdamW. As it was given where it is none of ours."""
    word = str(value).rpartition(".")[2].lower()
    return next((kind for kind in KINDS if kind in word), value)


def recompute_of(value: Any) -> Any:
    """`full` for a switch, and the mode of torchtitan's section; else as it was given."""
    if isinstance(value, Mapping):
        value = value.get("mode", value)
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def steps_of(value: Any) -> Any:
    """LLM Foundry's `1000ba` as the batches that it means."""
    found = re.fullmatch(r"(\d+)ba", value) if isinstance(value, str) else None
    return int(found[1]) if found else value


def _policy(value: Any) -> Any:
    return (policy_of(value) or "").partition("=")[2].partition(" ")[0] or value


CONVERTED: Final[dict[str, Callable[[Any], Any]]] = {
    "optim.schedule": schedule_of,
    "optim.kind": optimizer_kind,
    "parallel.recompute": recompute_of,
    "precision.policy": _policy,
    "report.sinks": lambda value: (
        ", ".join(map(str, value)) if isinstance(value, list) else "" if value == "none" else value
    ),
    **dict.fromkeys(("run.steps", "checkpoint.every_steps", "evaluate.every_steps", "optim.warmup_steps"), steps_of),
}
"""Our key -> what makes a value of ours of another tool's. Whether the key takes it is asked where the recipe is known."""
