"""Rows of chat: every form of a conversation is one, and what is no conversation is refused with its row.

Of messages and templates: any field may be written, any role may be dropped, and an answer may come before all else.
"""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.planted import BOS, TURN
from tests.data.sources.test_scan import read
from tests.data.tokenize.test_chat_template import (
    EOS,
    FIRST,
    INSTRUCT,
    MARKED,
    MESSAGES,
    PLAIN,
    START,
    THINKING,
    learned,
    template_of,
)
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.sources.bad_rows import BadRow
from windlass.data.sources.chat_rows import conversation_of
from windlass.data.sources.config import CONVERSATION
from windlass.data.sources.preference_rows import pair_of
from windlass.data.sources.row_text import Form, document_text
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.data.tokenize.flags import labelled
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
        ({"messages": MESSAGES, "tools": [{"label": "pull"}]}, 'here has under `tools` [{"label": "pull"}]'),
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
    parsed = {**call, "function": {"name": "pull", "arguments": {}}}
    wanted = [bare[0], {"role": "assistant", "tool_calls": [parsed], "content": ""}]
    assert json.loads(conversation_of({"messages": bare}, "here")) == wanted
    table = [{**message, "name": None} for message in bare]
    table[0]["tool_calls"] = None
    table[1]["content"] = None
    assert json.loads(conversation_of({"messages": table, "tools": None}, "here")) == wanted


def row_of(call):
    return {"messages": [{"role": "user", "content": "Pull."}, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"city": "Oslo", "n": [1]}', {"city": "Oslo", "n": [1]}),
        ({"city": "Oslo"}, {"city": "Oslo"}),
        (json.dumps('{"city": "Oslo"}'), {"city": "Oslo"}),
        ("", {}),
        ("Oslo", "Oslo"),
        ("print(1)", "print(1)"),
    ],
)
def test_arguments_that_are_an_object_as_text_become_that_object(arguments, wanted):
    call = {"type": "function", "function": {"name": "pull", "arguments": arguments}}
    found = json.loads(conversation_of(row_of(call), "here"))[1]["tool_calls"]
    assert found == [{"type": "function", "function": {"name": "pull", "arguments": wanted}}]


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ({"function": {"name": "pull", "arguments": "[1]"}}, "a call with the arguments '[1]'"),
        ({"function": {"name": "pull", "arguments": '{"city":'}}, "a call with the arguments '{\"city\":'"),
        ({"name": "pull", "arguments": "7"}, "a call with the arguments '7'"),
        ({"name": "pull", "parameters": {"city": "Oslo"}}, "a call with the key `parameters`"),
        ({"function": {"name": "pull", "thought": "Hm."}}, "a call with the key `thought`"),
        ({"function": {"name": "pull"}, "comment": "Hm."}, "a call with the key `comment`"),
        ({"type": "custom", "custom": {"name": "pull", "input": "Oslo"}}, "a call with the key `custom`"),
        ({"function": {"arguments": {}}}, "a call without a name"),
        ({"function": "pull"}, "a call without a name"),
    ],
)
def test_a_call_that_a_template_would_write_a_part_of_is_refused(call, given):
    with pytest.raises(BadRow) as caught:
        conversation_of(row_of(call), "here")
    assert caught.value.given == f"here, message 1 of `messages`, has {given}"
    assert caught.value.kind == ("wrong arguments" if "the arguments" in given else "wrong call")


def test_calls_may_be_one_text_of_json():
    """As a table's column of strings holds them."""
    call = {"type": "function", "function": {"name": "pull", "arguments": {"city": "Oslo"}}}
    for content in ({}, {"content": "I pull."}):
        row = {"messages": [MESSAGES[1], {"role": "assistant", **content, "tool_calls": json.dumps([call])}]}
        found = json.loads(conversation_of(row, "here"))[1]
        assert found["tool_calls"] == [call] and found["content"] == content.get("content", "")
    for none in ("[]", [], "", {}):
        row = {"messages": [MESSAGES[1], {**MESSAGES[2], "tool_calls": none}]}
        assert json.loads(conversation_of(row, "here")) == MESSAGES[1:3], "Llama 3.1 counts an empty list as calls"


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ({"tool_calls": "pull the rope"}, 'has under `tool_calls` "pull the rope"'),
        ({"tool_calls": {"name": "pull"}}, 'has under `tool_calls` {"name": "pull"}'),
        ({"tool_calls": ["pull"]}, 'has under `tool_calls` ["pull"]'),
        ({"reasoning_content": {"step": "Hm."}}, "has dict under `reasoning_content`"),
        ({"thinking": ["Hm."]}, "has list under `thinking`"),
        ({"name": 7}, "has int under `name`"),
    ],
)
def test_a_field_of_another_type_is_refused_and_not_left_uncounted(message, given):
    with pytest.raises(BadRow) as caught:
        conversation_of({"messages": [MESSAGES[1], {**MESSAGES[2], **message}]}, "here")
    assert caught.value.given == f"here, message 1 of `messages`, {given}" and caught.value.kind == "wrong type"


