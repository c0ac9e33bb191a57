"""Chats in processes and in windows give the ids of one process that renders everything; what is rendered grows as turns do."""

import numpy as np
import pytest

from tests.data.chat_templates import CALLS, CASES, TALK
from tests.data.sources.test_preference_rows import ASKED, BAD, GOOD
from tests.data.tokenize.test_answer_spans import DATE
from tests.data.tokenize.test_answer_spans import made as made  # a fixture
from windlass.data.sources.bad_rows import Placed
from windlass.data.sources.chat_rows import conversation_of
from windlass.data.sources.preference_rows import pair_of
from windlass.data.tokenize import answer_spans
from windlass.data.tokenize import encode_rows as room
from windlass.data.tokenize.chat_template import Template
from windlass.data.tokenize.encode_rows import RowEncoder, RowSettings, encode_rows, row_batches
from windlass.data.tokenize.pool import Workers
from windlass.errors import UserError

QUESTIONS = ("Which rope?", "a", "user", "Why?\n\n", "  spaced  ", "naïve é 🪝", "Which rope?")
ANSWERS = ("The red one.", "assistant", "Pull it in\nslowly. ", "x <b> 🪝", "x")


def talk(case, num_turns):
    """A conversation of the shape of a case's, with words that are also in the marks of turns."""
    messages = [*case.messages[:1]] if case.messages[0]["role"] == "system" else []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]})
        if case.messages is CALLS and turn % 2:
            messages += CALLS[1:3]
        weight = {"weight": 0} if turn % 5 == 3 else {}
        messages.append({"role": "assistant", "content": ANSWERS[turn % len(ANSWERS)], **weight})
    return messages


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_windows_give_what_all_messages_give(made, monkeypatch, name, is_fast):
    directory, _ = made(CASES[name])
    template, messages = Template(directory, DATE, is_fast), talk(CASES[name], 12)
    if name == "glm 4":
        messages = [message for message in messages if message.get("weight") != 0]
    found = template.encode(messages, "here")
    exact = Template(directory, DATE)
    monkeypatch.setattr(answer_spans, "ALL_EXACT", len(messages))
    wanted = exact.encode(messages, "here")
    assert found.ids_N.tolist() == wanted.ids_N.tolist()
    assert found.is_learned_N.tolist() == wanted.is_learned_N.tolist() and found.unwritten == wanted.unwritten


@pytest.mark.parametrize("name", ["qwen 2.5", "qwen 3", "llama 3", "mistral v7", "zephyr", "gpt-oss", "qwen 3, marked"])
def test_what_is_rendered_grows_as_the_turns_do(made, name):
    directory, _ = made(CASES[name])
    costs = []
    for num_turns in (4, 16, 64):
        template = Template(directory, DATE)
        messages = [*TALK[:1]]
        for turn in range(num_turns):
            messages.append({"role": "user", "content": f"Rope {turn}? " * 20})
            messages.append({"role": "assistant", "content": f"Number {turn}, and slowly. " * 30})
        template.encode(messages, "here")
        costs.append((template.num_rendered / num_turns, template.chars_rendered / len(str(messages))))
    assert costs[2][0] <= costs[1][0] <= costs[0][0] <= 2.5, "texts a turn"
    assert max(chars for _, chars in costs) < 3.5, "characters rendered for one of the conversation"


def test_a_turn_that_is_written_otherwise_later_is_found_out(made):
    """The template says how many answers there are: so nothing before the last answer is as inference would have it."""
    case = CASES["qwen 2.5"]
    counting = case.text() + "{{- messages | selectattr('role', 'equalto', 'assistant') | list | length }}"
    directory, _ = made(case._replace(template=counting))
    with pytest.raises(UserError, match="cannot be found by the chat template"):
        Template(directory, DATE).encode(talk(case, 12), "here")


def test_a_template_that_numbers_turns_by_all_before_them_is_followed(made):
    """A window has other numbers: its text is not the whole text's, and all messages are rendered."""
    case = CASES["qwen 2.5"]
    numbered = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    numbered += "{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length + 1 }}\n{% endif %}"
    directory, tokenizer = made(case._replace(template=numbered))
    messages = [{**message, "content": f"{n}."} for n, message in enumerate(talk(case, 9))]
    for message in messages:
        message.pop("weight", None)
    ids_N, is_learned_N, _ = Template(directory, DATE).encode(messages, "here")
    learned = tokenizer.decode(ids_N[is_learned_N].tolist(), skip_special_tokens=False)
    assert learned == "".join(f"{n}.<|im_end|>" for n in range(2, len(messages), 2))


@pytest.mark.parametrize(("is_pairs", "workers"), [(False, 2), (True, 1)])  # each worker costs two CPU seconds to start
def test_workers_give_what_one_process_gives_in_order(made, monkeypatch, is_pairs, workers):
    directory, _ = made(CASES["qwen 3"])
    monkeypatch.setattr(room, "ROWS_AT_ONCE", 3)
    if is_pairs:
        asked = [{"role": "user", "content": f"{n} {ASKED['content']}"} for n in range(20)]
        texts = [pair_of({"prompt": [one], "chosen": [GOOD], "rejected": [BAD]}, "") for one in asked]
    else:
        texts = [conversation_of({"messages": talk(CASES["qwen 3"], 1 + n % 7)}, "") for n in range(20)]
    settings = RowSettings(directory, "train", is_pairs, is_fast=True)
    alone = np.concatenate([found.ids for found in encode_rows(texts, settings)])
    with Workers(workers, RowEncoder, settings) as pool:
        assert np.concatenate([found.ids for found in pool.map(row_batches(texts))]).tolist() == alone.tolist()


def test_a_worker_that_refuses_a_row_says_which(made, monkeypatch):
    directory, _ = made(CASES["mistral v7"])
    monkeypatch.setattr(room, "ROWS_AT_ONCE", 1)
    texts = [conversation_of({"messages": messages}, "") for messages in (TALK[1:], CALLS, CALLS)]
    texts[2] = Placed.at(texts[2], "a.parquet, row 12,")
    with Workers(1, RowEncoder, RowSettings(directory, "train")) as workers:
        first, second, third = workers.map(row_batches(texts))
    assert (first.num_documents, first.refused, second.num_documents) == ([1], [], [0])
    assert second.refused[0][1].startswith("conversation 1 of train ('How deep?'): the chat template refuses it: Only")
    assert third.refused[0][1].startswith("a.parquet, row 12 ('How deep?'): the chat template refuses it: Only")


def test_a_tokenizer_without_a_template_is_refused_from_a_worker_too(small):
    settings = RowSettings(small[1].tokenizer_directory, "train")
    with Workers(1, RowEncoder, settings) as workers, pytest.raises(UserError, match="has no chat template"):
        list(workers.map([[(0, "[]")]]))


def test_workers_are_as_many_as_are_worth_their_start():
    mib = 1 << 20
    found = [room.num_row_workers(size, 8) for size in (0, 8 * mib, 8 * mib + 1, 16 * mib, 16 * mib + 1, 999 * mib)]
    assert found == [0, 0, 1, 1, 2, 8]
