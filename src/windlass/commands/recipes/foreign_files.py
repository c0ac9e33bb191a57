"""Recipes of axolotl and LLaMA-Factory, read into facts: what each of them says by several keys together. No torch. Those of
torchtune are read by torchtune_file.

Defaults are theirs: of axolotl's configuration schemas, and of LLaMA-Factory's and transformers' argument classes.
"""

from collections.abc import Mapping
from typing import Any, Final

from windlass.commands.recipes.factory_sets import named_set
from windlass.commands.recipes.factory_v1_file import first_words, is_v1
from windlass.commands.recipes.foreign_facts import (
    Facts,
    Keys,
    Rows,
    last_part,
    listed_values,
    source_settings,
    split_of,
)
from windlass.commands.recipes.row_borders import borders_of_axolotl, borders_of_llama_factory
from windlass.commands.recipes.shared_keys import take_shared
from windlass.commands.recipes.torchtune_file import read_torchtune
from windlass.errors import UserError, nearest
from windlass.other_names.table import INSTEAD, absent, adapter_setting, objective_setting
from windlass.settings import as_yaml

TOOLS: Final = {
    "axolotl": {"base_model", "datasets", "pretraining_dataset", "micro_batch_size", "sequence_len", "num_epochs"},
    "llama-factory": {
        "model_name_or_path",
        "stage",
        "finetuning_type",
        "cutoff_len",
        "template",
        "dataset",
        "do_train",
    },
    "torchtune": {"tokenizer", "checkpointer", "model", "dataset", "optimizer", "loss", "metric_logger"},
}
NOT_HERE: Final = {
    "qat": "training with weights rounded as a quantized model's (QAT)",
    "quantizer": "training with weights rounded as a quantized model's (QAT)",
    **dict.fromkeys(
        ("kd_trainer", "teacher_model", "teacher_checkpointer", "kd_loss"), "learning from a teacher's outputs"
    ),
    "diffusion": "a diffusion objective",
}
"""Keys that ask for training which is not here: without them the file would become a plain finetune."""
PLUGINS: Final = {"KDPlugin": "kd_trainer", "DiffusionPlugin": "diffusion"}
"""Plugins of axolotl that ask for the same, by the last part of their names."""
OBJECTIVES: Final = {"rl", "stage", "pref_loss", "dpo_loss", "reward_model", "process_reward_model"}
# what they decide is derived here, or is how those tools run
SILENT: Final = {
    "do_train", "do_eval", "overwrite_output_dir", "overwrite_cache", "plot_loss", "ddp_timeout", "strict", "trust_remote_code",
    "group_by_length", "pad_to_sequence_len", "flash_attention", "flash_attn", "xformers_attention", "sdp_attention",
    "is_llama_derived_model", "model_type", "tokenizer_type", "preprocessing_num_workers", "dataset_num_proc",
    "per_device_eval_batch_size", "eval_batch_size", "batch_size_val", "eval_strategy", "save_strategy", "device", "shuffle",
    "loss", "profiler", "kernel_config", "model_class", "sample_backend", "max_new_tokens", "batching_workers", "dist_timeout",
    "wandb_entity", "wandb_watch", "wandb_log_model", "dataloader_num_workers", "dataset_processes", "debug",
}  # fmt: skip


def read_facts(given: Any, name: str, tool: str | None, datasets: Mapping[str, Any], ranks: int = 1) -> Facts:
    """`datasets`: LLaMA-Factory's descriptions of data sets. `ranks`: processes that the file was meant for. Raises UserError for
    a file of none of these tools, or of several, and for values that are none."""
    if not isinstance(given, Mapping):
        raise UserError(f"{name} holds {type(given).__name__}", "a recipe is a mapping of keys", "give a recipe's file")
    if tool is not None and tool not in TOOLS:
        raise UserError(
            f"--tool {tool}", f"files of {', '.join(TOOLS)} are read", nearest(tool, list(TOOLS)) + "choose one"
        )
    if tool in (None, "llama-factory") and is_v1(given):
        given, datasets = first_words(given, datasets, ranks)
        tool = "llama-factory"
    hits = {one: len(keys & set(given)) for one, keys in TOOLS.items()}
    best = max(hits.values())
    likely = [one for one, number in hits.items() if number == best]
    if tool is None and (best < 2 or len(likely) > 1):
        raise UserError(
            f"{name} has the keys {', '.join(map(str, list(given)[:8]))}",
            "a file is known by its keys: base_model (axolotl), model_name_or_path (LLaMA-Factory), checkpointer (torchtune)",
            "name the tool: --tool axolotl, llama-factory or torchtune. Arguments of transformers or TRL go into a recipe of "
            "`windlass init`: each key that is not ours is answered with what to write (windlass train RECIPE)",
        )
    keys = Keys(given)
    for key in OBJECTIVES & keys.left.keys():
        _check_objective(key, keys.left[key])
    _check_technique(keys)
    match tool or likely[0]:
        case "axolotl":
            facts = _axolotl(keys)
        case "llama-factory":
            facts = _llama_factory(keys, datasets)
        case _:
            facts = read_torchtune(keys)
    facts.tokenizer = facts.tokenizer or facts.base
    for key, value in keys.left.items():
        if key in SILENT:
            facts.silent.append(f"{key}: {as_yaml(value)}")
        else:
            facts.rest[key] = value
    return facts


