"""Other tools' names for our settings. A recipe that uses one is refused with the setting to write instead. No torch.

Nothing is translated silently: two names for one setting would be two places to look. TABLE has a row for each key that another
tool has; WORDS has the values. A later section of the recipe adds rows.

Sources: torch.distributed.fsdp.ShardingStrategy (names and numbers), accelerate's FSDP plugin, DeepSpeed's sections, Lightning's
Trainer(precision=...), transformers' TrainingArguments, torchtitan's mixed_precision_param, LLM Foundry's amp_bf16, PEFT's
LoraConfig, and the recipes of axolotl, LLaMA-Factory and torchtune.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from windlass.errors import UserError
from windlass.target_names import listed, listed_targets

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
    "bf16 (there is no fp8 here)": "fp8 fp8-mixed transformer-engine fp8-e4m3 mixed-fp8 amp-fp8",
}
WORDS: Final = {word: policy for policy, words in _SPELLINGS.items() for word in words.split()}


def sharding_of(value: Any, is_numbered: bool = False) -> str | None:
    """Our settings for a sharding in any common spelling: FULL_SHARD, zero-3, stage3, "3"; a number of torch's enumeration where
    it `is_numbered`. None for words that no tool has."""
    if is_numbered and isinstance(value, int) and 1 <= value <= len(SHARDINGS):
        return list(SHARDINGS.values())[value - 1]
    name = str(value).rpartition(".")[2].strip().upper().replace("-", "_").replace(" ", "_")
    stage = re.fullmatch(r"(?:ZERO|STAGE|DEEPSPEED_STAGE|ZERO_STAGE)?_*([0-3])", name)
    return f"parallel.zero={stage[1]}" if stage else SHARDINGS.get(_ALIASES.get(name, name))


def policy_of(value: Any) -> str | None:
    """`precision.policy=...` for a precision in any common spelling; None for words that no tool has."""
    policy = WORDS.get(str(value).rpartition(".")[2].strip().lower().replace("_", "-").replace(" ", "-"))
    return None if policy is None else f"precision.policy={policy}"


def _dtype(setting: str) -> Callable[[Any], str]:
    return lambda value: f"precision.{setting}={(policy_of(value) or 'precision.policy=fp32').partition('=')[2]}"


def _switch(policy: str) -> Callable[[Any], str | None]:
    def answer(value: Any) -> str | None:
        is_on = value.get("enabled", True) if isinstance(value, Mapping) else value
        return policy_of(policy) if is_on else "nothing (precision.policy alone says it)"

    return answer


@dataclass(frozen=True)
class OtherName:
    """`words`: keys of `tool` in our `section`. `ours`: what to write instead; a pair: for true and for false; a function: of the
    value, None where the key is not refused."""

    section: str
    words: str
    tool: str
    ours: str | tuple[str, str] | Callable[[Any], str | None]


_FSDP: Final = "FSDP1, accelerate"
_LORA: Final = "PEFT, axolotl, LLaMA-Factory, torchtune"
_ANY: Final = " or ".join(list(SHARDINGS.values())[:3])
_OWN_NAMES: Final = "nothing (FSDP2 keeps every parameter by its own name)"
_UNIT: Final = "nothing, or parallel.blocks_per_unit (a unit is a block)"
_AHEAD: Final = "nothing, or parallel.prefetch for more than one unit ahead (one is FSDP2's own order in backward)"
_ZERO, _OFFLOAD = ("parallel.zero=3", "parallel.zero=2"), ("parallel.offload=true", "parallel.offload=false")
_RECOMPUTE, _PREFETCH = (
    ("parallel.recompute=full", "parallel.recompute=none"),
    ("parallel.prefetch=1", "parallel.prefetch=0"),
)
_SFT: Final = "TRL, axolotl, LLaMA-Factory"
_LENGTH: Final = "data.sequence_length"
_ANSWERS: Final = "nothing (of a source with `format: chat` the answers alone are learned, of a text every token)"
_PAIRS: Final = "TRL, axolotl, LLaMA-Factory"
_STAGES: Final = {"pt": "objective.kind=pretrain", "sft": "objective.kind=sft", "dpo": "objective.kind=dpo"}
_LOSSES: Final = {
    name: f"objective.kind=dpo objective.loss={name}" for name in ("sigmoid", "ipo", "robust", "hinge", "simpo")
}
_NOT_HERE: Final = "{} is not in this version: "
_SAMPLES: Final = _NOT_HERE + "it samples answers during training and scores them, and a step here only reads its data"
_HEAD: Final = (
    "reward models are not in this version: they end in a head of one output, and models here in their vocabulary"
)
_ABSENT: Final = {
    "kto": _NOT_HERE
    + "it learns from single answers marked good or bad, and the losses here compare two answers to a prompt",
    **dict.fromkeys(("grpo", "ppo", "rloo"), _SAMPLES),
    **dict.fromkeys(("rm", "reward"), _HEAD),
    **dict.fromkeys(
        ("orpo", "cpo", "exo_pair", "nca_pair", "apo_zero", "apo_down"),
        "{} is not in this version, which has other losses on pairs",
    ),
}
_INSTEAD: Final = (
    "objective.kind=dpo on pairs (`format: preference`; loss sigmoid, ipo, robust, hinge or simpo), or "
    "objective.kind=sft on good answers alone"
)
# fmt: off
TABLE: Final = (
    OtherName("parallel", "strategy sharding_strategy fsdp_sharding_strategy", _FSDP, lambda v: sharding_of(v, True) or _ANY),
    OtherName("parallel", "zero_stage stage zero_optimization", "DeepSpeed", lambda v: sharding_of(v) or _ANY),
    OtherName("parallel", "zero", "FSDP1, DeepSpeed", lambda v: sharding_of(v) if isinstance(v, str) else None),
    OtherName("parallel", "fsdp", "transformers", lambda v: sharding_of(v) or SHARDINGS["FULL_SHARD"]),
    OtherName("parallel", "ddp", "torch", lambda v: sharding_of(v) or SHARDINGS["NO_SHARD"]),
    OtherName("parallel", "reshard_after_forward fsdp_reshard_after_forward", "FSDP2, accelerate", _ZERO),
    OtherName("parallel", "cpu_offload fsdp_cpu_offload fsdp_offload_params", _FSDP, _OFFLOAD),
    OtherName("parallel", "gradient_checkpointing activation_checkpointing", "transformers, Lightning", _RECOMPUTE),
    OtherName("parallel", "fsdp_activation_checkpointing", "accelerate", _RECOMPUTE),
    OtherName("parallel", "forward_prefetch fsdp_forward_prefetch", _FSDP, _PREFETCH),
    OtherName("parallel", "backward_prefetch fsdp_backward_prefetch", _FSDP, _AHEAD),
    OtherName("parallel", "use_orig_params fsdp_use_orig_params", _FSDP, _OWN_NAMES),
    OtherName("parallel", "sync_module_states fsdp_sync_module_states", _FSDP, "nothing (every rank fills its own shard)"),
    OtherName("parallel", "limit_all_gathers", "FSDP1", "nothing (FSDP2 needs no such limit)"),
    OtherName("parallel", "min_num_params auto_wrap_policy fsdp_auto_wrap_policy", _FSDP, _UNIT),
    OtherName("parallel", "fsdp_transformer_layer_cls_to_wrap", "accelerate", _UNIT),
    OtherName("parallel", "find_unused_parameters", "DDP", "nothing (a parameter without a gradient stops the run)"),
    OtherName("parallel", "bucket_cap_mb ddp_bucket_cap_mb", "DDP", lambda v: f"parallel.zero=0 parallel.bucket_mib={v}"),
    OtherName("parallel", "mixed_precision", _FSDP, lambda v: policy_of(v) or "precision.policy=bf16"),
    OtherName("precision", "mixed_precision", "accelerate", lambda v: policy_of(v) or "precision.policy=bf16"),
    OtherName("precision", "bf16 bf16_full_eval", "transformers, DeepSpeed", _switch("bf16")),
    OtherName("precision", "fp16 fp16_full_eval", "transformers, DeepSpeed", _switch("fp16")),
    OtherName("precision", "tf32", "transformers", _switch("tf32")),
    OtherName("precision", "mixed_precision_param", "torchtitan", _dtype("parameters")),
    OtherName("precision", "mixed_precision_reduce", "torchtitan", _dtype("reduce")),
    OtherName("precision", "mixed_precision_output", "torchtitan", _dtype("output")),
    OtherName("precision", "mixed_precision_buffer", "torchtitan", "nothing (buffers stay as they are)"),
    OtherName("adapter", "r lora_r lora_rank", _LORA, lambda v: f"adapter.kind=lora adapter.rank={v}"),
    OtherName("adapter", "lora_alpha", _LORA, lambda v: f"adapter.kind=lora adapter.alpha={v}"),
    OtherName("adapter", "lora_dropout", _LORA, lambda v: f"adapter.kind=lora adapter.dropout={v}"),
    OtherName("adapter", "target_modules lora_target_modules lora_target lora_attn_modules", _LORA, listed_targets),
    OtherName("adapter", "lora_target_linear", "axolotl", ("adapter.targets=all-linear", "adapter.targets=[q_proj, v_proj]")),
    OtherName("adapter", "modules_to_save lora_modules_to_save additional_target", _LORA, lambda v: _also_train(v)),
    OtherName("adapter", "use_rslora peft_use_rslora", _LORA, ("adapter.rank_stabilized=true", "adapter.rank_stabilized=false")),
    OtherName("adapter", "load_in_4bit", "transformers, axolotl", ("adapter.base=nf4", "adapter.base=plain")),
    OtherName("adapter", "quantization_bit", "LLaMA-Factory", "adapter.base=nf4"),
    OtherName("adapter", "loraplus_lr_ratio", "PEFT, axolotl, LLaMA-Factory", lambda v: _faster(v)),
    OtherName("adapter", "use_dora peft_use_dora", _LORA, "nothing (factors are plain LoRA here)"),
    OtherName("adapter", "finetuning_type", "LLaMA-Factory", lambda v: _adapters(v) or "adapter.kind=none"),
    OtherName("adapter", "kind", "axolotl", lambda v: _adapters(v) if str(v).lower() in ("qlora", "full") else None),
    OtherName("adapter", "bias lora_bias", _LORA, 'nothing (biases stay frozen; to train them: adapter.also_train=["*bias"])'),
    OtherName("data", "cutoff_len max_length max_seq_length max_seq_len sequence_len", _SFT, lambda v: f"{_LENGTH}={v}"),
    OtherName("data", "train_on_inputs train_on_prompt", _SFT, _ANSWERS),
    OtherName("data", "sample_packing packing", "axolotl, TRL", lambda v: _packing(v)),
    OtherName("objective", "stage", "LLaMA-Factory", lambda v: _preference(v)),
    OtherName("objective", "rl", "axolotl", lambda v: _preference(v)),
    OtherName("objective", "kind", _PAIRS, lambda v: _preference(v) if str(v).lower() in {*_ABSENT, *_LOSSES} else None),
    OtherName("objective", "loss", _PAIRS, lambda v: _preference(v) if str(v).lower() in _ABSENT else None),
    OtherName("objective", "loss_type pref_loss dpo_loss", _PAIRS, lambda v: _preference(v)),
    OtherName("objective", "pref_beta dpo_beta rl_beta", _PAIRS, lambda v: f"objective.kind=dpo objective.beta={v}"),
    OtherName("objective", "dpo_label_smoothing", _PAIRS, lambda v: f"objective.loss=robust objective.label_smoothing={v}"),
    OtherName("objective", "simpo_gamma cpo_simpo_gamma", _PAIRS, lambda v: f"objective.loss=simpo objective.target_margin={v}"),
    OtherName("objective", "ref_model reference_model", _PAIRS, "nothing (the reference is the model that the run begins with)"),
    OtherName("objective", "precompute_ref_log_probs", "TRL", "nothing (scores of a full model are computed once and kept)"),
)
# fmt: on


def _also_train(value: Any) -> str:
    return "adapter.also_train=[" + ", ".join(f'"*{name}*"' for name in listed(value)) + "]"


def _preference(value: Any) -> str:
    """Of an objective or a loss by another tool's name."""
    name = str(value[0] if isinstance(value, list) and value else value).lower()
    return _STAGES.get(name) or _LOSSES.get(name) or _INSTEAD


