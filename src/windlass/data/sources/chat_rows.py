"""Rows of chat -> messages: what a conversation is, whatever form a row gives it. No tokenizer, no template.

A row holds `messages`, each with a role and a content, or `prompt` and `completion`, texts or lists of messages. A message that
calls tools may have no content; a null counts as missing. Arguments of a call that are JSON in a text, as OpenAI writes them,
become the object that they hold, since templates write them as JSON themselves. An answer of `weight: 0` is context and no
target, and one of 0.5 counts half. Rows that could not be learned as they are meant are bad: images, tools without a name,
answers without words, keys of a message or of a call that nothing reads.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from windlass.data.sources.bad_rows import BadRow
from windlass.data.sources.row_shapes import (
    ARGUMENTS,
    BESIDE,
    TEXTS_BESIDE,
    calls_of,
    check_beside,
    check_keys,
    shape_of_row,
    without_nulls,
)

ASSISTANT: Final = "assistant"
CHAT_COLUMNS: Final = ("messages", "prompt", "completion", "tools", *BESIDE)
TEXT_KEYS: Final = ("role", "content")
PROMPT_KEYS: Final = ("prompt", "completion")
Specials = tuple[str, ...]
"""The special tokens of a tokenizer."""
SPECIALS_RULE: Final = "in a conversation the special tokens are the template's: words look the same as they do"
RULE: Final = "a row of chat holds `messages`, a list of {role, content}, or `prompt` and `completion`"


def conversation_of(row: Mapping[str, Any], where: str) -> str:
    """A row's messages up to the last answer, as JSON: the document that is hashed, counted and encoded. Raises BadRow."""
    tools = _tools_of(row.get("tools"), where)
    check_beside(row, where)
    held = [
        key for key in ("messages", *PROMPT_KEYS) if row.get(key) is not None
    ]  # null: a table's column of other rows
    if held[:1] == ["messages"] and len(held) > 1:
        raise BadRow(
            "of two shapes", f"{where} has `{'` and `'.join(held)}`", RULE, "leave one of the two out of the row"
        )
    if "messages" in row and ("messages" in held or not held):
        messages = as_messages(row["messages"], where, "messages", "", RULE)
    elif row.keys() >= set(PROMPT_KEYS):
        prompt = as_messages(row["prompt"], where, "prompt", "user", RULE)
        messages = prompt + as_messages(row["completion"], where, "completion", ASSISTANT, RULE)
    else:
        given = f"{where} has the keys {', '.join(row) or 'none'}"
        raise BadRow("missing key", given, RULE, _change_of(row))
    said = up_to_last_answer(messages, where)
    return json.dumps({"messages": said, "tools": tools} if tools else said, ensure_ascii=False)


def _change_of(row: Mapping[str, Any]) -> str:
    """What reads a row without the usual names."""
    if {"chosen", "rejected"} <= row.keys():
        return "rename its keys, or use format: preference"
    shape = shape_of_row(row)
    if shape is not None:
        return f"set `rows: {shape}` of the source"
    own = "{messages: ...}, or {prompt: ..., completion: ...}"
    return f"name its keys in `rows` of the source, {own}; or use format: text"


