"""Rows of other names -> `messages`: what `rows` of a source says of where a conversation is.

    messages            messages: [{role, content}]
    sharegpt            conversations: [{from: human | gpt, value}], and perhaps system
    alpaca              instruction, input (may be empty), output, and perhaps system
    prompt-completion   prompt, completion

or own names of the same two forms: a list of messages, or columns of a question and its answer. Without `rows` a row has the keys
of the first or the last. What the mapping does not name is left out.
"""

from collections.abc import Mapping
from typing import Any

from windlass.data.sources.bad_rows import BadRow
from windlass.data.sources.shape_config import RowsConfig

ASSISTANT = "assistant"


def columns_of(shape: RowsConfig) -> tuple[str, ...]:
    """The keys of a row that are read."""
    held = [shape.messages] if shape.messages is not None else [*shape.prompts, shape.completion]
    return tuple(name for name in (*held, shape.system, "tools") if name is not None)


def as_chat_row(row: Mapping[str, Any], shape: RowsConfig, where: str) -> dict[str, Any]:
    """The row with `messages` under its usual names. Raises BadRow."""
    system = row.get(shape.system) if shape.system is not None else None
    messages = _of_list(row, shape, where) if shape.messages is not None else _of_columns(row, shape, where)
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    return {"messages": messages, **({"tools": row["tools"]} if "tools" in row else {})}


def _of_list(row: Mapping[str, Any], shape: RowsConfig, where: str) -> list[Any]:
    assert shape.messages is not None
    held = _needed(row, shape.messages, where)
    if not isinstance(held, list) or not all(isinstance(message, Mapping) for message in held):
        given = f"{where} has {type(held).__name__} under `{shape.messages}`"
        raise BadRow("wrong type", given, f"`{shape.messages}` is a list of messages", "mend the row")
    return [_renamed(message, shape, f"{where}, message {number}") for number, message in enumerate(held)]


def _renamed(message: Mapping[str, Any], shape: RowsConfig, where: str) -> dict[str, Any]:
    names = {shape.role: "role", shape.content: "content"}
    found = {names.get(key, key): value for key, value in message.items()}
    if shape.roles and isinstance(found.get("role"), str):
        if found["role"] not in shape.roles:
            given, rule = (
                f"{where} has the {shape.role} `{found['role']}`",
                f"the mapping knows {', '.join(shape.roles)}",
            )
            raise BadRow(
                "unknown role", given, rule, "name it in `rows: {roles: {...}}` of the source, or mend the row"
            )
        found["role"] = shape.roles[found["role"]]
    return found


def _of_columns(row: Mapping[str, Any], shape: RowsConfig, where: str) -> list[Any]:
    assert shape.completion is not None
    first, *more = shape.prompts
    asked, answer = _needed(row, first, where), _needed(row, shape.completion, where)
    if isinstance(asked, list) or isinstance(answer, list):  # messages, which chat_rows judges
        prompt = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        return [*prompt, *(answer if isinstance(answer, list) else [{"role": ASSISTANT, "content": answer}])]
    parts = [asked, *filter(None, map(row.get, more))]  # a further one may be empty, or not there
    wrong = next((part for part in parts if not isinstance(part, str)), None)
    if wrong is not None:
        given = f"{where} has {type(wrong).__name__} in {', '.join(shape.prompts)}"
        raise BadRow("wrong type", given, "what is asked is a text", "mend the row")
    return [{"role": "user", "content": "\n\n".join(parts)}, {"role": ASSISTANT, "content": answer}]


def _needed(row: Mapping[str, Any], key: str, where: str) -> Any:
    rule = f"`rows` of the source says that a row has `{key}`"
    if key not in row:
        raise BadRow(
            "missing key",
            f"{where} has the keys {', '.join(map(str, row)) or 'none'}",
            rule,
            "give another mapping in `rows`",
        )
    if row[key] is None:
        raise BadRow("null", f"{where} has nothing under `{key}`", rule, "mend the row")
    return row[key]
