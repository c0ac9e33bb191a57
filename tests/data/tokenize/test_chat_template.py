"""What is learned of a conversation: the answers with their ends, in whatever way a template writes them."""

import json
import logging
import logging.handlers
import re
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import data_config
from tests.data.planted import BOS, TURN, Planted
from windlass.commands.data_inspect import describe_set
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.documents import DocumentWalk, blocks
from windlass.data.lint.lint import lint
from windlass.data.lint.statistics import read_sample, survey_set
from windlass.data.prepare.manifest import load_prepared
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.mds import Reader
from windlass.data.sources.bad_rows import raised
from windlass.data.sources.chat_rows import CHAT_COLUMNS, conversation_of
from windlass.data.stream.collate import collate
from windlass.data.tokenize.chat_template import Template, check_template
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.data.tokenize.template_files import SIMPLE_TEMPLATE
from windlass.errors import UserError

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
)
THINKING = (  # as Qwen3: the last answer is written otherwise than those before
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (  # as Llama 2: BOS before each question, EOS behind each answer
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
    "<|endoftext|>{% endif %}{% endfor %}"
)
COUNTING = "{{ messages | length }} messages\n" + PLAIN
LOUD = PLAIN.replace("{{ m.content }}", "{{ m.content | upper }}")
WITHOUT_ANSWERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which rope?"},
    {"role": "assistant", "content": "The red one."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Pull it in\nslowly."},
]


@pytest.fixture
def planted(small, tmp_path):
    """A tokenizer with the marks of turns; `set_template` gives it a template."""
    planted = Planted(small, tmp_path / "chat")
    path = planted.directory / "tokenizer" / "tokenizer.json"
    planted.tokenizer.add_special_tokens(["<|im_start|>"])
    planted.tokenizer.encode_special_tokens = False
    planted.tokenizer.save(str(path))
    return planted


def template_of(planted, template, **config):
    planted.set_config(chat_template=template, **config)
    return Template(planted.directory / "tokenizer")


def learned(planted, template, messages=MESSAGES, **config):
    """(the whole text, the learned texts one behind the other) of the conversation."""
    ids, is_learned, _ = template_of(planted, template, **config).encode(messages, "here")
    assert len(ids) == len(is_learned)
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(is_learned)) + 1)
    decode = planted.tokenizer.decode
    texts = [decode(ids[run].tolist(), skip_special_tokens=False) for run in runs if is_learned[run[0]]]
    return decode(ids.tolist(), skip_special_tokens=False), texts


START, EOS = "<|im_start|>", "<|endoftext|>"
WRITTEN = "".join(f"{START}{m['role']}\n{m['content']}{TURN}\n" for m in MESSAGES)
FIRST, LAST = f"The red one.{TURN}", f"Pull it in\nslowly.{TURN}"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_are_learned_with_their_ends_and_one_eos_follows(planted, template):
    text, answers = learned(planted, template)
    assert text == WRITTEN + "<|endoftext|>"
    assert answers == [FIRST, LAST, "<|endoftext|>"], "the newline between turns is the template's"


def test_transformers_raises_no_alarm_over_a_conversation_that_is_longer_than_the_tokenizers_model(planted):
    logger, said = logging.getLogger("transformers.tokenization_utils_base"), logging.handlers.BufferingHandler(99)
    logger.addHandler(said)
    try:
        for template in (PLAIN, MARKED):
            learned(planted, template, model_max_length=8)
    finally:
        logger.removeHandler(said)
    assert [record.getMessage() for record in said.buffer] == []


def test_an_end_of_turn_that_is_eos_ends_the_document_and_is_not_doubled(planted):
    text, answers = learned(planted, PLAIN, eos_token=TURN)
    assert text == WRITTEN.removesuffix("\n") and answers == [FIRST, LAST]


def test_a_template_that_writes_last_answers_otherwise_is_followed(planted):
    text, answers = learned(planted, THINKING)
    assert text.count("<think>") == 1
    assert answers == [FIRST, "<think>\n\n</think>\n\n" + LAST, "<|endoftext|>"], (
        "after the cue the model writes that, too"
    )


def test_answers_that_end_by_eos_keep_their_ends(planted):
    text, answers = learned(planted, INSTRUCT, MESSAGES[1:])
    assert text.startswith(f"{BOS}[INST] Which rope? [/INST] The red one.<|endoftext|>{BOS}[INST]")
    assert answers == [" The red one.<|endoftext|>", " Pull it in\nslowly.<|endoftext|>"]


