"""Rows of chat: every form of a conversation is one, and what is none is refused with its row."""

import json

import pytest

from tests.data.test_chat import MESSAGES
from windlass.data.messages import conversation_of
from windlass.errors import UserError


def test_rows_become_messages_up_to_the_last_answer():
    row = {"messages": [*MESSAGES, {"role": "user", "content": "Thanks."}], "id": 7}
    assert json.loads(conversation_of(row, "here")) == MESSAGES
    asked, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Wind."}
    assert json.loads(conversation_of({"prompt": "Why?", "completion": "Wind."}, "here")) == [asked, answer]
    assert json.loads(conversation_of({"messages": None, "prompt": "Why?", "completion": "Wind."}, "here")) == [
        asked,
        answer,
    ]
    assert json.loads(conversation_of({"messages": MESSAGES, "prompt": None, "completion": None}, "here")) == MESSAGES
    row = {"prompt": [MESSAGES[0], asked], "completion": [answer]}
    assert json.loads(conversation_of(row, "here")) == [MESSAGES[0], asked, answer]


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ({"text": "a"}, "here has the keys text"),
        ({"messages": "a"}, "here has str under `messages`"),
        ({"messages": [{"role": "user"}]}, 'here, message 0 of `messages`, holds {"role": "user"}'),
        ({"messages": MESSAGES[:2]}, "here holds no message of the role assistant"),
        ({"prompt": "Why?", "completion": None}, "here has nothing under `completion`"),
        ({"messages": None}, "here has nothing under `messages`"),
        ({"messages": MESSAGES, "prompt": "Why?"}, "here has `messages` and `prompt`"),
        ({"prompt": "Why?", "completion": " "}, "here, message 0 of `completion`, is an answer without words"),
        ({"messages": MESSAGES, "tools": [{"name": "pull"}]}, "here has `tools`"),
        ({"messages": []}, "here holds no message of the role assistant"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(row, given):
    with pytest.raises(UserError) as caught:
        conversation_of(row, "here")
    assert caught.value.given == given


def test_calls_of_tools_stay_and_nulls_of_a_table_do_not():
    call = {"type": "function", "function": {"name": "pull", "arguments": "{}"}}
    bare = [{"role": "user", "content": "Pull."}, {"role": "assistant", "tool_calls": [call]}]
    wanted = [bare[0], {"role": "assistant", "tool_calls": [call], "content": ""}]
    assert json.loads(conversation_of({"messages": bare}, "here")) == wanted
    table = [{**message, "name": None} for message in bare]
    table[0]["tool_calls"] = None
    table[1]["content"] = None
    assert json.loads(conversation_of({"messages": table, "tools": None}, "here")) == wanted