@pytest.mark.parametrize(
    "beside",
    [
        {"system": "Be brief."},
        {"system_prompt": "Be brief."},
        {"train_on_turn": False},
        {"reasoning": "Hm."},
        {"weight": 0},
        {"weight": 0.5},
        {"functions": [{"name": "pull"}]},
        {"reasoning_content": "Hm."},
        {"thinking": "Hm."},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"system_message": "Be brief."},
        {"loss_weight": 0},
        {"loss_mask": [0, 1]},
        {"mask": [0, 1]},
        {"weights": [1.0]},
        {"train": False},
        {"function_call": {"name": "pull"}},
        {"images": ["a.png"]},
    ],
)
def test_a_key_of_a_row_that_would_change_what_is_learned_is_refused_by_name(beside, tmp_path):
    (key,) = beside
    for row, left in (
        ({"messages": MESSAGES[1:3]}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt-completion"),
    ):
        with pytest.raises(BadRow) as caught:
            conversation_of({**row, **beside}, "here")
        assert caught.value.given == f"here has the key `{key}`"
        assert caught.value.change.endswith(f"; `rows: {left}` leaves it out")
        (tmp_path / "a.jsonl").write_text(json.dumps({**row, **beside}))
        assert json.loads(read(path=str(tmp_path / "a.jsonl"), format="chat", rows=left)[0]), "left out"
    with pytest.raises(BadRow, match=f"has the key `{key}`") as caught:
        pair_of({"prompt": "a", "chosen": "b", "rejected": "c", **beside}, "here")
    assert "rows:" not in caught.value.change, "which preferences do not have"


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_system_text_of_a_row_is_taken_where_the_mapping_names_it(tmp_path, key):
    row = {"messages": MESSAGES[1:3], key: "Be brief."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(BadRow) as caught:
        conversation_of(row, "here")
    assert f"`rows: {{messages: messages, system: {key}}}`" in caught.value.change
    (found,) = read(path=str(tmp_path / "a.jsonl"), format="chat", rows={"messages": "messages", "system": key})
    assert json.loads(found) == [{"role": "system", "content": "Be brief."}, *MESSAGES[1:3]]


def test_keys_of_a_row_that_change_nothing_are_left_out():
    system = {"role": "system", "content": "Be brief."}
    beside = {"system": "Be brief.", "weight": 1, "functions": [], "thinking": None, "source": "a book"}
    beside |= {"system_prompt": "Be brief.", "train_on_turn": True, "reasoning": "", "train": True, "images": []}
    row = {"messages": [system, *MESSAGES[1:3]], **beside}
    assert json.loads(conversation_of(row, "here")) == [system, *MESSAGES[1:3]]


def test_a_table_has_its_columns_beside_the_conversation_read_too(tmp_path):
    rows = [{"messages": MESSAGES[1:3], "system": "Be brief."}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has the key `system`"):
        read(path=str(tmp_path / "a.parquet"), format="chat")


def test_calls_without_function_around_them_are_read_alike():
    for arguments in ('{"city": "Oslo", "unit": null}', {"city": "Oslo", "unit": None}):
        found = json.loads(conversation_of(row_of({"name": "pull", "arguments": arguments}), "here"))
        assert found[1]["tool_calls"] == [{"name": "pull", "arguments": {"city": "Oslo", "unit": None}}]


def test_a_null_among_arguments_is_a_value_in_json_and_an_absent_key_in_a_table():
    arguments = {"city": "Oslo", "unit": None}
    row = row_of({"function": {"name": "pull", "arguments": arguments}})
    form = Form(CONVERSATION)
    for what, wanted in (("key", arguments), ("column", {"city": "Oslo"})):
        found = json.loads(document_text(row, "here", what, form, ""))
        assert found[1]["tool_calls"][0]["function"]["arguments"] == wanted


def test_arguments_as_text_are_learned_as_those_of_an_object_are(planted):
    calling = PLAIN.replace(
        "{{ m.content }}", "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ m.content }}"
    )
    function = {"name": "pull", "arguments": {"city": "Oslo"}}
    quoted = {"name": "pull", "arguments": json.dumps(function["arguments"])}
    written = [
        learned(planted, calling, json.loads(conversation_of(row_of({"function": held}), "")))
        for held in (function, quoted)
    ]
    assert written[0] == written[1] and '{"city": "Oslo"}' in written[0][1][0]


@pytest.mark.parametrize(
    ("message", "given", "change"),
    [
        ({"loss_weight": 0}, "has the key `loss_weight`", "did you mean `weight`? rename the key, or take it out"),
        ({"reasoning": "Hm."}, "has the key `reasoning`", "did you mean `reasoning_content`? rename the key"),
    ],
)
def test_an_unknown_key_of_a_message_is_refused_by_name(message, given, change):
    with pytest.raises(UserError) as caught:
        conversation_of({"messages": [MESSAGES[1], {**MESSAGES[2], **message}]}, "a.jsonl:7")
    assert caught.value.given == f"a.jsonl:7, message 1 of `messages`, {given}"
    assert caught.value.rule == (
        "a message has the keys role, content, name, tool_calls, tool_call_id, reasoning_content, thinking, weight"
    )
    assert caught.value.change.startswith(change)
    nulls = [{**MESSAGES[1], "loss_weight": None}, MESSAGES[2]]
    assert json.loads(conversation_of({"messages": nulls}, "here")) == MESSAGES[1:3], "a table's column of other rows"


@pytest.mark.parametrize(
    ("weights", "kept"),
    [((None, 1), [None, None]), ((0, 0.0), None), ((None, 0), None), ((0, 1), [None, None])],
)
def test_weights_of_answers_are_kept_where_they_are_0(weights, kept):
    messages = [{**m, "weight": weight} for m, weight in zip(MESSAGES[1:3], weights)]
    if kept is None:
        with pytest.raises(UserError, match="here holds no message of the role assistant but with weight 0"):
            conversation_of({"messages": messages}, "here")
        learned_later = [*messages, *MESSAGES[3:]]
        found = json.loads(conversation_of({"messages": learned_later}, "here"))
        assert [message.get("weight") for message in found] == [None, 0, None, None]
    else:
        assert json.loads(conversation_of({"messages": messages}, "here")) == MESSAGES[1:3]
    cut = [*MESSAGES[1:], {**MESSAGES[4], "weight": 0}]
    assert json.loads(conversation_of({"messages": cut}, "here")) == MESSAGES[1:], "behind the last learned answer"


@pytest.mark.parametrize(("number", "weight"), [(1, 0.505), (1, 2), (1, -0.5), (1, "0"), (1, True), (0, 1), (0, 0.5)])
def test_other_weights_are_refused(number, weight):
    messages = [dict(message) for message in MESSAGES[1:3]]
    messages[number]["weight"] = weight
    with pytest.raises(UserError) as caught:
        conversation_of({"messages": messages}, "here")
    role = messages[number]["role"]
    assert caught.value.given == f"here, message {number} of `messages`, has weight {weight!r} and the role {role}"
    assert caught.value.rule.startswith("an answer weighs 0 (not learned) to 1, in hundredths")
    assert caught.value.change == "set it to 0, to 1 or to a fraction such as 0.5, or take it out"


@pytest.mark.parametrize("weight", [0.5, 0.01, 0.29, 0.57, 1.0])
def test_a_fraction_stays_with_its_answer(weight):
    messages = [MESSAGES[1], {**MESSAGES[2], "weight": weight}]
    (_, found) = json.loads(conversation_of({"messages": messages}, "here"))
    assert found == (MESSAGES[2] if weight == 1 else {**MESSAGES[2], "weight": weight})


# ---- what a template writes, and what it leaves out

CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_calls", [{"function": {"name": "pull", "arguments": {"deep": [{"rope": f"red {TURN}"}]}}}]),
        ("tool_calls", [{"function": {"name": "pull", "arguments": {f"red {TURN}": 1}}}]),
        ("tool_calls", [{"function": {"name": "pull", "arguments": f'{{"rope": "{TURN}"}}'}}]),
        ("tool_calls", [{"function": {"name": f"pull{TURN}", "arguments": "{}"}}]),
        ("reasoning_content", f"Hm.{TURN}"),
    ],
)
def test_a_special_token_in_any_field_is_refused(planted, template, field, value):
    """A template writes these, too, and the token would be learned as an end of turn."""
    written = template.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}" + CALLS)
    messages = [*MESSAGES[:2], {**MESSAGES[2], field: value}]
    with pytest.raises(UserError) as caught:
        template_of(planted, written).encode(messages, "here")
    assert caught.value.given == f"here holds {TURN} in `{field}` of the assistant"
    plain = json.loads(json.dumps(messages).replace(TURN, "end"))
    assert "".join(learned(planted, written, plain)[1]).count(TURN) == 1, "without it, all of it is learned"


