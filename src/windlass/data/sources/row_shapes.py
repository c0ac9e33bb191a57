"""Rows of other names -> `messages`: what `rows` of a source says of where a conversation is.

    messages            messages: [{role, content}]
    sharegpt            conversations: [{from: human | gpt | function_call | observation, value}], and perhaps system and tools
    alpaca              instruction, input (may be empty), output, and perhaps system
    prompt-completion   prompt, completion

or own names of the same two forms: a list of messages, or columns of a question and its answer. Without `rows` a row has the keys
of the first or the last. Of a pair the same names hold the prompt; `chosen` and `rejected`, or own names, an answer each. An own
name with dots, meta.dialogue, is a path where no key has that name. What the mapping does not name is left out; without a
mapping, a key that would change what is learned is refused.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from windlass.data.sources.bad_rows import BadRow
from windlass.data.sources.shape_config import CALLS, RowsConfig
from windlass.errors import nearest

ASSISTANT = "assistant"
ABSENT: Final = object()
MESSAGE_KEYS: Final = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "thinking",
    "weight",
)
TEXTS_BESIDE: Final = ("name", "reasoning_content", "thinking")
"""Keys of a message whose values are texts, beside its role and content."""
ARGUMENTS: Final = "arguments"
CALL_KEYS: Final = ("id", "type", "index", "function", "name", ARGUMENTS)
"""Keys of a call. The first three are numbers and marks, which a template may write in its own way."""
WEIGHTS: Final = ("train_on_turn", "loss_weight", "loss_mask", "mask", "weights", "train")
OTHER_SENSES: Final = ("images", "image", "videos", "audios")
BESIDE: Final = (
    *("system", "system_prompt", "system_message", "weight", *WEIGHTS, "reasoning", "reasoning_content", "thinking"),
    *("functions", "function_call", "chat_template_kwargs", *OTHER_SENSES),
)
"""Keys of a row that say something of its conversation from outside it. Left out, they would change what is learned."""


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """What the row holds under a key, or under a path of keys; ABSENT where it has none. A null on the way is one."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def _value_of(row: Mapping[str, Any], key: str) -> Any:
    """The value at `key`; None where the row has none."""
    value = value_at(row, key)
    return None if value is ABSENT else value


def columns_read(shape: RowsConfig, of_pairs: bool = False) -> tuple[str, ...]:
    """The keys of a row that are read: of a conversation, or of a pair."""
    asked = [shape.messages] if shape.messages is not None else shape.prompts
    answers = [shape.chosen or "chosen", shape.rejected or "rejected"] if of_pairs else [shape.completion]
    return tuple(name for name in (*asked, *answers, shape.system, "tools") if name is not None)


def shape_of_row(row: Mapping[str, Any]) -> str | None:
    """The `rows` that reads a row of another tool, by its keys; None where they say nothing."""
    said = row.get("conversations")
    first = said[0] if isinstance(said, list) and said else None
    if isinstance(first, Mapping):
        return "{messages: conversations}" if {"role", "content"} <= first.keys() else "sharegpt"
    return "alpaca" if {"instruction", "output"} <= row.keys() else None


def check_beside(row: Mapping[str, Any], where: str) -> None:
    """Raises BadRow for a key of BESIDE that means something elsewhere and has no effect here. A system text that the
    conversation begins with, and a weight of 1, change nothing."""
    messages = row.get("messages") or row.get("prompt")
    first = messages[0] if isinstance(messages, list) and messages else None
    said = first.get("content") if isinstance(first, Mapping) and first.get("role") == "system" else None
    idle = {"system": said, "system_prompt": said, "system_message": said}
    idle |= {"weight": 1, "loss_weight": 1, "train_on_turn": True, "train": True}
    key = next((key for key in BESIDE if row.get(key) not in (None, "", [], {}, idle.get(key))), None)
    if key is None:
        return
    shape = None if "chosen" in row else "messages" if row.get("messages") is not None else "prompt-completion"
    mapping = f", or set `rows: {{messages: messages, system: {key}}}` of the source" if shape == "messages" else ""
    changes = {
        "system": f"write it as the first message{mapping}",
        "system_prompt": f"write it as the first message{mapping}",
        "system_message": f"write it as the first message{mapping}",
        **dict.fromkeys(WEIGHTS, "write it as the `weight`, 0 to 1, of the answer that it belongs to"),
        **dict.fromkeys(OTHER_SENSES, "models here read text alone: leave the row out, or take the key out of it"),
        "functions": "write it as `tools`",
        "function_call": "write it as `tool_calls` of the message that makes the call",
        "chat_template_kwargs": "take it out: the chat template is rendered by its own defaults",
    }
    change = changes.get(key, "write it into the message that it belongs to")
    rule = "what a row says beside its conversation is left out, and this would change what is learned"
    end = f"; `rows: {shape}` leaves it out" if shape else ""
    raise BadRow("unknown key", f"{where} has the key `{key}`", rule, change + end)


