"""Keys that axolotl and LLaMA-Factory take over from transformers, read into facts. No torch."""

import re
from collections.abc import Mapping

from windlass.commands.recipes.foreign_facts import Facts, Keys, listed_values
from windlass.settings import as_yaml


def take_shared(keys: Keys, facts: Facts) -> None:
    """Steps, learning rate with its floor and warm-up, intervals, ZeRO's stage, sinks, seed."""
    if (steps := keys.count("max_steps", -1)) > 0:
        facts.steps = steps
    facts.learning_rate = keys.number("learning_rate", 5e-5)
    facts.weight_decay, facts.beta2 = keys.number("weight_decay", 0.0), keys.number("adam_beta2", 0.999)
    if isinstance(warmup := keys.left.get("warmup_steps"), float) and 0 < warmup < 1:  # since transformers 5
        keys.left["warmup_ratio"] = keys.take("warmup_steps")
    facts.warmup_steps, facts.warmup_ratio = keys.count("warmup_steps", 0), keys.number("warmup_ratio", 0.0)
    deepspeed = keys.take("deepspeed")
    if isinstance(deepspeed, str) and (stage := re.search(r"(?:zero|z)_?([0-3])", deepspeed.lower())):
        facts.settings.append((f"deepspeed: {deepspeed}, by its name", f"parallel.zero={stage[1]}"))
    elif deepspeed is not None:
        facts.left.append((f"deepspeed: {deepspeed}", "its stage is parallel.zero; offload is parallel.offload"))
    _floor(keys, facts)
    _shares_of_steps(keys, facts)
    project, reported = keys.take("wandb_project"), listed_values(keys.take("report_to"))
    sinks = [sink for sink in ("tensorboard", "wandb", "trackio") if sink in reported or (sink == "wandb" and project)]
    if sinks:
        facts.settings.append((f"metrics to {', '.join(sinks)}", f"report.sinks=[{', '.join(sinks)}]"))
    if project:
        facts.settings.append((f"wandb_project: {project}", f"report.project={project}"))
    content = keys.take("fsdp_config")
    if isinstance(content, Mapping):
        keys.left |= content
    is_theirs, seed = "seed" not in keys.left, keys.take("seed", 42)
    facts.settings.append((f"seed: {seed}{', their default' if is_theirs else ''}", f"run.seed={seed}"))


def _floor(keys: Keys, facts: Facts) -> None:
    """What the learning rate falls to, as a share of its peak: by axolotl's own key, or by those of transformers' schedules."""
    more = keys.section("lr_scheduler_kwargs")
    facts.floor = keys.number("cosine_min_lr_ratio", more.number("min_lr_rate", 0.0))
    if (least := more.number("min_lr", 0.0)) and facts.learning_rate:
        facts.floor = least / facts.learning_rate
    for key, value in more.left.items():
        facts.left.append(
            (f"{key} of lr_scheduler_kwargs: {as_yaml(value)}", "a schedule here has a kind, a floor and a warm-up")
        )
    if not 0 <= facts.floor <= 1:
        facts.left.append(
            (f"a floor of {facts.floor:g}", "optim.floor is a share of the peak, from 0 to 1; the recipe has 0")
        )
        facts.floor = 0.0


def _shares_of_steps(keys: Keys, facts: Facts) -> None:
    """transformers takes an interval below 1 as a share of all steps."""
    for key in ("save_steps", "eval_steps", "logging_steps"):
        value = keys.left.get(key)
        if isinstance(value, float) and 0 < value < 1 and facts.steps is not None:
            keys.left[key] = max(1, round(value * facts.steps))
