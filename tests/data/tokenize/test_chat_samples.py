"""One sample of each answer where the whole text is not what inference would give; and rows with tools. Spans written by hand."""

import json

import pytest

from tests.data.chat_templates import CALLS, CASES, DEEPSEEK, MISTRAL_V3, OF_CALL, TALK, Case
from tests.data.tokenize.test_answer_spans import DATE, spans
from tests.data.tokenize.test_answer_spans import made as made  # a fixture
from windlass.data.sources.chat_rows import conversation_of, parsed
from windlass.data.tokenize.chat_samples import conversation_samples
from windlass.data.tokenize.chat_template import Template
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.errors import UserError

SAID = "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Which rope?<｜Assistant｜>"
DEEP_END = "<｜end▁of▁sentence｜>"
TOOL = {"name": "depth", "description": "Fathoms below the keel.", "parameters": {"type": "object", "properties": {}}}


def found(made, case, tools=None):
    """(the text, the learned texts) of each sample."""
    directory, tokenizer = made(case)
    rows = conversation_samples(Template(directory, DATE), case.messages, "here", tools)
    return [
        (tokenizer.decode(ids_N.tolist(), skip_special_tokens=False), spans(tokenizer, ids_N, is_learned_N), unwritten)
        for _, (ids_N, is_learned_N, unwritten), _ in rows
    ]


def test_a_conversation_whose_answers_are_as_inference_has_them_is_one_sample(made):
    assert len(found(made, CASES["qwen 3"])) == 1


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_a_cue_that_opens_a_thought_is_followed_by_the_reasoning_if_any(made, name):
    talk = [*TALK[:2], {**TALK[2], "content": "<think>\nRed ropes hold.\n</think>\n\nThe red one."}, *TALK[3:]]
    first, second = found(made, Case(name, DEEPSEEK, [], talk))
    assert first[0] == SAID + "<think>\nRed ropes hold.\n</think>\n\nThe red one." + DEEP_END
    assert first[1] == ["Red ropes hold.\n</think>\n\nThe red one." + DEEP_END]
    before = SAID + "\n\nThe red one." + DEEP_END + "<｜User｜>And then?<｜Assistant｜><think>\n"
    assert second[0] == before + "\n</think>\n\nPull it in\nslowly." + DEEP_END
    assert second[1] == ["\n</think>\n\nPull it in\nslowly." + DEEP_END], "an empty thought, which ends at once"


def test_reasoning_of_its_own_key_is_written_and_not_counted_as_left_out(made):
    talk = [TALK[1], {**TALK[2], "reasoning_content": "Red ropes hold."}]
    ((_, learned, unwritten),) = found(made, Case("deepseekv3", DEEPSEEK, [], talk))
    assert learned == ["Red ropes hold.\n</think>\n\nThe red one." + DEEP_END] and unwritten == [[]]


def test_a_system_message_that_moves_to_the_last_question(made):
    first, second = found(made, Case(MISTRAL_V3, CASES["mistral v7"].specials, []))
    assert first[0] == "<s>[INST] Be brief.\n\nWhich rope?[/INST] The red one.</s>"
    moved = "<s>[INST] Which rope?[/INST] The red one.</s>[INST] Be brief.\n\nAnd then?[/INST] Pull it in\nslowly.</s>"
    assert second[0] == moved and (first[1], second[1]) == ([" The red one.</s>"], [" Pull it in\nslowly.</s>"])


def test_two_answers_in_a_row_that_the_template_writes_alike(made):
    ((_, learned, _),) = found(made, CASES["qwen 2.5"]._replace(messages=[TALK[1], TALK[2], TALK[4]]))
    assert learned == ["The red one.<|im_end|>", "Pull it in\nslowly.<|im_end|>"]


def test_two_answers_in_a_row_of_which_the_last_would_be_written_otherwise(made):
    talk = [TALK[1], TALK[2], TALK[4]]
    rows = found(made, CASES["qwen 3"]._replace(messages=talk))
    thought = "<think>\n\n</think>\n\n"
    assert [row[1] for row in rows] == [
        [f"{thought}The red one.<|im_end|>"],
        [f"{thought}Pull it in\nslowly.<|im_end|>"],
    ]


def test_of_two_answers_one_of_weight_0_is_context_alone(made):
    talk = [TALK[1], {**TALK[2], "weight": 0}, TALK[4]]
    ((_, learned, _),) = found(made, CASES["qwen 3"]._replace(messages=talk))
    assert learned == ["<think>\n\n</think>\n\nPull it in\nslowly.<|im_end|>"]


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [{"type": "function", "function": TOOL}]])
@pytest.mark.parametrize("name", ["qwen 2.5, calls", "qwen 3, calls"])
def test_tools_of_a_row_are_written_and_not_learned(made, name, tools):
    messages, read = parsed(conversation_of({"messages": CALLS, "tools": tools}, "here"))
    assert messages == CALLS and read == [{"type": "function", "function": TOOL}]
    ((text, learned, _),) = found(made, CASES[name], read)
    assert f"<tools>\n{json.dumps(read[0])}\n</tools>" in text and text.count("Fathoms") == 1
    assert learned[0] == OF_CALL and learned == CASES[name].learned