@pytest.mark.parametrize(
    ("template", "given", "change"),
    [
        (COUNTING, "here: message 2 cannot be found by the chat template of", "{% generation %}"),
        (
            LOUD,
            "here: the answer 'The red one.' is not in what would be learned: 'THE RED ONE.",
            "fix the chat template",
        ),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(planted, template, given, change):
    with pytest.raises(UserError) as caught:
        template_of(planted, template).encode(MESSAGES, "here")
    assert caught.value.given.startswith(given) and change in caught.value.change


@pytest.mark.parametrize(
    ("template", "share"),
    [
        (MARKED.replace("'assistant'", "'bot'"), "nothing"),
        ("{% generation %}" + WITHOUT_ANSWERS.replace("user", "assistant") + "{% endgeneration %}", "everything"),
    ],
)
def test_a_mask_of_nothing_or_everything_is_refused(planted, template, share):
    with pytest.raises(UserError) as caught:
        template_of(planted, template, eos_token=TURN).encode(MESSAGES, "conversation 3 of train")
    assert caught.value.given == f"conversation 3 of train: {share} of it would be learned"
    assert caught.value.rule == "answers are learned, and what they answer is not"


@pytest.mark.parametrize(
    ("template", "given"),
    [
        (
            PLAIN.replace("messages %}<|im", "messages if m.role != 'system' %}<|im"),
            "leaves out what the system says: 'Be",
        ),
        (
            "{{ raise_exception('System role not supported') }}",
            "the chat template refuses it: System role not supported",
        ),
        ("{{ messages[9].content }}", "the chat template refuses it: "),
        ("{{ 'a' + 1 }}", "the chat template refuses it: can only concatenate"),
    ],
)
def test_a_template_that_drops_or_refuses_a_message_is_named(planted, template, given):
    with pytest.raises(UserError) as caught:
        template_of(planted, template).encode(MESSAGES, "here")
    assert caught.value.given.startswith("here: the chat template") and given in caught.value.given


def test_a_call_of_a_tool_is_learned_and_must_be_written(planted):
    call = {"type": "function", "function": {"name": "pull", "arguments": "{}"}}
    messages = [MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    written = PLAIN.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}"
    )
    _, answers = learned(planted, written, messages)
    assert answers == [f"[pull]{TURN}", "<|endoftext|>"]
    with pytest.raises(UserError, match="the answer 'pull' is not in what would be learned"):
        learned(planted, PLAIN, messages)


def test_the_template_of_the_message_teaches_answers_and_their_ends(planted):
    _, answers = learned(planted, SIMPLE_TEMPLATE, MESSAGES)
    assert answers == [f"The red one.{EOS}", f"Pull it in\nslowly.{EOS}"]


def test_a_tokenizer_without_a_template_is_refused(planted):
    with pytest.raises(UserError) as caught:
        Template(planted.directory / "tokenizer")
    assert caught.value.given.endswith("has no chat template") and "chat_template.jinja" in caught.value.rule


def test_a_special_token_in_words_is_refused(planted):
    messages = [*MESSAGES[:3], {"role": "user", "content": f"say {TURN}"}, MESSAGES[4]]
    with pytest.raises(UserError) as caught:
        template_of(planted, PLAIN).encode(messages, "here")
    assert caught.value.given == f"here holds {TURN} in the words of the user"


# ---- fields of an answer besides its words

REASONING = PLAIN.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
LAST_REASONING = REASONING.replace(
    "{{ m.reasoning_content }}", "{% if loop.last %}{{ m.reasoning_content }}{% endif %}"
)
CALLING = PLAIN.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}")


def unwritten(planted, template, *answers):
    messages = [part for answer in answers for part in (MESSAGES[1], {**MESSAGES[2], **answer})]
    return template_of(planted, template).encode(messages, "here").unwritten


@pytest.mark.parametrize("mark", [False, True])
def test_a_field_that_the_template_leaves_out_is_named_for_each_answer(planted, mark):
    def of(template):
        return (
            template.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
            if mark
            else template
        )

    wise, same = {"reasoning_content": "Red is best."}, {"reasoning_content": "The red one."}
    assert unwritten(planted, of(PLAIN), wise, {}, wise) == [["reasoning_content"], [], ["reasoning_content"]]
    assert unwritten(planted, of(PLAIN), same) == [["reasoning_content"]], "the same words are in the answer by chance"
    assert unwritten(planted, PLAIN, {"name": "bosun", "thinking": "Hm."}) == [["name", "thinking"]]
    if not mark:
        assert unwritten(planted, REASONING, wise, same) == [[], []]
        assert unwritten(planted, LAST_REASONING, wise, wise) == [["reasoning_content"], []], "as Qwen3"


