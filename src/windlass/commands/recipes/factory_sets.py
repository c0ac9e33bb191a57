"""Data sets as LLaMA-Factory's dataset_info.json describes them. No torch.

A set with `columns` has no other columns; one without has those of alpaca or ShareGPT.
"""

from collections.abc import Mapping
from typing import Any, Final

from windlass.commands.recipes.foreign_facts import Facts, Keys, Rows, source_settings, split_of

ROLES: Final = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}
AS_SHARED: Final = {"observation_tag": "observation", "function_tag": "function_call"}
"""Tags for tools that `rows: sharegpt` reads as they are."""
ALPACA: Final = {"prompt": ["instruction", "input"], "completion": "output"}


def named_set(facts: Facts, name: str, datasets: Mapping[str, Any], folder: Any, stage: str) -> Rows:
    """The set `name` as `datasets` describes it; else a guess at its place, which `facts.left` names. `stage`: pt, sft, dpo."""
    info = datasets.get(name)
    rows = _described(name, Keys(info if isinstance(info, Mapping) else {}), folder, stage == "pt")
    if not info:
        reason = f"no dataset_info.json describes it; its rows are looked for in {rows.source.get('path', name)}"
        facts.left.append((f"dataset: {name}", reason))
    return rows


def _described(name: str, info: Keys, folder: Any, is_text: bool) -> Rows:
    source = source_settings(str(info.take("hf_hub_url") or f"{folder}/{info.take('file_name', f'{name}.json')}"))
    for mirror in ("ms_hub_url", "om_hub_url"):
        info.take(mirror)
    if "hub" in source:
        source |= {"subset": str(info.take("subset"))} if "subset" in info.left else {}
        part, left = split_of(info.take("split", ""))
        source |= part if part["split"] else {}
        info.left |= left
    columns, tags = info.section("columns"), info.section("tags")
    if is_text:
        column = columns.text("prompt", "instruction") or ""
        return Rows(source, name, "pretrain", column, left=info.left | columns.left)
    kind = str(info.take("formatting", "alpaca"))
    answers: dict[str, Any] = {}
    if is_pairs := bool(info.take("ranking")):
        found = {name: columns.text(name, name) for name in ("chosen", "rejected")}
        answers = {name: column for name, column in found.items() if column != name}
    names = answers | (_columns(columns, is_pairs) if kind == "alpaca" else {})
    turns = (
        columns.text("messages", "conversations") or "",
        tags.text("role_tag", "from") or "",
        tags.text("content_tag", "value") or "",
    )
    roles = {str(tags.take(tag)): ours for tag, ours in ROLES.items() if tag in tags.left}
    if turns == ("conversations", "from", "value"):
        tags.left = {tag: value for tag, value in tags.left.items() if AS_SHARED.get(tag) != value}
    if columns.left.get("tools") == "tools":  # a row's list of tools, by the key that rows have here too
        columns.take("tools")
    kind = f"{kind} pairs" if is_pairs else kind
    return Rows(source, name, kind, None, *turns, names, info.left | columns.left | tags.left, roles)


def _columns(columns: Keys, is_pairs: bool) -> dict[str, Any]:
    """Where question and answer are in a row; empty where the row is alpaca's."""
    if not {"prompt", "query", "response", "system"} & columns.left.keys():
        return {}
    question = [columns.text("prompt", "instruction"), columns.text("query")]
    found: dict[str, Any] = {"prompt": [one for one in question if one]}
    found |= {} if is_pairs else {"completion": columns.text("response", "output")}
    found |= {"system": columns.take("system")} if "system" in columns.left else {}
    return {} if found == ALPACA else found
