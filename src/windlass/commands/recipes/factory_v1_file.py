"""A recipe of LLaMA-Factory's v1 trainer, rewritten with the keys of its first trainer, which foreign_files reads. No torch.

v1 has sections with a `name` each, defaults of its own, and a file of data sets that `train_dataset` names. Its command (`sft` or
`dpo`) decides whether answers are learned or pairs compared; here the data sets and the keys decide it.
"""

from collections.abc import Mapping
from typing import Any, Final

DEFAULTS: Final = {
    "learning_rate": 1e-4, "weight_decay": 0.01, "lr_scheduler_type": "constant", "bf16": True, "gradient_checkpointing": True,
}  # fmt: skip
"""v1's defaults where the first trainer has others; the weight decay is that of torch's AdamW."""
RENAMED: Final = {
    "model": "model_name_or_path",
    "micro_batch_size": "per_device_train_batch_size",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "mp_replicate_size": "dp_replicate_size",
    "mp_shard_size": "dp_shard_size",
}
SECTIONS: Final = {
    "peft_config": {"r": "lora_rank", "target_modules": "lora_target", "name": "finetuning_type"},
    "quant_config": {},
    "dist_config": {"config_file": "deepspeed"},
    "optim_config": {"name": "optim", "wd": "weight_decay"},
    "lr_scheduler_config": {"name": "lr_scheduler_type"},
}
"""A section's keys that have other names in the first trainer. The other keys keep theirs."""
NOTHING: Final = {("quant_config", "name"), ("dist_config", "name"), ("dist_config", "dcp_path")}
OF_PAIRS: Final = {"pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "dpo_label_smoothing"}


def is_v1(given: Mapping[str, Any]) -> bool:
    """Whether a file is v1's: the first trainer has neither `train_dataset` nor these sections."""
    return "model" in given and any(key in given for key in ("train_dataset", *SECTIONS))


def is_list(name: Any) -> bool:
    """Whether `train_dataset` names a file of data sets, and no data."""
    return isinstance(name, str) and name.endswith((".yaml", ".yml"))


def first_words(given: Mapping[str, Any], sets: Mapping[str, Any], ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """v1's keys -> keys of the first trainer, and its dataset_info. `sets`: what the file that `train_dataset` names holds; empty
    where there is no such file. `ranks`: the number of processes, by which the global batch becomes accumulation."""
    said = {RENAMED.get(key, key): value for key, value in given.items() if value is not None}
    adapter = said.get("peft_config")
    is_adapted = isinstance(adapter, Mapping)
    said |= {"finetuning_type": "full"} | (
        {"lora_alpha": 16, "lora_dropout": 0.05, "lora_target": "all"} if is_adapted else {}
    )
    for section, names in SECTIONS.items():
        held = said.pop(section, None)
        if isinstance(held, Mapping):
            left = {key: value for key, value in held.items() if (section, key) not in NOTHING}
            said |= {names.get(key, key): value for key, value in left.items() if value is not None}
        elif held is not None:
            said[section] = held  # no section: named among what was not read
    whole = said.pop("global_batch_size", None)
    micro = said.get("per_device_train_batch_size", 1)
    if isinstance(whole, int) and isinstance(micro, int) and micro > 0:
        said["gradient_accumulation_steps"] = max(1, whole // (micro * ranks))
    name = said.pop("train_dataset", None)
    alone = {
        "path": f"./{name}" if is_list(name) else name,
        **(
            {"converter": "data sets of a file that is not here; of pairs: objective.kind=dpo"} if is_list(name) else {}
        ),
    }
    described = {one: _described(of) for one, of in (sets or ({str(name): alone} if name else {})).items()}
    is_pairs = bool(OF_PAIRS & said.keys()) or any(one["formatting"] == "preference" for one in described.values())
    usual = {**DEFAULTS, "stage": "dpo" if is_pairs else "sft", "per_device_train_batch_size": 1}
    return {**usual, **said, "dataset": list(described)}, described


def _described(of: Any) -> dict[str, Any]:
    """A data set as the first trainer's dataset_info.json describes it. Rows that no converter reads are v1's own."""
    held = dict(of) if isinstance(of, Mapping) else {}
    kind = held.pop("converter", "v1's own")
    held.pop("source", None)  # the path says it
    return {"hf_hub_url": str(held.pop("path", "")), "formatting": "preference" if kind == "pair" else kind, **held}