def _faster(value: Any) -> str:
    return f'optim.groups=[{{names: ["*lora_B*"], learning_rate_scale: {value}}}]'


def _packing(value: Any) -> str | None:
    return (
        ("data.packing=best-fit" if value else "nothing (documents are always packed)")
        if isinstance(value, bool)
        else None
    )


def _adapters(value: Any) -> str | None:
    """`adapter.kind=...` for another tool's word of an adapter."""
    kinds = {"lora": "adapter.kind=lora", "qlora": "adapter.kind=lora adapter.base=nf4", "full": "adapter.kind=none"}
    return kinds.get(str(value).lower())


_RULES: Final = {
    "adapter": "here the section adapter has kind, rank, alpha, targets and base",
    "data": "here the section data says how text becomes sequences",
    "objective": "here objective.kind says what a step optimizes",
    "parallel": "here zero says what is cut, shard and replicate over how many ranks",
    "precision": "here precision.policy is one of {policies}",
}


def other_names(recipe: Mapping[str, Any], policies: Sequence[str]) -> Iterator[tuple[list[str], UserError]]:
    """Other tools' keys, sections and values in `recipe`: their paths and the error. `policies`: ours of precision.policy."""
    for section in ("fsdp", "fsdp_config", "ddp"):
        if section in recipe:
            content, rule = recipe[section], "the layout is the section `parallel`"
            if isinstance(content, Mapping):
                rows = list(_found("parallel", section, content))
                if rows:
                    yield [section], _refusal(rows, "parallel", policies)
                    continue
            elif isinstance(content, str) and (ours := sharding_of(content)):
                yield [section], UserError(f"{section}={content}", rule, f"use {ours}")
                continue
            yield [section], UserError(f"a section `{section}`", rule, "see parallel in docs/recipe.md")
    parallel, precision = recipe.get("parallel"), recipe.get("precision")
    found = list(_found("precision", "", recipe))
    if isinstance(precision, Mapping):
        policy = precision.get("policy")
        if policy is not None and policy not in policies and (ours := policy_of(policy)):
            found.append(("precision.policy", policy, ours, "other tools"))
        found += _found("precision", "precision", precision)
    elif precision is not None and (ours := policy_of(precision)):
        found.append(("precision", precision, ours, "Lightning"))
    beside = list(_found("parallel", "parallel", parallel)) if isinstance(parallel, Mapping) else []
    others = [(section, list(_of_section(section, recipe))) for section in ("adapter", "data", "objective")]
    for section, rows in (("precision", found), ("parallel", beside), *others):
        if rows:
            yield [key for key, *_ in rows], _refusal(rows, section, policies)


