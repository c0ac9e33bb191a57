"""Rows of other names: each shape gives the conversation that `messages` would, in every format, and what is wrong has a name."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.conftest import data_config, refusal
from tests.data.prepare.test_prepare import content, quietly
from tests.data.sources.test_scan import read, refused
from tests.data.sources.test_text_rows import judged
from tests.data.tokenize.test_chat_template import PLAIN, template_of
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.data.config import SourceConfig
from windlass.data.prepare.fingerprint import settings_of
from windlass.data.sources.fetch import fetch
from windlass.data.sources.row_shapes import ABSENT, value_at
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import Source

OWN_LIST = {"messages": "dialogue", "role": "who", "content": "said", "roles": {"A": "user", "B": "assistant"}}
OWN_COLUMNS = {"prompt": ["question", "context"], "completion": "answer", "system": "persona"}


def said(*words, system=None):
    """A conversation of these words, turn about."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(words)]
    return ([{"role": "system", "content": system}] if system else []) + turns


CASES = [
    ("messages", {"id": 7, "messages": said("Why?", "Wind.")}, said("Why?", "Wind.")),
    (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "Wind."},
                {"from": "human", "value": "And?"},
                {"from": "gpt", "value": "Tide."},
            ],
            "id": "x_0",
        },
        said("Why?", "Wind.", "And?", "Tide."),
    ),
    (
        "sharegpt",
        {
            "system": "Be brief.",
            "conversations": [{"from": "user", "value": "Why?"}, {"from": "assistant", "value": "Wind."}],
        },
        said("Why?", "Wind.", system="Be brief."),
    ),
    ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all"}, said("Add.\n\n1 2", "3")),
    ("alpaca", {"instruction": "Name a rope.", "input": "", "output": "Sheet."}, said("Name a rope.", "Sheet.")),
    ("alpaca", {"instruction": "Why?", "output": "Wind.", "system": ""}, said("Why?", "Wind.")),
    ("prompt-completion", {"prompt": "Why?", "completion": "Wind."}, said("Why?", "Wind.")),
    (
        "prompt-completion",
        {"prompt": said("Why?"), "completion": [{"role": "assistant", "content": "Wind."}]},
        said("Why?", "Wind."),
    ),
    ({"shape": "alpaca"}, {"instruction": "Why?", "input": None, "output": "Wind."}, said("Why?", "Wind.")),
    (
        OWN_LIST,
        {"dialogue": [{"who": "A", "said": "Why?"}, {"who": "B", "said": "Wind."}], "messages": 7},
        said("Why?", "Wind."),
    ),
    (
        OWN_COLUMNS,
        {"question": "Why?", "context": "At sea.", "answer": "Wind.", "persona": "Sailor."},
        said("Why?\n\nAt sea.", "Wind.", system="Sailor."),
    ),
]


CALL = {"name": "depth", "arguments": {"at": "bow"}}
CALLED = [
    {"role": "user", "content": "How deep?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four fathoms."},
]
DECLARED = {"name": "depth", "description": "Sounds.", "parameters": {"type": "object", "properties": {}}}


def calling(call, **beside):
    """As LLaMA-Factory's demonstration of glaive's rows."""
    said = [("human", "How deep?"), ("function_call", call), ("observation", "4"), ("gpt", "Four fathoms.")]
    return {"conversations": [{"from": who, "value": words} for who, words in said], **beside}


@pytest.mark.parametrize("end", ["jsonl", "json", "parquet"])
def test_calls_of_sharegpt_are_an_answer_and_what_is_observed_a_tools_message(tmp_path, end):
    text = '{"name": "depth", "arguments": "{\\"at\\": \\"bow\\"}"}'
    rows = [calling(json.dumps(CALL), tools="[]"), calling(text, tools=json.dumps([DECLARED]))]
    rows += [calling(json.dumps([CALL, CALL]), tools=None)]
    path = tmp_path / f"a.{end}"
    if end == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if end == "json" else "".join(f"{json.dumps(row)}\n" for row in rows))
    plain, declared, twice = map(json.loads, read(path=str(path), format="chat", rows="sharegpt"))
    assert plain == CALLED
    assert declared == {"messages": CALLED, "tools": [{"type": "function", "function": DECLARED}]}
    assert twice == [CALLED[0], {**CALLED[1], "tool_calls": [CALL, CALL]}, *CALLED[2:]]
    own = {"messages": "conversations", "role": "from", "content": "value"}
    own["roles"] = {"human": "user", "gpt": "assistant", "function_call": "tool_calls", "observation": "tool"}
    assert [*map(json.loads, read(path=str(path), format="chat", rows=own))] == [plain, declared, twice]