def _axolotl(keys: Keys) -> Facts:
    facts = Facts("axolotl", "base_model", "datasets", base=keys.text("base_model"), schedule="cosine")
    facts.tokenizer = keys.text("tokenizer_config")
    facts.micro_batch = keys.count("micro_batch_size", 1)
    facts.accumulation = keys.count("gradient_accumulation_steps", 1)
    facts.length = keys.count("sequence_len", 512)
    facts.epochs = keys.number("num_epochs", 1.0)
    facts.output = str(keys.take("output_dir", "model-out"))
    facts.prepared = keys.text("dataset_prepared_path")
    facts.optimizer = str(keys.take("optimizer", "adamw_torch_fused"))
    facts.schedule = str(keys.take("lr_scheduler", "cosine"))
    if not {"warmup_steps", "warmup_ratio"} & set(keys.left):
        keys.left["warmup_ratio"], facts.warmup_limit = 0.03, 100  # where neither is given
    take_shared(keys, facts)
    if (experts := keys.count("expert_parallel_size", 1)) > 1:
        shards = experts * keys.count("dp_shard_size", 1)  # there the two are axes of their own
        ours = f"parallel.expert={experts} parallel.shard={shards}"
        facts.settings.append((f"expert_parallel_size: {experts}, times dp_shard_size", ours))
    adapter = keys.take("adapter")
    if adapter is not None:
        ours = _adapter("adapter", adapter)
        facts.settings.append((f"adapter: {adapter}", ours))
        if keys.take("load_in_4bit") and adapter == "lora":  # qlora says it alone
            facts.settings.append(("load_in_4bit: true", "adapter.base=nf4"))
        if not {"lora_target_modules", "lora_target_linear"} & set(keys.left):
            facts.settings.append(("PEFT's default targets of most families", "adapter.targets=[q_proj, v_proj]"))
    _eight_bits(keys, facts)
    _validation(facts, "val_set_size", keys.take("val_set_size"))
    facts.borders = borders_of_axolotl(keys, "pretraining_dataset" in keys.left)
    for entry in [*listed_values(keys.take("datasets")), *listed_values(keys.take("pretraining_dataset"))]:
        facts.sources += _entry(entry)
    _scored(facts, [rows for entry in listed_values(keys.take("test_datasets")) for rows in _entry(entry)])
    if "bf16" in keys.named or keys.left.get("bfloat16"):
        facts.precision = ("fp32", "neither bf16 nor fp16 is on: axolotl computes in fp32")
    else:
        facts.precision = ("auto", "no bf16: axolotl has bf16 where the device has it, else fp16")
    _every(keys, facts, "evals_per_epoch", "saves_per_epoch")
    return facts


def _entry(entry: Any) -> list[Rows]:
    """The rows of one entry of axolotl's `datasets`: one source for each of its files."""
    given = Keys(entry if isinstance(entry, Mapping) else {"path": entry})
    kind = given.take("type", "completion" if isinstance(entry, str) else "alpaca")
    kind = "custom" if isinstance(kind, Mapping) else str(kind)
    path = given.text("path")
    paths = listed_values(given.take("data_files")) or [path]
    if not all(isinstance(one, str) for one in paths):
        raise UserError(f"datasets: {entry!r}", "an entry has a path", "add its path")
    names, answers = given.section("message_property_mappings"), {}
    for ours in ("chosen", "rejected"):
        if (key := f"field_{ours}") in given.left and given.left[key] != ours:
            answers[ours] = given.text(key)
        given.take(key)
    turns = (
        given.text("field_messages", "messages") or "",
        names.text("role", "role") or "",
        names.text("content", "content") or "",
    )
    hub = {ours: given.take(key) for ours, key in (("subset", "name"), ("revision", "revision")) if key in given.left}
    part, rest_of_split = split_of(given.take("split")) if "split" in given.left else ({}, {})
    hub |= part
    sources, column = [source_settings(one) for one in paths], given.take("field")
    given.take("ds_type")  # a file's ending says it
    left = [given.left | rest_of_split, *({} for _ in paths[1:])]
    return [
        Rows(source | hub if "hub" in source else source, path or one, kind, column, *turns, dict(answers), rest)
        for one, source, rest in zip(paths, sources, left, strict=True)
    ]


