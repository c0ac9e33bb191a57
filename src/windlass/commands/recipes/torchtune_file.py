"""A recipe of torchtune's: sections that each name a component of Python, with its arguments. No torch."""

import re
from collections.abc import Mapping
from typing import Any, Final

from windlass.commands.recipes.foreign_facts import (
    Facts,
    Keys,
    Rows,
    last_part,
    listed_values,
    source_settings,
    split_of,
)
from windlass.commands.recipes.row_borders import borders_of_torchtune
from windlass.errors import UserError
from windlass.other_names.table import INSTEAD
from windlass.settings import as_yaml

BUILDERS: Final[dict[str, dict[str, str]]] = {
    "alpaca_dataset": {"hub": "tatsu-lab/alpaca"},
    "alpaca_cleaned_dataset": {"hub": "yahma/alpaca-cleaned"},
    "cnn_dailymail_articles_dataset": {"hub": "ccdv/cnn_dailymail", "subset": "3.0.0"},
    "grammar_dataset": {"hub": "liweili/c4_200m"},
    "hh_rlhf_helpful_dataset": {"hub": "RLHFlow/HH-RLHF-Helpful-standard"},
    "samsum_dataset": {"hub": "Samsung/samsum"},
    "slimorca_dataset": {"hub": "Open-Orca/SlimOrca-Dedup"},
    "stack_exchange_paired_dataset": {"hub": "lvwerra/stack-exchange-paired"},
}
"""What a builder of torchtune's loads where its `source` is not given: the defaults of torchtune/datasets/_*.py. Left out is
wikitext_dataset, whose default was another dataset in earlier versions."""
COLUMNS: Final = {"cnn_dailymail_articles_dataset": "article"}
SHAREGPT: Final = ("conversations", "from", "value")
KINDS: Final = {
    "alpaca_cleaned_dataset": "alpaca",
    "chat_dataset": "chat",
    "cnn_dailymail_articles_dataset": "completion",
    "preference_dataset": "preference",
    "slimorca_dataset": "sharegpt",
    "text_completion_dataset": "completion",
}
SILENT: Final = {
    "_component_", "checkpoint_files", "recipe_checkpoint", "model_type", "output_dir", "path", "merges_file",
    "fused",
}  # fmt: skip


def read_torchtune(keys: Keys) -> Facts:
    facts = Facts("torchtune", "checkpointer.checkpoint_dir", "dataset", schedule="constant", weight_decay=0.01)
    checkpointer, tokenizer, model = keys.section("checkpointer"), keys.section("tokenizer"), keys.section("model")
    datasets = [Keys(one if isinstance(one, Mapping) else {}) for one in _listed(keys.take("dataset"))]
    facts.output = str(keys.take("output_dir", "runs/torchtune"))
    base = checkpointer.text("checkpoint_dir")
    facts.base = base and base.replace("${output_dir}", facts.output)
    facts.micro_batch, facts.accumulation = keys.count("batch_size", 1), keys.count("gradient_accumulation_steps", 1)
    facts.length = tokenizer.count("max_seq_len", 2048)
    facts.epochs, per_epoch = keys.number("epochs", 1.0), keys.count("max_steps_per_epoch", 0)
    facts.steps = int(facts.epochs * per_epoch) or None
    if "seed" in keys.left:
        facts.settings.append((f"seed: {keys.left['seed']}", f"run.seed={keys.count('seed', 0)}"))
    else:
        facts.settings.append(("no seed: torchtune draws one at random", "run.seed=0"))
    optimizer, schedule = keys.section("optimizer"), keys.section("lr_scheduler")
    _optimizer(optimizer, schedule, keys, facts)
    _adapter(model, facts)
    _switches(keys, facts)
    _validation(datasets, keys.section("dataset_val"), facts)
    facts.borders = borders_of_torchtune(datasets)
    facts.sources = [_rows(data) for data in datasets]
    for section, rest in (
        ("checkpointer", checkpointer),
        ("tokenizer", tokenizer),
        ("model", model),
        *(("dataset", data) for data in datasets),
        ("optimizer", optimizer),
        ("lr_scheduler", schedule),
    ):
        for key, value in rest.left.items():
            given = f"{section}.{key}: {as_yaml(value)}"
            if key in SILENT:
                facts.silent.append(given)
            else:
                facts.left.append((given, "not read"))
    return facts


def _optimizer(optimizer: Keys, schedule: Keys, keys: Keys, facts: Facts) -> None:
    facts.learning_rate, facts.optimizer = (
        optimizer.number("lr", 2e-5),
        last_part(optimizer.take("_component_", "AdamW")),
    )
    facts.weight_decay = optimizer.number("weight_decay", 0.01)
    name = last_part(schedule.take("_component_", "constant"))
    facts.schedule = "cosine" if "cosine" in name else name
    facts.warmup_steps = schedule.count("num_warmup_steps", 0)
    if keys.left.get("clip_grad_norm") is None:
        facts.left.append(("clip_grad_norm: null", "gradients are clipped here: optim.max_norm is 1.0"))