def check_keys(message: Mapping[str, Any], where: str) -> None:
    """Raises BadRow for a key that nothing reads: it may hold what the user wants to be learned, or not to be."""
    unknown = [name for name in message if name not in MESSAGE_KEYS]
    if unknown:
        change = f"{nearest(unknown[0], list(MESSAGE_KEYS))}rename the key, or take it out of every message"
        rule = f"a message has the keys {', '.join(MESSAGE_KEYS)}"
        raise BadRow("unknown key", f"{where} has the key `{unknown[0]}`", rule, change)
    wrong = next((name for name in TEXTS_BESIDE if not isinstance(message.get(name, ""), str)), None)
    if wrong is not None:
        given = f"{where} has {type(message[wrong]).__name__} under `{wrong}`"
        raise BadRow("wrong type", given, "a message's name and reasoning are texts", "fix the row")


def as_chat_row(row: Mapping[str, Any], shape: RowsConfig, where: str) -> dict[str, Any]:
    """The row with `messages` under its usual names. Raises BadRow."""
    messages = _asked(row, shape, where)
    if shape.messages is None:
        assert shape.completion is not None
        messages = [*messages, *_answer(row, shape.completion, shape, where)]
    return {"messages": messages, **({"tools": row["tools"]} if "tools" in row else {})}


def as_pair_row(row: Mapping[str, Any], shape: RowsConfig, where: str) -> dict[str, Any]:
    """The row with `prompt`, `chosen` and `rejected`, lists of messages; texts stay texts where the mapping names no prompt.
    Raises BadRow."""
    prompt = _asked(row, shape, where)
    found: dict[str, Any] = {"prompt": prompt} if prompt else {}
    for key, name in (("chosen", shape.chosen or "chosen"), ("rejected", shape.rejected or "rejected")):
        is_text = not prompt and isinstance(_value_of(row, name), str)
        found[key] = _value_of(row, name) if is_text else _answer(row, name, shape, where)
    return found | ({"tools": row["tools"]} if "tools" in row else {})


def _asked(row: Mapping[str, Any], shape: RowsConfig, where: str) -> list[Any]:
    """The system's message, where there is one, and what is before the answers, or with them in a list of messages."""
    if shape.messages is not None:
        messages = _of_list(row, shape, where)
    else:
        messages = _of_columns(row, shape, where) if shape.prompts else []
    system = _value_of(row, shape.system) if shape.system is not None else None
    return [{"role": "system", "content": system}, *messages] if system else messages


def _of_list(row: Mapping[str, Any], shape: RowsConfig, where: str) -> list[Any]:
    assert shape.messages is not None
    held = _needed(row, shape.messages, where)
    if not isinstance(held, list) or not all(isinstance(message, Mapping) for message in held):
        given = f"{where} has {type(held).__name__} under `{shape.messages}`"
        raise BadRow("wrong type", given, f"`{shape.messages}` is a list of messages", "fix the row")
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
            raise BadRow("unknown role", given, rule, "name it in `rows: {roles: {...}}` of the source, or fix the row")
        found["role"] = shape.roles[found["role"]]
        if found["role"] == CALLS:
            if CALLS in found:
                rule = f"its {shape.content} is the call"
                raise BadRow("wrong call", f"{where} has `{CALLS}` beside it", rule, "leave one of the two out")
            found |= {"role": ASSISTANT, "content": "", CALLS: _listed(found.get("content"))}
    return found


