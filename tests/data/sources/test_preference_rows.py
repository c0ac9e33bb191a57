"""Rows of preferences: every form is one pair, and a row that is no pair is refused by name."""

import json

import pytest

from windlass.data.sources.bad_rows import raised
from windlass.data.sources.chat_rows import conversation_of
from windlass.data.sources.formats import read_rows
from windlass.data.sources.preference_rows import pair_of
from windlass.errors import UserError

ASKED, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "Which rope?"), ("assistant", "The red one."), ("assistant", "Any rope."))
)
SYSTEM = {"role": "system", "content": "Be brief."}


def pair(**row):
    return json.loads(pair_of(row, "here"))


def test_every_form_of_a_conversation_is_one_pair():
    wanted = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
    whole = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
    assert pair(**whole) == pair(prompt=None, **whole) == wanted, "the messages that both begin with are the prompt"
    assert pair(prompt="Which rope?", **whole) == wanted, "the prompt once more, as a text"
    assert pair(prompt=[ASKED], **whole) == wanted, "the prompt once more, as messages"
    assert pair(prompt=[ASKED], chosen=[GOOD], rejected=[BAD]) == wanted
    assert pair(prompt=[ASKED], chosen=GOOD["content"], rejected=BAD["content"]) == wanted
    assert pair(prompt="Which rope?", chosen=[GOOD], rejected=[BAD]) == wanted
    thanks = {"role": "user", "content": "Thanks."}
    assert pair(chosen=[ASKED, GOOD, thanks], rejected=[ASKED, BAD]) == wanted, "what no answer follows is left out"
    null = {**GOOD, "tool_calls": None}
    assert pair(chosen=[ASKED, null], rejected=[ASKED, BAD]) == wanted, "a table has nulls where a key is missing"


def test_texts_are_a_pair_with_or_without_a_prompt():
    assert pair(prompt="a ", chosen="b", rejected="c", score=3) == {"prompt": "a ", "chosen": "b", "rejected": "c"}
    assert pair(chosen="a b", rejected="a c") == {"prompt": None, "chosen": "a b", "rejected": "a c"}


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ({"chosen": "a"}, "here has the keys chosen"),
        ({"chosen": "a", "rejected": "a"}, "here holds the same answer as chosen and as rejected"),
        ({"chosen": "a", "rejected": " "}, "here has an empty text under `rejected`"),
        ({"chosen": "a", "rejected": None}, "here has nothing under `rejected`"),
        (
            {"chosen": [ASKED, {**GOOD, "weight": 0}, ASKED, GOOD], "rejected": [ASKED, BAD]},
            "here has an answer with a weight other than 1",
        ),
        ({"chosen": "a", "rejected": 3}, "here has int under `rejected`"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "here has int under `prompt`"),
        ({"chosen": [ASKED], "rejected": [ASKED, BAD]}, "here under `chosen`, holds no message of the role assistant"),
        (
            {"chosen": [ASKED, GOOD], "rejected": [SYSTEM, BAD]},
            "here holds two conversations that begin differently",
        ),
        (
            {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, ASKED, BAD]},
            "here holds no answer of its own under `chosen`",
        ),
        (
            {"prompt": "Why?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
            "here has a `prompt` that no message is: 'Why?'",
        ),
        (
            {"prompt": [SYSTEM], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
            "here goes on with the role user under `chosen`",
        ),
        ({"chosen": "a", "rejected": "b", "tools": [{"name": "pull"}]}, "here has `tools`"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row, given):
    with pytest.raises(UserError) as caught:
        pair_of(row, "here")
    assert caught.value.given == given


@pytest.mark.parametrize("text_key", ["text", "words"])
def test_pairs_read_as_text_are_recognised(tmp_path, text_key):
    (tmp_path / "a.jsonl").write_text(json.dumps({"chosen": "a", "rejected": "b"}) + "\n")
    with open(tmp_path / "a.jsonl", "rb") as stream, pytest.raises(UserError) as caught:
        list(raised(read_rows(stream, str(tmp_path / "a.jsonl"), text_key)))
    assert caught.value.change == "it holds chosen and rejected: set `format: preference` of the source"


def test_rows_of_chats_are_answered_with_their_format():
    with pytest.raises(UserError, match="here has the keys messages") as caught:
        pair(messages=[ASKED, GOOD])
    assert caught.value.change == "rename its keys, or use format: chat"
    with pytest.raises(UserError, match="here has the keys chosen, rejected") as caught:
        conversation_of({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "here")
    assert caught.value.change == "rename its keys, or use format: preference"