def test_a_special_token_in_a_role_is_refused(planted):
    with pytest.raises(UserError, match=r"here holds <\|im_end\|> in `role` of the user<\|im_end\|>"):
        template_of(planted, PLAIN).encode([{**MESSAGES[1], "role": f"user{TURN}"}, MESSAGES[2]], "here")


KNOWN = PLAIN.replace("messages %}", "messages if m.role in ('system', 'user', 'assistant') %}", 1)
TOOL = {"role": "tool", "content": '{"deg": 4}'}


@pytest.mark.parametrize(
    "left_out", [{"role": "developer", "content": "Speak French."}, TOOL, {"role": "tool", "content": "red"}]
)
def test_a_message_of_any_role_that_the_template_drops_is_named(planted, left_out):
    """A tool's "red" is in the answer by chance."""
    messages = [MESSAGES[1], left_out, MESSAGES[2]]
    given = f"here: the chat template leaves out what the {left_out['role']} says: {left_out['content']!r}"
    for template in (KNOWN, MARKED.replace("messages %}", "messages if m.role in ('user', 'assistant') %}", 1)):
        with pytest.raises(UserError) as caught:
            template_of(planted, template).encode(messages, "here")
        assert caught.value.given == given
    text, answers = learned(planted, PLAIN, messages)
    assert left_out["content"] in text and answers == [FIRST, EOS]