def _listed(value: Any) -> Any:
    """JSON of one call as a list of it; anything else as it is, for `calls_of` to judge."""
    try:
        call = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return [call] if isinstance(call, dict) else call


def _of_columns(row: Mapping[str, Any], shape: RowsConfig, where: str) -> list[Any]:
    first, *more = shape.prompts
    asked = _needed(row, first, where)
    if isinstance(asked, list):  # messages, which chat_rows judges
        return asked
    parts = [asked, *filter(None, (_value_of(row, key) for key in more))]  # a further one may be empty, or not there
    wrong = next((part for part in parts if not isinstance(part, str)), None)
    if wrong is not None:
        given = f"{where} has {type(wrong).__name__} in {', '.join(shape.prompts)}"
        raise BadRow("wrong type", given, "what is asked is a text", "fix the row")
    return [{"role": "user", "content": "\n\n".join(parts)}]


def _answer(row: Mapping[str, Any], key: str, shape: RowsConfig, where: str) -> list[Any]:
    """A text, a message or a list of messages as messages."""
    value = _needed(row, key, where)
    if not isinstance(value, list | Mapping):
        return [{"role": ASSISTANT, "content": value}]
    messages = value if isinstance(value, list) else [value]
    if shape.messages is None or not all(isinstance(message, Mapping) for message in messages):
        return messages
    return [
        _renamed(message, shape, f"{where}, message {number} of `{key}`") for number, message in enumerate(messages)
    ]


def _needed(row: Mapping[str, Any], key: str, where: str) -> Any:
    rule = f"`rows` of the source says that a row has `{key}`"
    value = value_at(row, key)
    if value is ABSENT:
        raise BadRow(
            "missing key",
            f"{where} has the keys {', '.join(map(str, row)) or 'none'}",
            rule,
            "give another mapping in `rows`",
        )
    if value is None:
        raise BadRow("null", f"{where} has nothing under `{key}`", rule, "fix the row")
    return value


def calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls of a message, each with its arguments as an object; `value` is their list, or JSON of it. Raises BadRow."""
    try:
        calls = without_nulls(json.loads(value), ARGUMENTS) if isinstance(value, str) and value else value or []
    except (ValueError, RecursionError):
        calls = value
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        given = f"{where} has under `tool_calls` {json.dumps(value, ensure_ascii=False)[:80]}"
        raise BadRow("wrong type", given, "calls are a list of objects, or JSON of one", "fix the row")
    return [_call(call, where) for call in calls]


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call, with or without `function` around it. Raises BadRow for one that a template would write only a part of."""
    inner = call.get("function", call)
    inner = inner if isinstance(inner, dict) else {}
    unknown = next((key for key in (*call, *inner) if key not in CALL_KEYS), None)
    if unknown is not None or not isinstance(inner.get("name"), str):
        given = f"{where} has a call " + ("without a name" if unknown is None else f"with the key `{unknown}`")
        rule = 'a call is {"name", "arguments"}, perhaps under "function", with "id" and "type" beside it'
        raise BadRow("wrong call", given, rule, "fix the row: a template writes name and arguments alone")
    held = {**inner, ARGUMENTS: _arguments(inner[ARGUMENTS], where)} if ARGUMENTS in inner else inner
    return held if inner is call else {**call, "function": held}


def _arguments(value: Any, where: str) -> Any:
    """An object where `value` is JSON of one, however often it was encoded. A text that is no JSON stays. Raises BadRow for one
    of anything else, or of a part of it: a template would encode it once more."""
    text = value
    while isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            if value.lstrip()[:1] not in ("{", "[", '"'):
                return text
            break
    if isinstance(text, str) and not isinstance(value, dict):
        given = f"{where} has a call with the arguments {text[:80]!r}"
        raise BadRow("wrong arguments", given, "arguments are an object, or JSON of one", "fix the row")
    return value


def without_nulls(value: Any, kept: str = "") -> Any:
    """Without keys whose value is null, as a table has where another row has the key; what is under the key `kept` stays."""
    if isinstance(value, dict):
        return {
            key: held if key == kept else without_nulls(held, kept) for key, held in value.items() if held is not None
        }
    return [without_nulls(held, kept) for held in value] if isinstance(value, list) else value
