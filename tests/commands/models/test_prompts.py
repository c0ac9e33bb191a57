"""Prompts from a file: texts, and messages of a conversation as JSON."""

import json

import pytest

from windlass.commands.models.prompts import read_prompts, shown_prompt
from windlass.errors import UserError

ASKED = [{"role": "user", "content": "which rope?"}]


def test_prompts_are_read_one_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text('the ship\n\n  a rope \n[1, 2]\n{"a": 1}\n')
    assert read_prompts(file, chat=False) == ["the ship", "  a rope ", "[1, 2]", '{"a": 1}']
    for content, said in ((b"\n \n", "no line with text"), (b"\xff", "UTF-8")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=said):
            read_prompts(file, chat=False)
    with pytest.raises(UserError, match="No such file"):
        read_prompts(tmp_path / "none", chat=False)


def test_a_line_of_messages_is_a_conversation(tmp_path):
    file = tmp_path / "chats.jsonl"
    lines = [json.dumps(ASKED), "and then?", json.dumps({"messages": [{"role": "system", "content": "slow"}, *ASKED]})]
    file.write_text("\n".join(lines))
    found = read_prompts(file, chat=True)
    assert found == [ASKED, "and then?", [{"role": "system", "content": "slow"}, *ASKED]]
    assert [shown_prompt(one) for one in found] == ["user: which rope?", "and then?", "system: slow\nuser: which rope?"]


@pytest.mark.parametrize(
    ("messages", "chat", "said"),
    [
        (ASKED, False, "line 2 is a list of messages"),
        ([*ASKED, {"role": "assistant", "content": "red"}], True, "line 2 ends with an answer"),
        ([{"role": "user", "text": "a"}], True, "line 2, message 0 of `messages`, has the key `text`"),
        ([{"role": "user"}], True, "line 2, message 0 of `messages`, holds"),
    ],
)
def test_messages_that_ask_nothing_are_refused(tmp_path, messages, chat, said):
    (tmp_path / "chats.jsonl").write_text("deck\n" + json.dumps(messages))
    with pytest.raises(UserError, match=said):
        read_prompts(tmp_path / "chats.jsonl", chat)
