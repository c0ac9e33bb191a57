"""A recipe from a file of axolotl, LLaMA-Factory or torchtune: what maps is mapped, what does not is named. No torch.

A tool's reader (foreign_files.py) turns its file into facts, the few things that every tool says by several keys together: the
batch, the length, the data, the schedule. All other keys go through the rows that also answer wrong keys of a recipe (table.py
and renamed_keys.py), so a new row serves both. Where a tool's default differs from ours, the recipe says the tool's.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

from windlass.commands.recipes.foreign_facts import Facts, Rows
from windlass.commands.recipes.foreign_files import read_facts
from windlass.commands.recipes.imported_recipe import Imported
from windlass.config import RunConfig
from windlass.data.sources.config import SourceConfig
from windlass.errors import UserError
from windlass.mistakes import accepted
from windlass.other_names.answers import REMOVE, answers
from windlass.other_names.renamed_keys import renamed_elsewhere
from windlass.other_names.table import absent
from windlass.recipe import apply_override
from windlass.settings import as_yaml

OVERRIDE: Final = re.compile(r"(?:^|\s+)(?=[a-z]+(?:\.[a-z0-9_]+)+=)")
UNKNOWN: Final = "no key of this version does what it does"
SAME: Final = {"compile": "parallel.compile", "adam_beta1": "optim.beta1"}
WHY: Final = dict.fromkeys(
    ("template", "chat_template"),
    "turns are marked by the chat template of data.tokenizer.from, as its authors wrote it",
)
OF_A_SET: Final = {
    "roles": "`rows: {messages: ..., roles: {theirs: ours}}` of the source",
    "roles_to_train": "the assistant's answers are learned; `weight: 0` of a message leaves one out",
    "train_on_eos": "an answer is learned with its end",
    "train_on_eot": "an answer is learned with its end",
    "split": "a share of a split is counted in rows here: `documents: N` of the source",
    **dict.fromkeys(("images", "videos", "audios"), "models here read text alone"),
    **dict.fromkeys(("shards", "num_samples", "size"), "`documents: N` or `rows: first:end` of the source"),
}  # of a data set
SPEAKERS: Final = {"human": "user", "gpt": "assistant", "system": "system"}  # ShareGPT's
TEXTS, CHATS = ("completion", "pretrain"), ("chat", "sharegpt")
CHAT: Final = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}'
PAIR: Final = '{"prompt": ..., "chosen": ..., "rejected": ...}'
PAIRS: Final[dict[str, str | dict[str, Any]]] = {
    "preference": "",
    "ultra": "",
    "argilla_chat": "",
    "intel": {"prompt": "question", "system": "system"},
    "icr": {"prompt": "input", "system": "system"},
    "prompt_pairs": {"prompt": "prompt", "system": "system"},
    "argilla": {
        "prompt": "instruction",
        "system": "system",
        "chosen": "chosen_response",
        "rejected": "rejected_response",
    },
}
"""`rows` of a source of pairs by axolotl's type, without `chatml.` or `llama3.`; "" where rows are as ours. `preference` is the
kind that readers of other tools' files give to rows like ours."""


def import_recipe(
    given: Any, name: str, *, tool: str | None, ranks: int, datasets: Mapping[str, Any] | None = None
) -> Imported:
    """`given`: what the file `name` holds. `tool`: whose it is, where its keys do not say it. `ranks`: processes that it was
    meant for. `datasets`: LLaMA-Factory's dataset_info.json, or the file of v1's `train_dataset`. Raises UserError for a file of
    no such tool."""
    facts = read_facts(given, name, tool, datasets or {}, ranks)
    found = Imported(facts.tool, silent=facts.silent)
    if facts.base is None:
        raise UserError(
            f"the file names no model ({facts.base_key})",
            "a recipe that is imported begins from a model",
            f"add {facts.base_key}",
        )
    found.put(f"{facts.base_key}: {facts.base}", f"model.from={_quoted(facts.base)}")
    for key, ours in facts.settings:
        found.put(key, *_overrides(ours))
    for key, value in facts.rest.items():
        _by_rows(found, key, value)
    is_pairs = found.tree.get("objective", {}).get("kind") == "dpo"
    _data(found, facts, is_pairs)
    _borders(found, facts, is_pairs)
    _precision(found, facts)
    _batch(found, facts, ranks, is_pairs)
    _length(found, facts)
    _optimizer(found, facts)
    found.left += facts.left
    return found


def _batch(found: Imported, facts: Facts, ranks: int, is_pairs: bool) -> None:
    pair = 2 if is_pairs else 1
    parts = {
        "micro batch": facts.micro_batch,
        "accumulation": facts.accumulation,
        "ranks": ranks,
        "tokens": facts.length,
    }
    product = facts.micro_batch * facts.accumulation * ranks * facts.length * pair
    said = " x ".join(f"{value} {name}" for name, value in parts.items()) + (
        " x 2 sequences of a pair" if pair == 2 else ""
    )
    found.put(said, f"run.tokens_per_step={product}")
    found.put(f"{facts.micro_batch} per device", f"run.micro_batch={facts.micro_batch * pair}")
    found.put(f"{facts.length} tokens", f"data.sequence_length={facts.length}")