@pytest.mark.parametrize(
    ("value", "kind", "given"),
    [
        ("depth(bow)", "wrong type", 'has under `tool_calls` "depth(bow)"'),
        ('{"arguments": {}}', "wrong call", "has a call without a name"),
        ('[{"name": "depth", "args": {}}]', "wrong call", "has a call with the key `args`"),
        ("7", "wrong type", "has under `tool_calls` 7"),
        ("", "empty answer", "is an answer without words"),
        ("[]", "empty answer", "is an answer without words"),
        (None, "empty answer", "is an answer without words"),
    ],
)
def test_a_call_of_sharegpt_that_is_none_is_a_bad_row(tmp_path, value, kind, given):
    (tmp_path / "a.jsonl").write_text(json.dumps(calling(value)))
    texts, bad = judged(tmp_path / "a.jsonl", format="chat", rows="sharegpt")
    ((found, said),) = bad
    assert texts == [] and found == kind and given in said


def test_calls_in_two_places_are_a_bad_row(tmp_path):
    row = calling(json.dumps(CALL))
    row["conversations"][1]["tool_calls"] = [CALL]
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    texts, ((kind, said),) = judged(tmp_path / "a.jsonl", format="chat", rows="sharegpt")
    assert (texts, kind) == ([], "wrong call") and said.endswith("message 1 has `tool_calls` beside it")