def test_arguments_of_a_call_that_the_template_leaves_out_are_named(planted):
    call = {"id": "call_7", "function": {"name": "pull", "arguments": {"rope": 'the "red" naïve one'}}}
    assert unwritten(planted, CALLING, {"tool_calls": [call]}) == [[]], "written as JSON"
    names = PLAIN.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    )
    assert unwritten(planted, names, {"tool_calls": [call]}) == [["tool_calls"]]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_answer_of_weight_0_is_context_and_no_target(planted, template):
    bad = {**MESSAGES[2], "weight": 0}
    text, answers = learned(planted, template, [MESSAGES[0], MESSAGES[1], bad, *MESSAGES[3:]])
    assert text == WRITTEN + EOS and answers == [LAST, EOS]
    _, answers = learned(planted, template, [*MESSAGES[:3], MESSAGES[3], {**MESSAGES[4], "weight": 0}])
    assert answers == [FIRST, EOS]


# ---- prepared


def chat_rows(count=40):
    rows = []
    for n in range(count):
        answer = {"role": "assistant", "content": f"It is {n * n}, which is {n} times {n}."}
        question = {"role": "user", "content": f"What is the square of {n}?"}
        rows.append(
            {"messages": [question, answer]}
            if n % 2
            else {"prompt": question["content"], "completion": answer["content"]}
        )
    return rows


def test_fractions_as_weights_are_stored_while_a_run_reads(planted, tmp_path):
    template_of(planted, PLAIN)
    rows = [row for row in chat_rows(80) if "messages" in row]
    rows[-1]["messages"][1]["weight"] = 0.5
    found = {}
    for epoch in ("written", "shuffled"):
        prepared, _ = prepared_chat(planted, tmp_path / epoch, rows, order={"first_epoch": epoch}, validation="none")
        reader = Reader(prepared.shards("train"))
        places = [(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)]
        found[epoch] = [None if (held := reader.percent(*place)) is None else held.tolist() for place in places]
        assert reader.has_percent and {value for row in found[epoch] if row for value in row} == {50, 100}
    assert found["written"] == found["shuffled"]


def prepared_chat(planted, root, rows=None, more=None, **changes):
    """`more`: of the source."""
    root.mkdir(exist_ok=True)
    (root / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or chat_rows()))
    source = {"path": str(root / "chat.jsonl"), "format": "chat", **(more or {})}
    said = []
    settings = {"tokenizer": {"from": str(planted.directory / "tokenizer")}, "sequence_length": 128, **changes}
    config = data_config(root, sources=[source], **settings)
    return prepare(config, {}, log=said.append), said


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_preparation_holds_the_masks_and_has_no_findings(planted, tmp_path, packing):
    template_of(planted, PLAIN)
    prepared, said = prepared_chat(planted, tmp_path / "rows", packing=packing)
    reader, documents = Reader(prepared.shards("train")), DocumentWalk(prepared.eos_id)
    found = [document for block in blocks(reader, [range(reader.num_samples)]) for document in documents.add(block)]
    assert len(found) == prepared.sets["train"].documents > 20 and all(document.is_whole for document in found)
    for document in found:
        answer = planted.tokenizer.decode(document.ids_N[document.counted_N[:-1]].tolist())
        assert answer.startswith("It is ") and answer.endswith(".") and document.counted_N[-1]
    assert not prepared.sets["train"].bytes_add_up and prepared.baselines == {}
    assert sum("of conversations only answers are learned" in line for line in said) == 1, "not once per set"
    assert not any("rewrites" in line for line in said)
    assert [f for f in lint(prepared, is_isolated=True).findings if f.code != "mostly-padding"] == []