def _length(found: Imported, facts: Facts) -> None:
    if facts.steps is not None:
        found.put(f"{facts.steps} steps", f"run.steps={facts.steps}")
    else:
        found.put(f"{facts.epochs:g} epochs", f"run.epochs={facts.epochs:g}")
    found.put(f"output {facts.output}", f"run.directory={_quoted(facts.output)}")
    if facts.warmup_ratio and facts.warmup_steps:
        found.silent.append(f"warmup_ratio: {facts.warmup_ratio:g} (warmup_steps comes before it)")
    if facts.warmup_ratio and not facts.warmup_steps:
        if facts.steps is None:
            reason = "the number of steps follows from the data; optim.warmup_steps=auto is 2 % of them"
            found.left.append((f"warmup_ratio: {facts.warmup_ratio:g}", reason))
            return
        steps = int(facts.warmup_ratio * facts.steps)
        facts.warmup_steps = steps if facts.warmup_limit is None else min(steps, facts.warmup_limit)
    found.put(f"warm-up over {facts.warmup_steps} steps", f"optim.warmup_steps={facts.warmup_steps}")


def _data(found: Imported, facts: Facts, is_pairs: bool) -> None:
    if not facts.sources:
        raise UserError("the file names no data", "a recipe has at least one source", f"add {facts.data_key}")
    sources = [_source(found, rows, is_pairs) for rows in facts.sources]
    apply_override(found.tree, "data.sources=[]")
    found.tree["data"]["sources"] = sources
    if "objective" not in found.tree and all(source.get("format") == "chat" for source in sources):
        found.put("conversations alone", "objective.kind=sft")
    found.put(f"tokenizer {facts.tokenizer}", f"data.tokenizer.from={_quoted(facts.tokenizer or '')}")
    found.put(
        "a directory of its own", f"data.directory={_quoted(facts.prepared or facts.output.rstrip('/') + '-data')}"
    )
    if facts.validation_rows is not None:
        found.tree["data"]["validation"] = _source(found, facts.validation_rows, is_pairs)
    elif facts.validation is not None:
        found.put(f"validation {facts.validation:g}", f"data.validation={facts.validation:g}")
    elif facts.no_validation is not None:
        found.assume(f"{facts.no_validation}: {facts.tool} holds nothing out", "data.validation=none")


def _borders(found: Imported, facts: Facts, is_pairs: bool) -> None:
    """Whether the rows of a sequence see each other. Pairs share none: each answer has a sequence of its own."""
    if is_pairs:
        if found.tree["data"].pop("packing", None) is not None:
            found.silent.append("packing (each answer of a pair has a sequence of its own)")
    elif facts.borders is not None:
        is_text = all(rows.kind in TEXTS for rows in facts.sources)  # conversations are never cut
        packing = [f"data.packing={facts.borders.packing}"] if is_text else []
        found.assume(facts.borders.said, *packing, f"data.isolate={as_yaml(facts.borders.isolate)}")


def _precision(found: Imported, facts: Facts) -> None:
    """What a tool computes in where no key of its file says it."""
    if facts.precision is not None and "policy" not in found.tree.get("precision", {}):
        policy, why = facts.precision
        found.assume(why, f"precision.policy={policy}")


def _source(found: Imported, rows: Rows, is_pairs: bool) -> dict[str, Any]:
    found.mapped.append(
        (f"data: {rows.name}", f"data.sources, from {rows.source.get('path') or rows.source.get('hub')}")
    )
    for key, value in rows.left.items():
        reason = OF_A_SET.get(key) or WHY.get(key, UNKNOWN)
        found.left.append((f"{key} of {rows.name}: {as_yaml(value)}", reason))
    if is_pairs:
        shape = _pair_shape(rows)
        if shape is None:
            reason = f"rows are pairs here: {PAIR}; rename their keys, or name them by `rows` of the source"
            found.left.append((f"rows of {rows.name} ({rows.kind})", reason))
        return {**rows.source, "format": "preference", **({"rows": shape} if shape else {}), "too_long": "drop"}
    if rows.kind in TEXTS:
        return {**rows.source, **({"text": rows.column} if rows.column else {})}
    shape = _shape(rows)
    if shape is None:
        reason = f"rows are conversations here: {CHAT}; convert them, or name their columns by `rows` of the source"
        found.left.append((f"rows of {rows.name} ({rows.kind})", reason))
    return {**rows.source, "format": "chat", **({"rows": shape} if shape else {}), "too_long": "drop"}