@pytest.mark.parametrize("end", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(("rows", "row", "wanted"), CASES)
def test_a_shape_is_the_conversation_of_its_messages(tmp_path, rows, row, wanted, end):
    path = tmp_path / f"a.{end}"
    if end == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    else:
        path.write_text(json.dumps([row, row]) if end == "json" else f"{json.dumps(row)}\n" * 2)
    found = read(path=str(path), format="chat", rows=rows)
    assert [json.loads(text) for text in found] == [wanted] * 2


def test_a_slice_goes_beside_a_shape(tmp_path):
    rows = [{"instruction": f"{number}?", "output": "Yes."} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(path=str(tmp_path), format="chat", rows={"shape": "alpaca", "slice": "2:4"})
    assert [json.loads(text)[0]["content"] for text in found] == ["2?", "3?"]
    assert len(read(path=str(tmp_path), format="chat", rows="alpaca")) == 9


@pytest.mark.parametrize("is_dataset", [False, True])
def test_rows_of_a_url_and_of_a_dataset_have_shapes_too(tmp_path, is_dataset):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps({"instruction": "Why?", "input": "", "output": "Wind."}) + "\n")
    place = {"hub": str(tmp_path / "in")} if is_dataset else {"path": f"file://{tmp_path}/in/a.jsonl"}
    config = SourceConfig(**place, format="chat", rows="alpaca")
    (text,) = Source(fetch(config, scan(config, print), tmp_path / "kept", print)).documents()
    assert json.loads(text) == said("Why?", "Wind.")


def test_what_is_wrong_in_a_row_is_a_bad_row_of_its_kind(tmp_path):
    good = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Wind."}]}
    rows = [
        good,
        {"conversation": []},
        {"conversations": None},
        {"conversations": "Why?"},
        {"conversations": [{"from": "narrator", "value": "x"}]},
        {"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "Wind."}]},
        {**good, "tools": 7},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts, bad = judged(tmp_path / "a.jsonl", format="chat", rows="sharegpt")
    assert [json.loads(text) for text in texts] == [said("Why?", "Wind.")]
    assert [kind for kind, _ in bad] == ["missing key", "null", "wrong type", "unknown role", "null", "wrong tools"]
    assert bad[3][1] == ":5, message 0 has the from `narrator`"
    (tmp_path / "a.jsonl").write_text(json.dumps({"instruction": ["Why?", 7], "output": 7}))
    assert refused(path=str(tmp_path), format="chat", rows="alpaca").given.startswith(f"{tmp_path}/a.jsonl:1")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"rows": "alpaka", "format": "chat"}, "or for chat one of messages, sharegpt, alpaca, prompt-completion"),
        (
            {"rows": "alpaca"},
            "rows=alpaca with format=text: it says where a conversation is, and has no effect on rows of this format; set "
            "format=chat, or remove rows",
        ),
        (
            {"rows": OWN_LIST, "format": "tokens"},
            "B: assistant}} with format=tokens: it says where a conversation is, and",
        ),
        (
            {"rows": OWN_COLUMNS, "format": "preference"},
            "rows.completion=answer with format=preference: it is an answer of a conversation (format=chat), and a pair has two; "
            "give rows.chosen and rows.rejected in its place",
        ),
        (
            {"rows": {"slice": "1:2"}, "format": "preference"},
            "rows={slice: 1:2} with format=preference: `rows` says where a pair is, and these keys do not; give rows.prompt, "
            "rows.messages, rows.chosen or rows.rejected",
        ),
        (
            {"rows": {**OWN_COLUMNS, "chosen": "good"}, "format": "chat"},
            "rows.chosen=good with format=chat: it is an answer of a pair (format=preference); remove rows.chosen, or set "
            "format=preference",
        ),
        (
            {"rows": {"system": "persona"}, "format": "chat"},
            "rows={system: persona} with format=chat: `rows` says where a conversation is, and these keys do not; give "
            "rows.shape, rows.messages, or rows.prompt and rows.completion",
        ),
        (
            {"rows": {"slice": "1:2"}, "format": "chat"},
            "rows={slice: 1:2} with format=chat: `rows` says where a conversation",
        ),
        (
            {"rows": {"role": "from"}, "format": "chat"},
            "role=from without messages: `role` describes the messages of a list; give the key of the list as messages",
        ),
        (
            {"rows": {"prompt": "q"}, "format": "chat"},
            "rows.prompt=q without rows.completion: a conversation in columns has a prompt and a completion; give both, "
            "rows.prompt and rows.completion",
        ),
        (
            {"rows": {**OWN_LIST, "prompt": "q"}, "format": "chat"},
            "messages=dialogue with prompt=q: `messages` belongs to a list of messages, `prompt` to columns; remove messages or "
            "prompt",
        ),
        (
            {"rows": {"shape": "alpaca", "prompt": "q"}, "format": "chat"},
            "shape=alpaca with prompt=q: a known shape gives all names; remove shape, or prompt",
        ),
        (
            {"rows": {"shape": "alpaca", "slice": "5:5"}, "format": "chat"},
            "rows.slice=5:5: a slice is first:end, and has at least one row; write one, as in rows.slice=1000:50000",
        ),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(source, said):
    assert said in refusal(SourceConfig, {"path": "a", **source})


USER, GOOD, BAD = said("Why?", "Wind.")[0], *({"role": "assistant", "content": text} for text in ("Wind.", "Tide."))
PAIR = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
SHARED = {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Wind."}, {"from": "gpt", "value": "Tide."}


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("rows", "row", "wanted"),
    [
        ("sharegpt", {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": SHARED[2]}, PAIR),
        ("sharegpt", {"conversations": SHARED[:1], "chosen": "Wind.", "rejected": "Tide."}, PAIR),
        ("alpaca", {"instruction": "Why?", "input": "", "chosen": "Wind.", "rejected": "Tide.", "output": "no"}, PAIR),
        ("messages", {"messages": [USER], "chosen": [GOOD], "rejected": [BAD]}, PAIR),
        ("messages", {"messages": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR),
        ("prompt-completion", {"prompt": "Why?", "chosen": "Wind.", "rejected": "Tide."}, PAIR),
        (
            {"prompt": ["question", "at"], "system": "persona", "chosen": "good", "rejected": "bad"},
            {"question": "Why", "at": "here?", "persona": "Sailor.", "good": "Wind.", "bad": "Tide.", "chosen": 7},
            {**PAIR, "prompt": said("Why\n\nhere?", system="Sailor.")},
        ),
        (
            {"messages": "talk", "role": "who", "content": "said", "roles": {"A": "user", "B": "assistant"}},
            {
                "talk": [{"who": "A", "said": "Why?"}],
                "chosen": [{"who": "B", "said": "Wind."}],
                "rejected": {"who": "B", "said": "Tide."},
            },
            PAIR,
        ),
        ({"chosen": "good"}, {"good": "a b", "rejected": "a c"}, {"prompt": None, "chosen": "a b", "rejected": "a c"}),
    ],
    ids=str,
)
def test_a_shape_of_pairs_is_their_prompt_and_two_answers(tmp_path, rows, row, wanted, end):
    path = tmp_path / f"a.{end}"
    if end == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row))
    (text,) = read(path=str(path), format="preference", rows=rows)
    assert json.loads(text) == wanted


@pytest.mark.parametrize(
    ("row", "kind", "given"),
    [
        ({"chosen": "a", "rejected": "b"}, "missing key", ":1 has the keys chosen, rejected"),
        ({"question": "Why?", "chosen": "a"}, "missing key", ":1 has the keys question, chosen"),
        ({"question": "Why?", "chosen": "a", "rejected": None}, "null", ":1 has nothing under `rejected`"),
        ({"question": ["Why?"], "chosen": "a", "rejected": "b"}, "wrong type", ":1 has list under `prompt`"),
        ({"question": "Why?", "chosen": "a", "rejected": 7}, "wrong type", ":1, message 0 of `rejected`, holds"),
        (
            {"question": "Why?", "chosen": "a", "rejected": "b", "tools": [{"name": "x"}]},
            "with tools",
            ":1 has `tools`",
        ),
    ],
)
def test_a_pair_of_own_names_that_is_none_is_a_bad_row(tmp_path, row, kind, given):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    texts, bad = judged(tmp_path / "a.jsonl", format="preference", rows={"prompt": "question"})
    assert texts == [] and [found for found, _ in bad] == [kind] and given in bad[0][1]


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        ("instruction", "alpaca"),
        ("conversations", "sharegpt"),
        ("messages", "messages"),
        ("question", "{prompt: question}"),
    ],
)
def test_a_prompt_under_another_name_is_not_left_out_in_silence(tmp_path, key, rows):
    row = {key: SHARED[:1] if key == "conversations" else "Why?", "chosen": "Wind.", "rejected": "Tide."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    error = refused(path=str(tmp_path), format="preference")
    assert error.given.endswith(f":1 has the key `{key}`, and no `prompt`") and f"`rows: {rows}`" in error.change
    left_out = read(path=str(tmp_path), format="preference", rows={"chosen": "chosen"})
    assert json.loads(left_out[0]) == {"prompt": None, "chosen": "Wind.", "rejected": "Tide."}
    whole = {key: "said elsewhere", "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    (tmp_path / "a.jsonl").write_text(json.dumps(whole))
    assert json.loads(read(path=str(tmp_path), format="preference")[0]) == PAIR, "both answers begin with the prompt"


def test_content_as_parts_of_text_is_their_text(tmp_path):
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?", "image_url": None}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Wind."}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (text,) = read(path=str(tmp_path), format="chat")
    assert json.loads(text) == said("Why?", "Wind.")
    for other in ({"type": "image_url", "image_url": "x"}, {"type": "text", "text": 7}, "Why?"):
        row["messages"][0]["content"] = [parts[0], other]
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
        assert "images are not read" in refused(path=str(tmp_path), format="chat").change


def test_a_mapping_makes_the_shards_that_messages_make(planted, tmp_path):
    template_of(planted, PLAIN)
    asked = [(f"Which rope is number {number}?", f"The {number}th one. " * (1 + number % 5)) for number in range(40)]
    forms = {
        "messages": [{"messages": said(*pair)} for pair in asked],
        "alpaca": [{"instruction": question, "input": "", "output": answer} for question, answer in asked],
    }
    made = {}
    for name, rows in forms.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = data_config(
            tmp_path,
            sources=[{"path": str(tmp_path / f"{name}.jsonl"), "format": "chat", "rows": name}],
            tokenizer={"from": str(planted.directory / "tokenizer")},
            sequence_length=128,
            directory=str(tmp_path / name),
        )
        assert settings_of(config, {})["sources"][0]["rows"] == name
        made[name] = quietly(config)
    for name in ("train", "validation"):
        assert content(made["messages"].directory / name) == content(made["alpaca"].directory / name)


OTHERS = [
    ({"id": 1, "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Wind."}]}, "sharegpt"),
    ({"conversations": said("Why?", "Wind."), "system": ""}, "{messages: conversations}"),
    ({"instruction": "Why?", "input": "", "output": "Wind.", "system": ""}, "alpaca"),
]


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "shape"), OTHERS)
def test_rows_of_another_tool_without_rows_are_refused_with_what_reads_them(tmp_path, row, shape, end):
    if end == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps(row))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    error = refused(path=str(tmp_path), format="chat")
    assert error.change == f"set `rows: {shape}` of the source"
    assert f"has the keys {', '.join(row)}" in error.given, "all keys, also of a table"
    asked = {"messages": "conversations"} if shape.startswith("{") else shape
    assert len(read(path=str(tmp_path), format="chat", rows=asked)) == 1


