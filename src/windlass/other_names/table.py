"""The rows: keys of other tools, and what to write in their place. A section of the recipe that is new adds its own. No torch.

Sources: FSDP's and torchtitan's settings, accelerate's FSDP plugin, DeepSpeed's sections, PEFT's LoraConfig, and the recipes of
axolotl, LLaMA-Factory, torchtune and TRL.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from windlass.other_names.spellings import SHARDINGS, policy_of, sharding_of
from windlass.other_names.target_names import listed_targets, target_list

_POLICY_ALONE: Final = "remove it: precision.policy alone says it"


def _dtype(setting: str) -> Callable[[Any], str]:
    return lambda value: f"precision.{setting}={(policy_of(value) or 'precision.policy=fp32').partition('=')[2]}"


def _precision_flag(policy: str) -> Callable[[Any], str | None]:
    """What to write for a flag of `policy`'s name, by its value: a switch, a section with `enabled`, or auto."""

    def answer(value: Any) -> str | None:
        if value == "auto":  # axolotl: bf16 where the device has it, else fp16
            return "precision.policy=auto"
        is_on = value.get("enabled", True) if isinstance(value, Mapping) else value
        return policy_of(policy) if is_on else _POLICY_ALONE

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
_ANY_CUT: Final = " or ".join(list(SHARDINGS.values())[:3])
_OWN_NAMES: Final = "remove it: FSDP2 keeps every parameter by its own name"
_UNIT_IS_A_BLOCK: Final = "remove it: a unit is a block; or use parallel.blocks_per_unit"
_PREFETCH_ONE: Final = "remove it: one unit ahead is FSDP2's own order in backward; or use parallel.prefetch for more"
_ZERO, _OFFLOAD = ("parallel.zero=3", "parallel.zero=2"), ("parallel.offload=true", "parallel.offload=false")
_RECOMPUTE, _PREFETCH = (
    ("parallel.recompute=full", "parallel.recompute=none"),
    ("parallel.prefetch=1", "parallel.prefetch=0"),
)
_SFT: Final = "TRL, axolotl, LLaMA-Factory"
_LENGTH: Final = "data.sequence_length"
_ANSWERS: Final = "remove it: of a source with `format: chat` the answers alone are learned, of a text every token"
_PAIRS: Final = "TRL, axolotl, LLaMA-Factory"
_STAGES: Final = {"pt": "objective.kind=pretrain", "sft": "objective.kind=sft", "dpo": "objective.kind=dpo"}
_LOSSES: Final = {
    name: f"objective.kind=dpo objective.loss={name}" for name in ("sigmoid", "ipo", "robust", "hinge", "simpo", "orpo")
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
        ("cpo", "exo_pair", "nca_pair", "apo_zero", "apo_down"),
        "{} is not in this version, which has other losses on pairs",
    ),
}
_FACTORS: Final = "adapter.kind=lora"
_FROZEN: Final = "adapter.kind=none, with optim.groups for what is not trained (frozen: true)"
_BIASES: Final = 'remove it: biases stay frozen; to train them use adapter.also_train=["*bias"]'
_DORA: Final = "DoRA is not in this version: it also trains a magnitude for each output of a matrix"
_OTHER_ADAPTERS: Final = {
    "dora": _DORA,
    **{
        name.lower(): f"{name} is not in this version, which has LoRA's factors alone"
        for name in [
            "AdaLoRA",
            "LoHa",
            "LoKr",
            "VeRA",
            "OFT",
            "BOFT",
            "IA3",
            "prefix-tuning",
            "prompt-tuning",
            "p-tuning",
        ]
    },
}
INSTEAD: Final = (
    "objective.kind=dpo on pairs (`format: preference`; loss sigmoid, ipo, robust, hinge, simpo or orpo), or "
    "objective.kind=sft on good answers alone"
)
# fmt: off
TABLE: Final = (
    OtherName("parallel", "strategy sharding_strategy fsdp_sharding_strategy", _FSDP, lambda v: sharding_of(v, True) or _ANY_CUT),
    OtherName("parallel", "zero_stage stage zero_optimization", "DeepSpeed", lambda v: sharding_of(v) or _ANY_CUT),
    OtherName("parallel", "zero", "FSDP1, DeepSpeed", lambda v: sharding_of(v) if isinstance(v, str) else None),
    OtherName("parallel", "fsdp", "transformers", lambda v: sharding_of(v) or SHARDINGS["FULL_SHARD" if v else "NO_SHARD"]),
    OtherName("parallel", "ddp", "torch", lambda v: sharding_of(v) or SHARDINGS["NO_SHARD"]),
    OtherName("parallel", "reshard_after_forward fsdp_reshard_after_forward", "FSDP2, accelerate", _ZERO),
    OtherName("parallel", "cpu_offload fsdp_cpu_offload fsdp_offload_params", _FSDP, _OFFLOAD),
    OtherName("parallel", "gradient_checkpointing activation_checkpointing", "transformers, Lightning", _RECOMPUTE),
    OtherName("parallel", "fsdp_activation_checkpointing", "accelerate", _RECOMPUTE),
    OtherName("parallel", "forward_prefetch fsdp_forward_prefetch", _FSDP, _PREFETCH),
    OtherName("parallel", "backward_prefetch fsdp_backward_prefetch", _FSDP, _PREFETCH_ONE),
    OtherName("parallel", "use_orig_params fsdp_use_orig_params", _FSDP, _OWN_NAMES),
    OtherName("parallel", "sync_module_states fsdp_sync_module_states", _FSDP, "remove it: every rank fills its own shard"),
    OtherName("parallel", "limit_all_gathers fsdp_limit_all_gathers", "FSDP1", "remove it: FSDP2 needs no such limit"),
    OtherName("parallel", "min_num_params auto_wrap_policy fsdp_auto_wrap_policy", _FSDP, _UNIT_IS_A_BLOCK),
    OtherName("parallel", "fsdp_transformer_layer_cls_to_wrap", "accelerate", _UNIT_IS_A_BLOCK),
    OtherName("parallel", "find_unused_parameters", "DDP", "remove it: a parameter without a gradient stops the run"),
    OtherName("parallel", "bucket_cap_mb ddp_bucket_cap_mb", "DDP", lambda v: f"parallel.zero=0 parallel.bucket_mib={v}"),
    OtherName("parallel", "mixed_precision", _FSDP, lambda v: policy_of(v) or "precision.policy=bf16"),
    OtherName("precision", "mixed_precision", "accelerate", lambda v: policy_of(v) or "precision.policy=bf16"),
    OtherName("precision", "bf16 bf16_full_eval", "transformers, DeepSpeed", _precision_flag("bf16")),
    OtherName("precision", "fp16 fp16_full_eval", "transformers, DeepSpeed", _precision_flag("fp16")),
    OtherName("precision", "fp8 float8", "axolotl, torchtitan", _precision_flag("fp8")),
    OtherName("precision", "pure_bf16", "LLaMA-Factory", ("precision.policy=bf16-pure", _POLICY_ALONE)),
    OtherName("precision", "tf32", "transformers", "remove it: whether products of fp32 run in TF32 is torch's setting"),
    OtherName("precision", "mixed_precision_param", "torchtitan", _dtype("parameters")),
    OtherName("precision", "mixed_precision_reduce", "torchtitan", _dtype("reduce")),
    OtherName("precision", "mixed_precision_output", "torchtitan", _dtype("output")),
    OtherName("precision", "mixed_precision_buffer", "torchtitan", "remove it: buffers stay as they are"),
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
    OtherName("adapter", "dora use_dora peft_use_dora", _LORA, lambda v: _FACTORS if v else "remove it: factors are plain LoRA"),
    OtherName("adapter", "finetuning_type", "LLaMA-Factory", lambda v: adapter_setting(v) or _FROZEN),
    OtherName("adapter", "kind", "axolotl, PEFT", lambda v: None if v in ("none", "lora") else adapter_setting(v)),
    OtherName("adapter", "bias", _LORA, lambda v: None if isinstance(v, bool) else _BIASES),
    OtherName("adapter", "lora_bias", _LORA, _BIASES),
    OtherName("data", "cutoff_len max_length max_seq_length max_seq_len sequence_len", _SFT, lambda v: f"{_LENGTH}={v}"),
    OtherName("data", "train_on_inputs train_on_prompt", _SFT, _ANSWERS),
    OtherName("data", "sample_packing packing", "axolotl, TRL", lambda v: _packing(v)),
    OtherName("objective", "stage", "LLaMA-Factory", lambda v: objective_setting(v)),
    OtherName("objective", "rl", "axolotl", lambda v: objective_setting(v)),
    OtherName("objective", "kind", _PAIRS, lambda v: objective_setting(v) if str(v).lower() in {*_ABSENT, *_LOSSES} else None),
    OtherName("objective", "loss", _PAIRS, lambda v: _loss_meant(v)),
    OtherName("objective", "loss_type pref_loss dpo_loss", _PAIRS, lambda v: objective_setting(v)),
    OtherName("objective", "pref_beta dpo_beta rl_beta", _PAIRS, lambda v: f"objective.kind=dpo objective.beta={v}"),
    OtherName("objective", "dpo_label_smoothing", _PAIRS, lambda v: f"objective.loss=robust objective.label_smoothing={v}"),
    OtherName("objective", "simpo_gamma cpo_simpo_gamma", _PAIRS, lambda v: f"objective.loss=simpo objective.target_margin={v}"),
    OtherName("objective", "ref_model reference_model", _PAIRS, "remove it: the reference is the model that the run begins with"),
    OtherName("objective", "precompute_ref_log_probs", "TRL", "remove it: scores of a full model are computed once and kept"),
)
# fmt: on