def _of_section(section: str, recipe: Mapping[str, Any]) -> Iterator["Found"]:
    """Keys at the top of the recipe, where tools without sections have theirs, and in the section."""
    given = recipe.get(section)
    yield from _found(section, "", recipe)
    if isinstance(given, Mapping):
        yield from _found(section, section, given)
    elif section == "adapter" and given is not None and (ours := _adapters(given)):
        yield "adapter", given, ours, "axolotl"


Found = tuple[str, Any, str, str]  # key as the recipe has it, value, what to write instead, tool


def _found(section: str, where: str, given: Mapping[str, Any]) -> Iterator[Found]:
    for key, value in given.items():
        for row in TABLE:
            if row.section == section and key in row.words.split():
                ours = row.ours if isinstance(row.ours, str) else None
                if isinstance(row.ours, tuple) and isinstance(value, bool):
                    ours = row.ours[0 if value else 1]
                elif callable(row.ours):
                    ours = row.ours(value)
                if ours is not None:
                    yield f"{where}.{key}".removeprefix("."), value, ours, row.tool


def answers(key: str, value: Any) -> set[str]:
    """What to write for `key` in any section where another tool has it."""
    return {ours for section in _RULES for _, _, ours, _ in _found(section, "", {key: value})}


def _refusal(rows: Sequence[Found], section: str, policies: Sequence[str]) -> UserError:
    absent = [_ABSENT[word].format(word.upper()) for _, value, *_ in rows if (word := str(value).lower()) in _ABSENT]
    tools = ", ".join(dict.fromkeys(name for *_, tool in rows for name in tool.split(", ")))
    return UserError(
        "; ".join(f"{key}={as_yaml(value)}" for key, value, *_ in rows),
        "; ".join(absent)
        or f"that is another tool's name ({tools}); {_RULES[section].format(policies=', '.join(policies))}",
        "use " + "; ".join(dict.fromkeys(ours for _, _, ours, _ in rows)),
    )


def as_yaml(value: Any) -> str:
    """A value as a recipe would have it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(one)}" for key, one in value.items()) + "}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f'"{text}"' if isinstance(value, str) and text.isdigit() else text  # a number in quotes is text
