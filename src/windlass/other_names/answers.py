"""Other tools' names in a recipe: each is refused with the setting to write instead. No torch.

Nothing is translated silently: two names for one setting would be two places to look.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from windlass.errors import UserError
from windlass.other_names.spellings import KINDS, optimizer_kind, policy_of, sharding_of
from windlass.other_names.table import TABLE, absent, adapter_setting
from windlass.settings import as_yaml

REMOVE: Final = "remove it:"
"""How the words of a row begin, where another tool's key is to be left out."""
_RULES: Final = {
    "adapter": "here the section adapter has kind, rank, alpha, targets and base",
    "data": "here the section data says how text becomes sequences",
    "objective": "here objective.kind says what a step optimizes",
    "parallel": "here zero says what is cut, shard and replicate over how many ranks",
    "precision": "here precision.policy is one of {policies}",
}

_ONE_WORD: Final = {
    "model": (
        "the section model says which model: a preset, files, or a family and its sizes",
        "use model={{preset: {word}}} for a preset (windlass keys model lists them), or model={{from: {word}}} for a directory "
        "or a name of the hub",
    ),
    "data": (
        "the section data has a list of sources",
        "use data.sources=[{{path: {word}}}] for files, or [{{hub: {word}}}] for a dataset of the hub",
    ),
    "optim": ("the section optim has kind (adamw or muon), learning_rate and others", "use optim.kind={optimizer}"),
}
"""Sections that other tools have as one word."""
_ONE_WORD_OF_DATA: Final = {
    "sources": (
        "data.sources is a list of sources",
        "use data.sources=[{{path: {word}}}] for files, or [{{hub: {word}}}] for a dataset of the hub",
    ),
    "tokenizer": (
        "the tokenizer is one that is there, or is trained on the documents",
        "use data.tokenizer={{from: {word}}}, or {{train: 8192}}",
    ),
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
            yield [section], UserError(f"a section `{section}`", rule, "its keys: windlass keys parallel")
    if isinstance(data := recipe.get("data"), Mapping):
        for key, (rule, change) in _ONE_WORD_OF_DATA.items():
            if isinstance(word := data.get(key), str):
                yield [f"data.{key}"], UserError(f"data.{key}: {word}", rule, change.format(word=word))
    for section, (rule, change) in _ONE_WORD.items():
        if isinstance(word := recipe.get(section), str):
            optimizer = optimizer_kind(word)
            if section == "optim" and optimizer not in KINDS:
                rule, optimizer = f"{rule}; {word} is not in this version", "adamw, or muon"
            yield [section], UserError(f"{section}: {word}", rule, change.format(word=word, optimizer=optimizer))
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
    elif section == "adapter" and (ours := adapter_setting(given)):
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
    reasons = [reason for key, value, *_ in rows if (reason := absent(key, value)) is not None]
    tools = ", ".join(dict.fromkeys(name for *_, tool in rows for name in tool.split(", ")))
    useful = dict.fromkeys(ours for _, _, ours, _ in rows if not ours.startswith(REMOVE))
    changes = ["use " + "; ".join(useful)] if useful else []
    useless = {
        ours: [key for key, _, other, _ in rows if other == ours] for _, _, ours, _ in rows if ours not in useful
    }
    changes += [
        ours if len(rows) == 1 else ours.replace(REMOVE, f"remove {', '.join(keys)}:", 1)
        for ours, keys in useless.items()
    ]
    return UserError(
        "; ".join(f"{key}={as_yaml(value)}" for key, value, *_ in rows),
        "; ".join(reasons)
        or f"that is another tool's name ({tools}); {_RULES[section].format(policies=', '.join(policies))}",
        "; ".join(changes),
    )


def advice(ours: str) -> str:
    """What to do by a row's words: `remove it: ...` for a key that nothing here needs, `use ...` for any other."""
    return ours if ours.startswith(REMOVE) else f"use {ours}"