def absent(key: str, value: Any) -> str | None:
    """Why what another tool's row asks for is not in this version; None where it is."""
    if key.endswith("dora") and value:
        return _DORA
    if key in ("adapter", "adapter.kind") and isinstance(value, list):
        return "several adapters in one run are not in this version: a matrix carries one pair of factors"
    word = "reward" if key.endswith("reward_model") and value is True else str(value).lower()
    return _OTHER_ADAPTERS.get(word) or (_ABSENT[word].format(word.upper()) if word in _ABSENT else None)


def _also_train(value: Any) -> str:
    return "adapter.also_train=[" + ", ".join(f'"*{name}*"' for name in target_list(value)) + "]"


def objective_setting(value: Any) -> str:
    """The setting for an objective or a loss that another tool names."""
    name = str(value[0] if isinstance(value, list) and value else value).lower()
    return _STAGES.get(name) or _LOSSES.get(name) or INSTEAD


def _loss_meant(value: Any) -> str | None:
    """The setting for a value of `objective.loss` that is none of ours."""
    if str(value).lower() == "dpo":
        return "objective.loss=sigmoid, which is DPO's as it was published"
    return objective_setting(value) if str(value).lower() in _ABSENT else None


def _faster(value: Any) -> str:
    return f'optim.groups=[{{names: ["*lora_B*"], learning_rate_scale: {value}}}]'


def _packing(value: Any) -> str | None:
    return (
        ("data.packing=best-fit" if value else "remove it: documents are always packed")
        if isinstance(value, bool)
        else None
    )


def adapter_setting(value: Any) -> str | None:
    """`adapter.kind=...` for another tool's word of an adapter."""
    kinds = {"lora": "adapter.kind=lora", "qlora": "adapter.kind=lora adapter.base=nf4", "full": "adapter.kind=none"}
    if isinstance(value, list):
        return _FACTORS
    return kinds.get(name := str(value).lower()) or (_FACTORS if name in _OTHER_ADAPTERS else None)