KIND = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a kind and helpful mate who answers at once.<|im_end|>\n"
AS_QWEN = KIND + "{% endif %}" + PLAIN  # a turn ends by EOS, and each conversation begins with the same words


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize("order", [{}, {"first_epoch": "written"}])
def test_documents_are_conversations_where_eos_ends_turns(planted, tmp_path, packing, order):
    template_of(planted, AS_QWEN, eos_token=TURN)
    prepared, _ = prepared_chat(
        planted, tmp_path / "rows", packing=packing, order=order, isolate=True, sequence_length=512
    )
    reader, info = Reader(prepared.shards("train")), prepared.sets["train"]
    walk = DocumentWalk(prepared.eos_id)
    found = [document for block in blocks(reader, [range(reader.num_samples)]) for document in walk.add(block)]
    assert len(found) == info.documents > 20 and all(document.is_whole for document in found)
    assert all((document.ids_N == prepared.eos_id).sum() == 2 for document in found), (
        "of the system's turn and the question's"
    )
    places = np.array([(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)])
    batch = collate(reader, places, len(places), 512, prepared.borders("train"))
    begins = [[at for at in row if at < 512] for row in batch["documents"].tolist()]
    assert max(map(len, begins)) == info.max_documents > 2
    for row, starts in enumerate(begins):
        ids = batch["input_ids"][row].tolist()
        start_id = planted.tokenizer.token_to_id(START)
        whole = [at for at in starts if ids[at] == start_id]
        assert len(whole) >= len(starts) - 1, "but for the first, each begins as a conversation does"
        assert all(batch["targets"][row, at - 1] == NOT_COUNTED for at in whole)
        assert all(ids[at - 1] == prepared.eos_id for at in starts[1:])


@pytest.mark.parametrize("is_isolated", [False, True])
def test_turns_of_other_conversations_are_no_copies(planted, tmp_path, is_isolated):
    template_of(planted, AS_QWEN.replace("at once", "at once, in the words of an old sailor, " * 8), eos_token=TURN)
    rows = chat_rows(60)
    prepared, _ = prepared_chat(planted, tmp_path / "rows", rows, sequence_length=512)
    assert [f for f in lint(prepared, is_isolated=is_isolated).findings if f.code != "mostly-padding"] == []
    prepared, _ = prepared_chat(planted, tmp_path / "copies", [*rows, *rows[:9]], sequence_length=512)
    found = [f for f in lint(prepared).findings if f.code != "mostly-padding"]
    assert {f.code for f in found} == {"duplicate-documents"} and sum(f.times for f in found) == 9, (
        "whole conversations"
    )


def test_alike_turns_of_chats_are_no_copies(planted, tmp_path):
    """Nor up to case, nor in another set, nor where a chat begins with EOS."""
    begins = "{{ eos_token }}" + AS_QWEN.replace("at once", "at once, in the words of an old sailor, " * 8)
    template_of(planted, begins, eos_token=TURN)
    rows = chat_rows(60)
    for row in rows[1::2]:
        row["messages"].insert(0, {"role": "user", "content": "speak of the ropes and winds of old " * 9})
    for row in rows[3::4]:
        row["messages"][0]["content"] = row["messages"][0]["content"].upper()
    (validation := tmp_path / "validation.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in chat_rows(69)[60:])
    )
    held_out = {"path": str(validation), "format": "chat"}
    whole, _ = prepared_chat(planted, tmp_path / "rows", rows, sequence_length=1024, validation=held_out)
    assert [found for found in lint(whole).findings if found.code != "mostly-padding"] == []


def test_a_sample_shows_turns_as_one_document(planted, tmp_path):
    template_of(planted, PLAIN, eos_token=TURN)
    prepared, _ = prepared_chat(planted, tmp_path / "rows", packing="best-fit", sequence_length=512)
    segments = read_sample(prepared, "train", 0, True).rows[0]
    turns = sum(segment.text.count(TURN) for segment in segments if segment.kind != "end")
    conversations = sum(segment.kind == "end" for segment in segments)
    assert conversations > 1 and turns == conversations + 1, "a question's end each, and the EOS in front"


def test_fields_that_are_not_learned_are_counted_and_shown(planted, tmp_path):
    template_of(planted, PLAIN)
    rows = chat_rows()
    for row in rows[1::2]:
        row["messages"][1]["reasoning_content"] = "Squares are products."
    prepared, said = prepared_chat(planted, tmp_path / "rows", rows)
    counts = {name: info.unwritten["reasoning_content"] for name, info in prepared.sets.items()}
    assert sum(counts.values()) == 20 and counts["train"] > 10
    line = f"train: {counts['train']} answers hold `reasoning_content`, which the chat template does not write: it is not learned"
    assert said.count(line) == 1
    assert load_prepared(prepared.directory).sets == prepared.sets, "prepared.json keeps the counts"
    shown = list(describe_set(prepared, survey_set(prepared, "train", 100)))
    assert f"  not learned reasoning_content of {counts['train']} answers: the chat template does not write it" in shown