def parsed(document: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """(messages, tools if any) of what `conversation_of` wrote."""
    found = json.loads(document)
    return (found, None) if isinstance(found, list) else (found["messages"], found["tools"])


def words_of(document: str) -> str:
    """What all messages of a conversation say, a line break between two."""
    return "\n".join(message["content"] for message in parsed(document)[0])


def _tools_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Declarations of tools in the form that templates are written for, {"type": "function", "function": {"name": ...}}; a list,
    or JSON of one. Raises BadRow."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except (ValueError, RecursionError):
            value = [value]
    tools = value or []
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        found = [{"type": "function", "function": tool} if "name" in tool else tool for tool in tools]
        if len(list(tool_names(found))) == len(found):
            return found
    rule = 'tools are a list, or JSON of one, of {"name", "description", "parameters"}, each perhaps under "function"'
    given = f"{where} has under `tools` {json.dumps(value, ensure_ascii=False)[:80]}"
    raise BadRow("wrong tools", given, rule, "fix the row")


def tool_names(tools: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The names of the tools that have one."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"]


def check_tools(row: Mapping[str, Any], where: str) -> None:
    """Raises BadRow where a row of preferences declares tools; the template would have to write them before the conversation."""
    if row.get("tools"):
        rule = "declarations of tools are not read in preferences; calls inside messages are"
        change = "leave the row out, or write its tools into the system message"
        raise BadRow("with tools", f"{where} has `tools`", rule, change)


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether the message is an answer whose weight is not 0."""
    return message["role"] == ASSISTANT and message.get("weight") != 0


def up_to_last_answer(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Without the turns after the last answer that is learned. Raises BadRow where there is no such answer."""
    answers = [number for number, message in enumerate(messages) if is_learned(message)]
    if not answers:
        has_some = any(message["role"] == ASSISTANT for message in messages)
        given = f"{where} holds no message of the role {ASSISTANT}{' but with weight 0' if has_some else ''}"
        rule = "the answers of the assistant are what is learned of a conversation"
        change = (
            "give an answer a weight above 0, or leave the row out"
            if has_some
            else "leave the row out, or fix its roles"
        )
        raise BadRow("without an answer", given, rule, change)
    return messages[: answers[-1] + 1]


def as_messages(value: Any, where: str, key: str, role: str, rule: str) -> list[dict[str, Any]]:
    """`value` as messages. A text becomes one message of `role`, where that is given. A null counts as missing, since a table has
    a column for each key that any message has. A message that calls tools may have no content. Raises BadRow."""
    if isinstance(value, str) and role:
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        found = "nothing" if value is None else type(value).__name__
        raise BadRow(kind_of_value(value), f"{where} has {found} under `{key}`", rule, "fix the row")
    messages = [_with_joined_parts(without_nulls(message, ARGUMENTS)) for message in value]
    for number, message in enumerate(messages):
        at = f"{where}, message {number} of `{key}`,"
        check_keys(message, at)
        if "tool_calls" in message:
            message["tool_calls"] = calls_of(message["tool_calls"], at)
            if message["tool_calls"]:
                message.setdefault("content", "")
            else:  # a template may take an empty list for calls
                del message["tool_calls"]
        if not all(_is_text(message.get(key)) for key in TEXT_KEYS):
            given = f"{at} holds {json.dumps(message, ensure_ascii=False)[:80]}"
            kind = next(kind_of_value(value[number].get(key)) for key in TEXT_KEYS if not _is_text(message.get(key)))
            rule = "a message has a role and a content, both texts"
            raise BadRow(kind, given, rule, "fix the row; images are not read")
        if message["role"] == ASSISTANT and not message["content"].strip() and not message.get("tool_calls"):
            given = f"{at} is an answer without words"
            raise BadRow("empty answer", given, "an answer says something, or calls a tool", "leave the row out")
        _take_weight(message, at)
    return messages


def kind_of_value(value: Any) -> str:
    """The kind of a bad row that has `value` where a text or a list belongs."""
    return "null" if value is None else "wrong type"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _take_weight(message: dict[str, Any], where: str) -> None:
    """Leaves `weight` in answers of a weight other than 1. Raises BadRow for any weight that would have no effect."""
    weight = message.pop("weight", None)
    is_answer = message["role"] == ASSISTANT
    if weight is None:
        return
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight <= 1 or weight != round(weight, 2) or (weight and not is_answer):
        rule = "an answer weighs 0 (not learned) to 1, in hundredths; other messages are never learned"
        given = f"{where} has weight {weight!r} and the role {message['role']}"
        raise BadRow("wrong weight", given, rule, "set it to 0, to 1 or to a fraction such as 0.5, or take it out")
    if is_answer and weight != 1:
        message["weight"] = weight


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts, all of them texts, with one text. Another part stays, to be refused."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.keys() == {"type", "text"}]
    is_text = len(texts) == len(parts) and all(map(_is_text, texts))
    return {**message, "content": "".join(texts)} if is_text else message


def said_by(message: Mapping[str, Any]) -> Iterator[str]:
    """What the learned part of an answer must contain: its words, and the name of each tool that it calls."""
    if message["content"].strip():
        yield message["content"].strip()
    for call in message.get("tool_calls") or []:
        name = call.get("function", call).get("name") if isinstance(call, dict) else None
        if isinstance(name, str):
            yield name


def reasoning_apart(message: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(an answer's reasoning, the answer without it). Reasoning is a field of its own, or the content up to </think>."""
    before, mark, words = message["content"].rpartition("</think>")
    own = message.get("reasoning_content") or message.get("thinking") or ""
    plain = {key: held for key, held in message.items() if key not in ("reasoning_content", "thinking")}
    if mark:
        return before.strip().removeprefix("<think>").strip(), {**plain, "content": words.strip()}
    return own.strip(), plain


def unwritten_fields(message: Mapping[str, Any], written: str) -> list[str]:
    """The keys of an answer's texts besides its content that are not in `written`, the text that is learned of it. The id of a
    call counts as no text: a template may number calls in its own way."""
    content = message["content"].strip()
    before, _, behind = written.rpartition(content) if content else ("", "", written)
    around = f"{before}\0{behind}"
    held = {key: list(texts_in(message.get(key))) for key in TEXTS_BESIDE}
    functions = [call.get("function", call) for call in message.get("tool_calls") or [] if isinstance(call, dict)]
    held["tool_calls"] = [text for function in functions for text in texts_in(function.get("arguments"))]
    return [key for key, texts in held.items() if not all(_is_in(text.strip(), around) for text in texts)]


def _is_in(text: str, written: str) -> bool:
    """Whether the text is there, as it is or as JSON."""
    return any(form in written for form in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]))


def check_specials(document: str, where: str, specials: Specials) -> None:
    """Checks a conversation or a pair, as JSON. Raises BadRow where a message holds a special token of the tokenizer."""
    if _written(specials).search(document) is None:
        return
    found = json.loads(document)
    if isinstance(found, dict) and "tools" in found:
        hit = _finder(specials).search("\0".join(texts_in(found.pop("tools"))))
        if hit is not None:
            raise BadRow(
                "special token", f"{where} holds {hit[0]} in `tools`", SPECIALS_RULE, "take it out of the text"
            )
    for value in [found] if isinstance(found, list) else found.values():
        for message in value if isinstance(value, list) else []:  # a pair may be of texts, which no template writes
            check_message(message, where, specials)


@lru_cache
def _written(specials: Specials) -> re.Pattern[str]:
    """Finds any of the tokens as JSON writes it: one search, however many a tokenizer has."""
    forms = sorted({json.dumps(special, ensure_ascii=False)[1:-1] for special in specials}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, forms)) if forms else r"(?!)")


@lru_cache
def _finder(specials: Specials) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, specials)) if specials else r"(?!)")


def check_message(message: Mapping[str, Any], where: str, specials: Iterable[str]) -> None:
    """Checks every field of a message, since a template may write any: tool calls, names, reasoning, the role itself. Raises
    BadRow."""
    hit = _finder(tuple(specials)).search("\0".join(texts_in(message)))
    if hit is not None:
        found = hit[0]
        key = next(key for key, held in message.items() if any(found in text for text in texts_in([key, held])))
        given = f"{where} holds {found} in {'the words' if key == 'content' else f'`{key}`'} of the {message['role']}"
        raise BadRow("special token", given, SPECIALS_RULE, "take it out of the text, or leave the conversation out")


def texts_in(value: Any) -> Iterator[str]:
    """Every text of a message at any depth; keys are texts too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, held in value.items():
            yield from texts_in([key, held])
    elif isinstance(value, list):
        for held in value:
            yield from texts_in(held)