def test_rows_of_unknown_names_are_refused_with_a_way_to_name_them(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": "Why?", "a": "Wind."}))
    own = "{messages: ...}, or {prompt: ..., completion: ...}"
    change = f"name its keys in `rows` of the source, {own}; or use format: text"
    assert refused(path=str(tmp_path), format="chat").change == change


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ({"meta": {"text": "x"}}, "x"),
        ({"meta.text": "y", "meta": {"text": "x"}}, "y"),
        ({"meta": None}, None),
        ({"meta": {"text": None}}, None),
        ({"meta": {}}, ABSENT),
        ({"meta": "text"}, ABSENT),
        ({}, ABSENT),
    ],
)
def test_a_key_with_dots_is_a_path(row, value):
    assert value_at(row, "meta.text") is value or value_at(row, "meta.text") == value


NESTED = {
    "id": 7,
    "meta": {
        "dialogue": [{"who": "A", "said": "Why?"}, {"who": "B", "said": "Wind."}],
        "persona": "Be brief.",
        "talk": {"question": "Why?", "context": "At sea.", "good": "Wind.", "bad": "Tide."},
    },
}
TALK = {"prompt": ["meta.talk.question", "meta.talk.context", "meta.talk.none"], "system": "meta.persona"}
ASKED = said("Why?\n\nAt sea.", system="Be brief.")