def _llama_factory(keys: Keys, datasets: Mapping[str, Any]) -> Facts:
    facts = Facts(
        "LLaMA-Factory", "model_name_or_path", "dataset", base=keys.text("model_name_or_path"), schedule="linear"
    )
    facts.micro_batch = keys.count("per_device_train_batch_size", 8)
    facts.accumulation = keys.count("gradient_accumulation_steps", 1)
    facts.length = keys.count("cutoff_len", 2048)
    facts.epochs = keys.number("num_train_epochs", 3.0)
    facts.output = str(keys.take("output_dir", "saves/model"))
    facts.optimizer = str(keys.take("optim", "adamw_torch"))
    facts.schedule = str(keys.take("lr_scheduler_type", "linear"))
    take_shared(keys, facts)
    kind = str(keys.take("finetuning_type", "lora"))  # theirs is LoRA where none is named
    facts.settings.append((f"finetuning_type: {kind}", _adapter("finetuning_type", kind)))
    if kind == "lora":
        rank = keys.count("lora_rank", 8)
        alpha = keys.number("lora_alpha", 2 * rank)
        facts.settings.append((f"rank {rank}, alpha {alpha:g}", f"adapter.rank={rank} adapter.alpha={alpha:g}"))
    if "quantization_bit" in keys.left and keys.left["quantization_bit"] != 4:
        facts.left.append(
            (f"quantization_bit: {keys.take('quantization_bit')}", "a base is plain or in four bits (nf4)")
        )
    _validation(facts, "val_size", keys.take("val_size"))
    folder, stage = keys.take("dataset_dir", "data"), str(keys.take("stage", "sft"))
    facts.settings.append((f"stage: {stage}", objective_setting(stage)))
    if isinstance(samples := keys.take("max_samples"), int):
        facts.left.append((f"max_samples: {samples}", "of each source: documents: N in data.sources"))
    facts.sources = [
        named_set(facts, name, datasets, folder, stage) for name in map(str, listed_values(keys.take("dataset")))
    ]
    scored = [
        named_set(facts, name, datasets, folder, stage) for name in map(str, listed_values(keys.take("eval_dataset")))
    ]
    _scored(facts, scored)
    facts.borders = borders_of_llama_factory(keys, stage)
    if kind == "full":
        facts.precision = ("fp32", "neither bf16, fp16 nor pure_bf16 is on: LLaMA-Factory trains in fp32")
    else:
        why = (
            "neither bf16 nor fp16 is on: LLaMA-Factory has the base in its own dtype, mostly bf16, and factors in fp32"
        )
        facts.precision = ("auto", why)
    return facts


def _check_objective(key: str, value: Any) -> None:
    """Raises UserError for an objective that is not here: the same rows under another one would teach something else."""
    reason = absent(key, value)
    if reason is not None or (objective_setting(value) == INSTEAD and value is not False):
        raise UserError(
            f"{key}: {as_yaml(value)}",
            reason or "of another tool's objectives pt, sft, dpo, ipo, robust, hinge, simpo and orpo are known here",
            "write into the file what the run is to learn, for example "
            f"{'rl' if 'reward' in key else key}: {'sigmoid' if 'loss' in key else 'dpo'} "
            f"where the rows are pairs; here that is {INSTEAD}",
        )


def _check_technique(keys: Keys) -> None:
    """Raises UserError for training that is not here, which would go on as a plain finetune."""
    found = [(key, key) for key in keys.left if key in NOT_HERE and keys.left[key] is not False]
    found += [
        ("plugins", PLUGINS[last])
        for one in listed_values(keys.left.get("plugins"))
        if (last := last_part(one)) in PLUGINS
    ]
    for key, kind in found:
        given = keys.left[key]
        part = last_part(given["_component_"]) if isinstance(given, Mapping) and "_component_" in given else given
        raise UserError(
            f"{key}: {as_yaml(part)}",
            f"{NOT_HERE[kind]} is not in this version",
            f"remove {key} from the file for a finetune without it",
        )


def _adapter(key: str, value: Any) -> str:
    """`adapter.kind=...`. Raises UserError for what would otherwise train other parameters."""
    reason, ours = absent("adapter", value), adapter_setting(value)
    if reason is None and ours is not None:
        return ours
    raise UserError(
        f"{key}: {as_yaml(value)}",
        reason
        or "a run trains all parameters or LoRA's factors; what stays as it is are optim.groups with frozen: true",
        f"write lora or full for {key} into the file; the groups go into the recipe that is written",
    )


def _eight_bits(keys: Keys, facts: Facts) -> None:
    if keys.take("load_in_8bit"):
        facts.left.append(("load_in_8bit: true", "a base is plain or in four bits (adapter.base=nf4)"))


def _validation(facts: Facts, key: str, value: Any) -> None:
    if isinstance(value, float) and 0 < value < 1:
        facts.validation = float(value)
    elif value is None or value == 0:
        facts.no_validation = f"no {key}" if value is None else f"{key}: {value}"
    else:
        facts.left.append(
            (
                f"{key}: {value}",
                "data.validation is a share, an amount in bytes or tokens, or a source; the recipe has 0.02",
            )
        )


def _scored(facts: Facts, scored: list[Rows]) -> None:
    """Sets that are only scored."""
    facts.validation_rows = next(iter(scored), None)
    for rows in scored[1:]:
        facts.left.append((f"validation on {rows.name}", "one set is data.validation; further ones are evaluate.sets"))


def _every(keys: Keys, facts: Facts, *names: str) -> None:
    for name in names:
        if (value := keys.take(name)) is not None:
            facts.left.append(
                (f"{name}: {value}", "counted in steps here: evaluate.every_steps, checkpoint.every_steps")
            )