def test_a_template_that_was_changed_since_is_a_finding(planted, tmp_path):
    template_of(planted, PLAIN)
    prepared, _ = prepared_chat(planted, tmp_path / "rows")
    path = prepared.tokenizer_directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": LOUD}))
    (prepared.tokenizer_directory / "chat_template.jinja").unlink(missing_ok=True)
    assert "'THE RED ONE." in check_template(prepared.tokenizer_directory)
    (finding,) = [f for f in lint(prepared).findings if f.code != "mostly-padding"]
    assert (finding.code, finding.severity) == ("template-round-trip", "error")


def test_a_conversation_that_cannot_be_learned_is_named(planted):
    template_of(planted, PLAIN)
    texts = [conversation_of(row, "") for row in chat_rows(3)] + [
        conversation_of({"messages": [{"role": "user", "content": TURN}, MESSAGES[2]]}, "")
    ]
    (rows,) = encode_rows(texts, RowSettings(planted.directory / "tokenizer", "train"))
    assert rows.num_documents == [1, 1, 1, 0]
    assert rows.refused[0][1].startswith("conversation 3 of train ('<|im_end|>') holds")


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        (
            {"path": "x.jsonl", "format": "chat", "text": "a"},
            {"from": "t"},
            "text=a with format=chat: rows of this format hold messages, or prompt and completion, and `text` has no effect on "
            "them; remove one of the two: text or format",
        ),
        (
            {"builtin": "python-stdlib", "format": "chat"},
            {"from": "t"},
            "builtin=python-stdlib with format=chat: rows of this format hold messages, or prompt and completion, and `builtin` "
            "has no effect",
        ),
        (
            {"path": "x.jsonl", "format": "chat"},
            {"train": 300},
            "sources[0].format=chat with tokenizer.train=300: conversations are written by a tokenizer's chat template, and a "
            "trained one has none; give tokenizer.from of a chat model, in place of tokenizer.train",
        ),
    ],
)
def test_settings_that_contradict_chat_are_refused(tmp_path, source, tokenizer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        data_config(tmp_path, sources=[source], tokenizer=tokenizer)


def test_files_without_rows_are_refused(planted, tmp_path):
    (tmp_path / "a.txt").write_text("words")
    template_of(planted, PLAIN)
    source = {"path": str(tmp_path / "a.txt"), "format": "chat"}
    config = data_config(tmp_path, sources=[source], tokenizer={"from": str(planted.directory / "tokenizer")})
    with pytest.raises(UserError) as caught:
        prepare(config, {}, log=lambda line: None)
    rule = "conversations are rows of .jsonl, .json, .csv, .parquet or .arrow, and the source has other files"
    assert caught.value.rule == rule


@pytest.mark.parametrize("row", [{"messages": MESSAGES}, {"prompt": "Why?", "completion": "Wind."}])
def test_conversations_read_as_text_are_recognised(tmp_path, row):
    from windlass.data.sources.formats import read_rows

    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with open(tmp_path / "a.jsonl", "rb") as stream, pytest.raises(UserError) as caught:
        list(raised(read_rows(stream, str(tmp_path / "a.jsonl"), "text")))
    assert caught.value.change == f"it holds {' and '.join(row)}: set `format: chat` of the source"


def test_parquet_holds_conversations_too(tmp_path):
    import pyarrow
    import pyarrow.parquet

    from windlass.data.sources.config import CONVERSATION
    from windlass.data.sources.formats import read_rows

    pyarrow.parquet.write_table(pyarrow.table({"messages": [MESSAGES], "id": [1]}), tmp_path / "a.parquet")
    with open(tmp_path / "a.parquet", "rb") as stream:
        (text,) = read_rows(stream, str(tmp_path / "a.parquet"), CONVERSATION)
    assert json.loads(text) == MESSAGES and "messages" in CHAT_COLUMNS


def test_the_template_of_the_page_on_data_marks_every_answer(planted):
    page = (Path(__file__).parents[3] / "docs" / "howto" / "prepare-data.md").read_text()
    template = re.search(r"```jinja\n(.*?)\n```", page, re.S)[1]
    _, answers = learned(planted, template, MESSAGES)
    assert answers == ["The red one.<|endoftext|>", "Pull it in\nslowly.<|endoftext|>"]