@pytest.mark.parametrize("end", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("rows", "kind", "document"),
    [
        (OWN_LIST | {"messages": "meta.dialogue"}, "chat", said("Why?", "Wind.")),
        (TALK | {"completion": "meta.talk.good"}, "chat", [*ASKED, {"role": "assistant", "content": "Wind."}]),
        (
            TALK | {"chosen": "meta.talk.good", "rejected": "meta.talk.bad"},
            "preference",
            {
                "prompt": ASKED,
                **{key: said("", word)[1:] for key, word in (("chosen", "Wind."), ("rejected", "Tide."))},
            },
        ),
        (
            {"chosen": "meta.talk.good", "rejected": "meta.talk.bad"},
            "preference",
            {"prompt": None, "chosen": "Wind.", "rejected": "Tide."},
        ),
    ],
)
def test_own_names_with_dots_are_nested_keys(tmp_path, rows, kind, document, end):
    table = pyarrow.Table.from_pylist([NESTED, NESTED])
    if end == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps(NESTED) + "\n" + json.dumps(NESTED))
    elif end == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    else:
        with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    assert list(map(json.loads, read(path=str(tmp_path), format=kind, rows=rows))) == [document] * 2


@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_a_name_with_dots_that_is_not_there_is_said(tmp_path, end):
    if end == "jsonl":
        (tmp_path / "a.jsonl").write_text(json.dumps(NESTED))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([NESTED]), tmp_path / "a.parquet")
    error = refused(path=str(tmp_path), format="chat", rows={"messages": "meta.dialog"})
    assert error.given.endswith("has the keys id, meta")
    assert error.rule == "`rows` of the source says that a row has `meta.dialog`"