def test_tools_go_with_each_answer_of_a_long_conversation(made):
    directory, tokenizer = made(CASES["qwen 3, calls"])
    ((_, row, _),) = conversation_samples(
        Template(directory, DATE), CALLS * 6, "here", [{"type": "function", "function": TOOL}]
    )
    learned = spans(tokenizer, row.ids_N, row.is_learned_N)
    assert learned == [OF_CALL, "Four fathoms.<|im_end|>"] * 5 + CASES["qwen 3, calls"].learned


def test_a_template_that_leaves_tools_out_is_refused(made):
    with pytest.raises(UserError) as caught:
        found(made, CASES["zephyr"], [{"type": "function", "function": TOOL}])
    assert caught.value.given == "here: the chat template leaves out the tool 'depth', which the row declares"


def test_documents_and_refusals_of_each_row_are_reported(made):
    directory, _ = made(Case("deepseekv3", DEEPSEEK.replace(" ", " <x> ", 1), []))
    texts = [json.dumps(TALK), json.dumps([TALK[1], {"role": "assistant", "content": "a <x>"}]), json.dumps(TALK[:3])]
    (rows,) = encode_rows(texts, RowSettings(directory, "train"))
    assert rows.num_documents == [2, 0, 1]
    ((kind, given, _, _),) = rows.refused
    assert kind == "refused by the chat template" and given.startswith(
        "conversation 1 of train ('Which rope?') holds <x>"
    )


def test_of_several_templates_tool_use_writes_rows_with_tools(made):
    directory, tokenizer = made(CASES["qwen 3, calls"])
    path = directory / "tokenizer_config.json"
    texts = {"default": CASES["zephyr"].text(), "tool_use": CASES["qwen 3, calls"].text()}
    listed = [{"name": name, "template": text} for name, text in texts.items()]
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": listed}))
    template = Template(directory, DATE)
    ((_, plain, _),) = conversation_samples(template, TALK[1:3], "here")
    assert tokenizer.decode(plain.ids_N.tolist(), skip_special_tokens=False).startswith(
        "<|user|>\nWhich rope?<|im_end|>"
    )
    ((_, called, _),) = conversation_samples(template, CALLS, "here", [{"type": "function", "function": TOOL}])
    assert spans(tokenizer, called.ids_N, called.is_learned_N) == CASES["qwen 3, calls"].learned
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": listed[1:]}))
    with pytest.raises(UserError, match="has the chat templates tool_use"):
        Template(directory, DATE)


def weighed(made, case, weights):
    """What is learned of each sample: (text, percent) of each run of ids that weigh alike, None where all weigh 100."""
    directory, tokenizer = made
    weights = iter(weights)
    messages = [{**one, "weight": next(weights)} if one["role"] == "assistant" else one for one in case.messages]
    found = []
    for _, (ids_N, is_learned_N, _), percent_N in conversation_samples(Template(directory, DATE), messages, "here"):
        if percent_N is None:
            found.append(None)
            continue
        values = dict.fromkeys(percent_N[is_learned_N].tolist())
        found.append({value: spans(tokenizer, ids_N, is_learned_N & (percent_N == value)) for value in values})
    return found


@pytest.mark.parametrize("name", CASES)
def test_each_answer_has_its_weight_and_the_end_of_the_document_that_of_the_last(made, name):
    first, *others = CASES[name].learned
    tokenizer = made(CASES[name])
    (found,) = weighed(tokenizer, CASES[name], (0.5, 0.25))
    assert found == {50: [first], 25: others}
    assert weighed(tokenizer, CASES[name], (1, 1)) == [None]


def test_answers_that_are_samples_of_their_own_keep_their_weights(made):
    case = Case("deepseekv3", DEEPSEEK, [])
    first, second = weighed(made(case), case, (1, 0.07))
    assert first is None and list(second) == [7] and second[7][0].endswith("slowly." + DEEP_END)


def test_an_answer_of_weight_0_is_no_part_of_any(made):
    case = CASES["qwen 2.5"]
    (found,) = weighed(made(case), case._replace(messages=[*TALK, *TALK[1:3]]), (0.5, 0, 0.3))
    assert found == {50: [case.learned[0]], 30: [case.learned[0]]}


ADJACENT = "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content + '<e>' }}{% endfor %}"


@pytest.mark.parametrize("specials", ["<s> <e>", "<e> <s>"], ids=["its own EOS", "an EOS behind it"])
def test_answers_without_a_border_have_one_weight_or_are_refused(made, specials):
    case = Case(
        ADJACENT if specials == "<s> <e>" else ADJACENT + "{% if not add_generation_prompt %}{{ '\\n' }}{% endif %}",
        specials,
        [],
    )
    case = case._replace(messages=[TALK[1], TALK[2], TALK[4]])
    tokenizer = made(case)
    (found,) = weighed(tokenizer, case, (0.5, 0.5))
    assert found == {50: ["The red one.<e>Pull it in\nslowly.<e>", *["<s>"] * (specials == "<e> <s>")]}
    with pytest.raises(UserError) as caught:
        weighed(tokenizer, case, (0.5, 0.25))
    assert caught.value.given == "here has 2 answers of several weights, and what is learned of it is in 1 pieces"
    assert "one weight" in caught.value.change
