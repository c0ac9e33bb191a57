"""Rows of preferences -> pairs: two answers to one prompt, whatever form a row gives them. No tokenizer, no template.

A row holds `chosen` and `rejected`, and perhaps `prompt`; texts, or lists of messages:

    texts with a prompt       the prompt, and two texts that continue it
    texts without one         the prompt is the tokens that both texts begin with
    messages                  two conversations; the prompt is the messages that both begin with. Where `prompt` holds messages,
                              or is a text and the answers are messages of the assistant, the parts are joined

A pair is a document: hashed, counted and split as JSON.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from windlass.data.sources.bad_rows import BadRow
from windlass.data.sources.chat_rows import ASSISTANT, as_messages, check_tools, up_to_last_answer
from windlass.data.sources.row_shapes import BESIDE, check_beside
from windlass.errors import UserError

QUESTIONS: Final = {
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "messages": "messages",
    **{key: f"{{prompt: {key}}}" for key in ("question", "query", "input")},
}
"""Keys under which other tools' pairs have their prompt, and the `rows` that read it."""
PAIR_COLUMNS: Final = ("prompt", "chosen", "rejected", "tools", *QUESTIONS, *BESIDE)
RULE: Final = (
    "a row of preferences holds `chosen` and `rejected`, and perhaps `prompt`: texts, or lists of {role, content}"
)


def pair_of(row: Mapping[str, Any], where: str) -> str:
    """A row's pair as JSON, {prompt, chosen, rejected}: the document that is hashed, counted and encoded. Raises BadRow."""
    check_tools(row, where)
    check_beside(row, where)
    if "chosen" not in row or "rejected" not in row:
        kind = "format: chat" if "messages" in row else "another `format`"
        given = f"{where} has the keys {', '.join(row) or 'none'}"
        raise BadRow("missing key", given, RULE, f"rename its keys, or use {kind}")
    _check_question(row, where)
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        pair = _texts(prompt, chosen, rejected, where)
    else:
        pair = _conversations(prompt, chosen, rejected, where)
    if pair["chosen"] == pair["rejected"]:
        rule = "of a pair one answer is preferred to another"
        given = f"{where} holds the same answer as chosen and as rejected"
        raise BadRow("no preference", given, rule, "leave the row out")
    return json.dumps(pair, ensure_ascii=False)


def _check_question(row: Mapping[str, Any], where: str) -> None:
    """Raises BadRow where the answers do not begin with a prompt and a key that nothing reads looks like one."""
    key = next((key for key in QUESTIONS if row.get(key)), None)
    answer = row["chosen"]
    first = answer[0] if isinstance(answer, list) and answer else None
    is_whole = isinstance(first, Mapping) and first.get("role") != ASSISTANT
    if key is None or row.get("prompt") is not None or is_whole:
        return
    rule = "the prompt of a pair is `prompt`, or what both answers begin with"
    change = f"set `rows: {QUESTIONS[key]}` of the source; or `rows: {{chosen: chosen}}`, which leaves `{key}` out"
    raise BadRow("unknown key", f"{where} has the key `{key}`, and no `prompt`", rule, change)


def _texts(prompt: Any, chosen: str, rejected: str, where: str) -> dict[str, Any]:
    if prompt is not None and not isinstance(prompt, str):
        raise BadRow("wrong type", f"{where} has {type(prompt).__name__} under `prompt`", RULE, "fix the row")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer.strip():
            given = f"{where} has an empty text under `{key}`"
            raise BadRow("empty answer", given, "an answer says something", "leave the row out")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _conversations(prompt: Any, chosen: Any, rejected: Any, where: str) -> dict[str, Any]:
    answers = [
        up_to_last_answer(as_messages(value, where, key, ASSISTANT, RULE), f"{where} under `{key}`,")
        for key, value in (("chosen", chosen), ("rejected", rejected))
    ]
    before: list[dict[str, Any]] = []
    if isinstance(prompt, str) and answers[0][0]["role"] != ASSISTANT:
        _check_said(prompt, answers, where)  # the prompt once more, as a text beside whole conversations
    elif prompt is not None:
        before = as_messages(prompt, where, "prompt", "user", RULE)
    if any("weight" in message for message in (*before, *answers[0], *answers[1])):
        rule = "both answers of a pair count, and nothing of its prompt does"
        change = "take `weight` out of the row, or leave the row out"
        raise BadRow("wrong weight", f"{where} has an answer with a weight other than 1", rule, change)
    if before and all(answer[: len(before)] == before for answer in answers):
        answers = [answer[len(before) :] for answer in answers]
    if not before:
        before = _common(*answers)
        answers = [answer[len(before) :] for answer in answers]
    if not before:
        rule = "both answers of a pair go on with one prompt"
        given = f"{where} holds two conversations that begin differently"
        raise BadRow("no preference", given, rule, "leave the row out")
    for key, answer in zip(("chosen", "rejected"), answers):
        if not answer or answer[0]["role"] != ASSISTANT:
            found = f"goes on with the role {answer[0]['role']}" if answer else "holds no answer of its own"
            rule = f"behind the messages that both have, the {ASSISTANT} speaks, and says different things"
            raise BadRow("no preference", f"{where} {found} under `{key}`", rule, "leave the row out, or fix it")
    return {"prompt": before, "chosen": answers[0], "rejected": answers[1]}


def texts_of_pair(pair: str) -> list[str]:
    """The texts of a pair (see `pair_of`), for training a tokenizer. Raises UserError for conversations."""
    found = json.loads(pair)
    if not isinstance(found["chosen"], str):
        raise UserError(
            "`format: preference` with `tokenizer: {train: ...}`, and a pair is of conversations",
            "a tokenizer's chat template writes conversations, and a trained tokenizer has none",
            "give `tokenizer: {from: ...}` of a chat model; or give the pairs as plain texts",
        )
    return [text for text in (found["prompt"], found["chosen"], found["rejected"]) if text]


def _common(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[dict[str, Any]]:
    same = [one == other for one, other in zip(first, second)]
    return first[: same.index(False) if False in same else len(same)]


def _check_said(prompt: str, answers: list[list[dict[str, Any]]], where: str) -> None:
    if not any(message["content"].strip() == prompt.strip() for message in _common(*answers)):
        rule = "a text as `prompt` beside whole conversations is a message of both"
        given = f"{where} has a `prompt` that no message is: {prompt[:60]!r}"
        raise BadRow("no preference", given, rule, "leave `prompt` out")