def test_what_a_tool_says_may_be_written_as_json_and_reasoning_left_out(planted):
    quoting = PLAIN.replace(
        "{{ m.content }}", "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    )
    messages = [MESSAGES[1], TOOL, {**MESSAGES[2], "reasoning_content": "Red is best."}]
    text, answers = learned(planted, quoting, messages)
    assert r'"{\"deg\": 4}"' in text and "zq" not in text and answers == [FIRST, EOS]
    assert learned(planted, PLAIN, [MESSAGES[1], {"role": "tool", "content": ""}, MESSAGES[2]])[1] == [FIRST, EOS]


# ---- conversations that begin with an answer

LOOKING = (  # as Qwen2.5: it looks at the first message, and writes a system message where there is none
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}" + PLAIN
)
IN_LOOP = (  # as Zephyr: the cue is written behind the last message, so not at all behind none
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endfor %}"
)
INSTEAD = PLAIN.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")  # as Phi-3: EOS where there is no cue
BETWEEN = (  # what parts two messages comes with the cue
    "{{ bos_token }}{% for m in messages %}{% if not loop.first %}\n\n{% endif %}{{ m.role | upper }}: {{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}\n\nASSISTANT: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "before", "written"),
    [
        (PLAIN, START + "assistant\n", FIRST),
        (MARKED, START + "assistant\n", FIRST),
        (LOOKING, f"{START}system\nYou are kind.{TURN}\n{START}assistant\n", FIRST),
        (IN_LOOP, START + "assistant\n", FIRST),
        (THINKING, START + "assistant\n", FIRST),
        (INSTEAD, START + "assistant\n", FIRST),
        (BETWEEN, BOS + "ASSISTANT: ", FIRST),
        (INSTRUCT, "", " The red one." + EOS),
        ("{{ bos_token }}" + INSTRUCT, BOS, " The red one." + EOS),
    ],
)
def test_a_conversation_may_begin_with_an_answer(planted, template, before, written):
    text, answers = learned(planted, template, MESSAGES[2:])
    assert text.startswith(before + written), "what is before the first answer"
    assert answers[0] == written and len(answers) < 4
    assert answers[1].lstrip().startswith(("Pull it in", "<think>"))
    assert "assistant" not in "".join(answers).lower() and BOS not in answers[0], "the cue is not learned"
    if before:  # else all of it would be learned
        text, (answer, *_) = learned(planted, template, MESSAGES[2:3])
        thought = "<think>\n\n</think>\n\n" if template is THINKING else ""
        assert text.startswith(before + thought + written) and answer.startswith(thought + written)


def test_an_answer_before_all_else_whose_begin_cannot_be_found_is_refused(planted):
    elsewhere = PLAIN.replace("assistant\n{% endif", "helper\n{% endif")
    with pytest.raises(UserError, match="here: message 0 cannot be found by the chat template"):
        learned(planted, elsewhere, MESSAGES[2:])
    alternating = "{% if messages[0].role != 'user' %}{{ raise_exception('users begin') }}{% endif %}" + PLAIN
    with pytest.raises(UserError, match="here: the chat template refuses it: users begin"):
        learned(planted, alternating, MESSAGES[2:])


def test_an_empty_prompt_is_prepared_row_by_row(planted):
    template_of(planted, LOOKING)
    texts = [conversation_of({"prompt": [], "completion": f"The red one {n}."}, "") for n in range(3)]
    ((ids, *_),) = encode_rows(texts, RowSettings(planted.directory / "tokenizer", "train"))
    _, labels = labelled(ids[None], ids[None])
    answers = planted.tokenizer.decode(labels[labels != NOT_COUNTED].tolist(), skip_special_tokens=False)
    assert answers == "".join(f"The red one {n}.{TURN}{EOS}" for n in range(3))