def _switches(keys: Keys, facts: Facts) -> None:
    """After the adapter: with one, what is stored in bf16 is the frozen base alone."""
    loss, logger, dtype = keys.section("loss"), keys.section("metric_logger"), str(keys.take("dtype", "fp32"))
    is_whole = not any(ours.startswith("adapter.kind=lora") for _, ours in facts.settings)
    facts.settings.append(
        (f"dtype: {dtype}", f"precision.policy={'bf16-pure' if dtype == 'bf16' and is_whole else dtype}")
    )
    if keys.take("enable_activation_checkpointing"):
        facts.settings.append(("enable_activation_checkpointing: true", "parallel.recompute=full"))
    if (name := last_part(loss.take("_component_", ""))).startswith("DPO"):
        facts.settings.append((f"loss: {name}", f"objective.kind=dpo objective.beta={loss.number('beta', 0.1):g}"))
    elif name and "CrossEntropy" not in name and not name.startswith("CEWith"):
        raise UserError(
            f"loss: {name}",
            "of torchtune's losses cross entropy and DPOLoss are known here: under another one the run learns something else",
            f"write one of them into the file; here are cross entropy, or {INSTEAD}",
        )
    if "WandB" in last_part(logger.take("_component_", "")):
        project = logger.take("project", "torchtune")
        facts.settings.append(
            (f"metric_logger: WandBLogger, {project}", f"report.sinks=[wandb] report.project={project}")
        )


def _listed(datasets: Any) -> list[Any]:
    """A list of them is one data set after the other."""
    return datasets if isinstance(datasets, list) else [] if datasets is None else [datasets]


def _validation(datasets: list[Keys], scored: Keys, facts: Facts) -> None:
    """`dataset_val`: the end of the one data set, whose beginning is trained on, or a set of its own."""
    if not scored.left:
        facts.no_validation = "no dataset_val"
        return
    trained = datasets[0].left if len(datasets) == 1 else {}
    border = re.fullmatch(r"(\w+)\[:(\d+)%\]", str(trained.get("split")))
    if border and scored.left == {**trained, "split": f"{border[1]}[{border[2]}%:]"} and 0 < int(border[2]) < 100:
        facts.validation, trained["split"] = (100 - int(border[2])) / 100, border[1]
    else:
        facts.validation_rows = _rows(scored)


def _rows(data: Keys) -> Rows:
    """One data set. Raises UserError where the file does not say which one: a recipe would learn from another."""
    component = last_part(data.take("_component_", ""))
    file, source = data.take("data_files"), data.take("source")
    if not file and not source and component not in BUILDERS:
        raise UserError(
            f"the dataset of {component or 'the file'} has no source",
            f"a recipe names its data; known without a source are {', '.join(BUILDERS)}",
            "add dataset.source, a name of the hub, or dataset.data_files to the file",
        )
    found = source_settings(str(file or source)) if file or source else dict(BUILDERS[component])
    part, left = split_of(data.take("split", "")) if "hub" in found else ({}, {})
    found |= part if part.get("split") else {}
    kind = KINDS.get(component, component.removesuffix("_dataset") or "chat")
    column = data.take("column") or COLUMNS.get(component)
    is_shared = data.take("conversation_style", "sharegpt" if kind == "sharegpt" else "openai") == "sharegpt"
    messages, role, content = SHAREGPT if is_shared else ("messages", "role", "content")
    messages = data.text("conversation_column", messages if kind == "sharegpt" else "messages") or ""
    name = str(file or source or found["hub"])
    return Rows(found, name, kind, column, messages, role, content, left=left)


def _adapter(model: Keys, facts: Facts) -> None:
    name = last_part(model.take("_component_", ""))
    if "lora" not in name:
        return
    names = {"output_proj": "o_proj"}
    targets = [names.get(one, one) for one in listed_values(model.take("lora_attn_modules"))] or ["q_proj", "v_proj"]
    if model.take("apply_lora_to_mlp"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    if model.take("apply_lora_to_output"):
        facts.left.append(("model.apply_lora_to_output: true", "the head carries no factors here"))
    rank, alpha = model.count("lora_rank", 8), model.number("lora_alpha", 16)
    base = " adapter.base=nf4" if "qlora" in name or model.take("quantize_base") else ""
    facts.settings.append((f"model: {name}", f"adapter.kind=lora adapter.rank={rank} adapter.alpha={alpha:g}{base}"))
    facts.settings.append(("lora_attn_modules", f"adapter.targets=[{', '.join(targets)}]"))
    if dropout := model.number("lora_dropout", 0.0):
        facts.settings.append((f"lora_dropout: {dropout:g}", f"adapter.dropout={dropout:g}"))