def _shape(rows: Rows) -> str | dict[str, Any] | None:
    """`rows` of a source of conversations, "" where they are as ours; None where the tool's kind is not known here."""
    if rows.kind == "alpaca":
        return rows.names or "alpaca"
    return _list_shape(rows) if rows.kind.startswith(CHATS) else None


def _pair_shape(rows: Rows) -> str | dict[str, Any] | None:
    """`rows` of a source of pairs, as `_shape`; `rows.names` may rename only the two answers."""
    if rows.kind == "alpaca pairs":
        shape: str | dict[str, Any] = rows.names if "prompt" in rows.names else "alpaca"
    elif rows.kind in ("sharegpt pairs", "chat_template", "chat_template.default"):
        shape = _list_shape(rows) or "messages"
    else:
        return PAIRS.get(rows.kind.removeprefix("chatml.").removeprefix("llama3.").removeprefix("chat_template."))
    if not rows.names:
        return shape
    if isinstance(shape, str):
        known = SourceConfig(path="pairs", format="preference", rows=shape).shape
        assert known is not None
        shape = known.model_dump(exclude_unset=True, exclude={"completion"})
    return {**shape, **rows.names}


def _list_shape(rows: Rows) -> str | dict[str, Any]:
    """Where a list of messages is in a row, "" where it is as ours."""
    turns = (rows.messages, rows.role, rows.content)
    roles = rows.roles or (SPEAKERS if rows.role == "from" else {})
    is_named = any(theirs != ours for theirs, ours in roles.items())
    if turns == ("messages", "role", "content") and not is_named:
        return ""
    if turns == ("conversations", "from", "value") and roles.items() <= SPEAKERS.items():
        return "sharegpt"
    own = {key: held for key, held in (("role", rows.role), ("content", rows.content)) if held != key}
    return {"messages": rows.messages, **own, **({"roles": roles} if is_named else {})}


def _optimizer(found: Imported, facts: Facts) -> None:
    """What is written down in any case, since a tool's defaults are not ours."""
    found.put(f"learning rate {facts.learning_rate:g}", f"optim.learning_rate={facts.learning_rate:g}")
    schedule = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}.get(facts.schedule, facts.schedule)
    if schedule in ("cosine", "linear", "constant"):
        more = () if schedule == "constant" else (f"optim.floor={facts.floor:g}",)  # theirs fall to 0
        found.put(f"schedule {facts.schedule}", f"optim.schedule={schedule}", *more)
    else:
        reason = "schedules are cosine, wsd, linear and constant; the recipe has cosine"
        found.left.append((f"schedule {facts.schedule}", reason))
        found.put("the last learning rate", f"optim.floor={facts.floor:g}")
    found.put(f"weight decay {facts.weight_decay:g}", f"optim.weight_decay={facts.weight_decay:g}")
    found.put(f"beta2 {facts.beta2:g}", f"optim.beta2={facts.beta2:g}")
    is_adapted = found.tree.get("adapter", {}).get("kind") == "lora"
    if facts.optimizer and "muon" in facts.optimizer.lower() and not is_adapted:
        found.put(f"optimizer {facts.optimizer}", "optim.kind=muon")
    elif facts.optimizer and "adamw" not in facts.optimizer.lower():
        found.left.append((f"optimizer {facts.optimizer}", "optim.kind is adamw or muon; the recipe has adamw"))
    elif facts.optimizer and "8bit" in facts.optimizer.lower():
        found.left.append((f"optimizer {facts.optimizer}", "states are fp32 or bf16 (precision.states), never 8 bits"))


def _by_rows(found: Imported, key: str, value: Any) -> None:
    """A key that the rows of other tools' names answer, or that is named as left out."""
    given = f"{key}: {as_yaml(value)}"
    if (reason := absent(key, value)) is not None:
        found.left.append((given, reason))
        return
    if key in SAME:
        found.put(given, f"{SAME[key]}={as_yaml(value)}")
        return
    found_here = sorted(answers(key, value)) or [renamed_elsewhere(key, value).removeprefix("use ").rstrip("; ")]
    answer = accepted(RunConfig, (found_here[0] or WHY.get(key, UNKNOWN)).removeprefix(REMOVE).lstrip())
    settings = _overrides(answer)
    if settings:
        found.put(given, *settings)
    elif value is False:  # what is off there is off here
        found.silent.append(given)
    else:
        found.left.append((given, answer))


def _overrides(answer: str) -> list[str]:
    """`a.b=1 c.d=2 (why)` -> its overrides; none where it is prose, or a choice."""
    settings = [part for part in OVERRIDE.split(re.sub(r"\s+\([^()]*\)$", "", answer)) if part]
    is_choice = any(re.search(r" or$| \(", part) for part in settings)
    return (
        [] if is_choice or not all(re.fullmatch(r"[a-z]+(\.[a-z0-9_]+)+=.+", part) for part in settings) else settings
    )


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', width=1 << 20).strip()
