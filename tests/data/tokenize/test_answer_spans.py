"""What is learned in chat templates that are in use, as exact text (chat_templates.py), under each policy of too_long."""

import json
import random
import re
import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from tests.data.chat_templates import CALLS, CASES, CHATML, COHERE, HEADERS, MISTRAL_V3, TALK, Case
from tests.data.tokenize.test_chat_template import PLAIN
from windlass.data.tokenize.chat_samples import conversation_samples
from windlass.data.tokenize.chat_template import Template
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.data.tokenize.fitting import Fitting
from windlass.data.tokenize.flags import ID_BITS, MASKED
from windlass.data.tokenize.resume import FinishedPart
from windlass.data.tokenize.template_files import on_day
from windlass.errors import UserError

DATE = "2026-01-02"
MARKS_NOTHING = CASES["llama 3, marked"].text().replace("== 'assistant'", "== 'model'")
MARKS_ALL = "{% generation %}{{ messages[0].content }}<|eot_id|>{% endgeneration %}"


@pytest.fixture
def made(small, tmp_path):
    """Makes the tokenizer of a case: of the small one, its special tokens and its template."""

    def make(case: Case):
        directory, specials = tmp_path / "tokenizer", case.specials.split()
        shutil.copytree(small[1].tokenizer_directory, directory)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in specials])
        tokenizer.save(str(directory / "tokenizer.json"))
        path = directory / "tokenizer_config.json"
        changes = {"bos_token": specials[0], "eos_token": specials[-1], "chat_template": case.text()}
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        tokenizer.encode_special_tokens = False
        return directory, tokenizer

    return make


def spans(tokenizer, ids_N, is_learned_N):
    """The learned texts; an EOS that the template did not write is alone."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], is_learned_N, [0]]))).reshape(-1, 2)
    return [tokenizer.decode(ids_N[start:end].tolist(), skip_special_tokens=False) for start, end in borders.tolist()]


@pytest.mark.parametrize("name", CASES)
def test_the_answers_and_the_ends_of_their_turns_are_learned_and_nothing_else(made, name):
    case = CASES[name]
    directory, tokenizer = made(case)
    ids_N, is_learned_N, unwritten = Template(directory, DATE).encode(case.messages, "here")
    assert spans(tokenizer, ids_N, is_learned_N) == case.learned and unwritten == case.unwritten


@pytest.mark.parametrize(
    ("case", "given"),
    [
        # with a cue the template writes the thought of an answer as begun, and an answer in the conversation has none
        (
            Case("deepseekv3", CASES["deepseek v3, marked"].specials, []),
            "here: message 2 cannot be found by the chat template",
        ),
        # the system's words are in front of the last message, where that is a question
        (Case(MISTRAL_V3, CASES["mistral v7"].specials, []), "here: message 2 cannot be found by the chat template"),
        (Case("gemma", CASES["gemma"].specials, []), "here: the chat template refuses it: System role not supported"),
        (
            CASES["mistral v7"]._replace(
                template=CASES["mistral v7"].template.replace("' ' + message.content + eos", "eos")
            ),
            "here: the answer 'The red one.' is not in what would be learned",
        ),
        (CASES["llama 3, marked"]._replace(template=MARKS_NOTHING), "here: nothing of it would be learned"),
        (
            CASES["llama 3, marked"]._replace(template=MARKS_ALL, messages=TALK[2:3]),
            "here: everything of it would be learned",
        ),
    ],
)
def test_templates_whose_answers_cannot_be_found_are_refused(made, case, given):
    directory, _ = made(case)
    with pytest.raises(UserError) as caught:
        Template(directory, DATE).encode(case.messages, "here")
    assert caught.value.given.startswith(given)


@pytest.mark.parametrize(
    ("name", "missing"), [("llama 3.1, calls", "Let me look."), ("lfm 2", "depth"), ("gpt-oss", None)]
)
def test_words_beside_a_call_are_written_or_refused(made, name, missing):
    """Llama 3.1 writes the call alone, LFM 2 the words alone, gpt-oss both."""
    directory, tokenizer = made(CASES[name])
    said = [CALLS[0], {**CALLS[1], "content": "Let me look."}, *CALLS[2:]]
    if missing is None:
        found = [one.encoded for one in conversation_samples(Template(directory, DATE), said, "here")]
        learned = "".join(text for one in found for text in spans(tokenizer, one.ids_N, one.is_learned_N))
        assert [learned.count(words) for words in ("Let me look.", "depth", "Four fathoms.")] == [1, 1, 1]
        return
    with pytest.raises(UserError) as caught:
        conversation_samples(Template(directory, DATE), said, "here")
    assert caught.value.given.startswith(f"here: the answer {missing!r} is not in what would be learned")
    assert caught.value.change.startswith("some chat templates write a call or the words beside it")


@pytest.mark.parametrize("words", ["arguments", "zqqz"])
def test_words_beside_a_call_that_are_in_the_call_by_chance_are_missed(made, words):
    directory, _ = made(CASES["llama 3.1, calls"])
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "depth", "arguments": {"of": words}}}
    said = [CALLS[0], {**CALLS[1], "content": words, "tool_calls": [call]}, *CALLS[2:]]
    with pytest.raises(UserError) as caught:
        conversation_samples(Template(directory, DATE), said, "here")
    assert caught.value.given == (
        f"here: the chat template leaves out what an answer says beside its calls, such as {words!r}"
    )


def test_a_second_call_that_the_template_leaves_out_is_missed(made):
    once = PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}")
    directory, _ = made(Case(once, CHATML, []))
    said = [CALLS[0], {**CALLS[1], "content": "", "tool_calls": CALLS[1]["tool_calls"] * 2}, *CALLS[2:]]
    with pytest.raises(UserError, match="the answer 'depth' is not in what would be learned"):
        conversation_samples(Template(directory, DATE), said, "here")
    said[1]["tool_calls"] = said[1]["tool_calls"][:1]
    assert conversation_samples(Template(directory, DATE), said, "here")


def test_a_call_may_be_written_before_the_words_beside_it(made):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }} {% endfor %}{{ m.content }}<|im_end|>{% else %}"
        "{{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    directory, tokenizer = made(Case(template, CHATML, []))
    said = [CALLS[0], {**CALLS[1], "content": "Let me look."}, *CALLS[2:]]
    ids_N, is_learned_N, _ = Template(directory, DATE).encode(said, "here")
    wanted = ['depth{"at": "bow"} Let me look.<|im_end|>', "Four fathoms.<|im_end|>"]
    assert spans(tokenizer, ids_N, is_learned_N) == wanted


@pytest.mark.parametrize("name", CASES)
def test_each_policy_keeps_answers_whole_and_counts(made, name):
    """Of two conversations, one as given and one with a long question."""
    case = CASES[name]
    directory, tokenizer = made(case)
    asked = next(number for number, message in enumerate(case.messages) if message["role"] == "user")
    long = [{**m, "content": m["content"] + " Why?" * 60} if n == asked else m for n, m in enumerate(case.messages)]
    ids = [
        next(encode_rows([json.dumps(messages)], RowSettings(directory, "train", date=DATE, cut_above=0))).ids
        for messages in (case.messages, long)
    ]
    part, length = FinishedPart(np.concatenate(ids), np.array([0, 1])), len(ids[0]) + 40
    eos_id = tokenizer.token_to_id(case.specials.split()[-1])

    def fitted(too_long):
        fitting = Fitting(eos_id, length, "chat", too_long)
        kept = np.concatenate([one.ids for one in fitting.through([part], "train")])
        counts = fitting.num_documents, fitting.num_cut, fitting.num_cut_tokens, fitting.num_dropped
        return counts, spans(tokenizer, kept & ID_BITS, (kept & MASKED) == 0), len(kept)

    num_cut = len(ids[1]) - length
    assert fitted("cut-prompt") == ((2, 1, num_cut, 0), case.learned * 2, len(ids[0]) + length)
    assert fitted("drop") == ((2, 0, 0, 1), case.learned, len(ids[0]))
    with pytest.raises(UserError, match=r"1 of 2 conversations of train are longer than data\.sequence_length="):
        fitted("refuse")


THOUGHT = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("first", "question", "last"),
    [
        (f"{THOUGHT}No.", "Is it green?", f"{THOUGHT}Yes."),
        (f"{THOUGHT}Yes.", "Is it green?", f"{THOUGHT}Yes."),
        (f"{THOUGHT}Yes.", "Is it green?", f"{THOUGHT}Yes. And it is long."),
        ("<think>\nhm\n</think>\n\nYes.", "Why <think>\nhm\n</think>\n\nYes. again?", "<think>\nhm\n</think>\n\nSo."),
    ],
    ids=["other words", "the same words", "the same beginning", "words of the user"],
)
@pytest.mark.parametrize("turns", [1, 4])
def test_an_answer_whose_thought_is_dropped_is_not_found_in_a_later_turn(made, first, question, last, turns):
    """Qwen3 writes a thought in the last answer alone. Words that are written nowhere in their own turn make samples of their
    own."""
    directory, tokenizer = made(Case("qwen3", CASES["qwen 3"].specials, []))
    asked = [message for _ in range(turns) for message in talk("Is it red?", first)]
    found = conversation_samples(Template(directory, DATE), [*asked, *talk(question, last)], "here")
    learned = [spans(tokenizer, one.encoded.ids_N, one.encoded.is_learned_N) for one in found]
    assert learned == [[f"{first}<|im_end|>"]] * turns + [[f"{last}<|im_end|>"]]


def talk(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


SAYINGS = [
    "The red one.",
    "a",
    "final",
    "assistant",
    "user",
    "end",
    "think",
    "message",
    "Pull it in\nslowly.",
    "1",
    "i",
    "an",
]
"""Texts: short words that the marks of turns hold, too."""
GEMMA, STARTED = "<bos> <start_of_turn> <end_of_turn>", "<|startoftext|> <|im_start|> <|im_end|>"
MARKED = {  # templates that mark answers -> their special tokens, and what they mark of the cue
    "cohere_training": (COHERE, ""),
    "cohere2_training": (
        f"<|START_RESPONSE|> <|END_RESPONSE|> {COHERE.replace(' <|END', ' <|END_OF_TURN|> <|END')}",
        "",
    ),
    "gemma3_training": (GEMMA, ""),
    "gptoss_training": (CASES["gpt-oss"].specials, "<|start|>assistant"),
    "lfm2_training": (STARTED, ""),
    "lfm2_v2_training": (STARTED, ""),
    "llama3_training": (HEADERS, ""),
    "muse_glimmer_training": ("<|start|> <|message|> <|eom|> <|eot|>", "<|start|>assistant"),
    "qwen3_training": (CHATML, ""),
    "qwen3_instruct_2507_training": (CHATML, ""),
}


def conversation(draw, has_thoughts):
    turns = [{"role": "system", "content": "Be brief."}] * draw.randint(0, 1)
    for _ in range(draw.randint(1, 6)):
        turns += talk(draw.choice(SAYINGS), draw.choice(SAYINGS))
        turns[-1] |= {"reasoning_content": draw.choice(SAYINGS)} if has_thoughts else {}
    return turns


@pytest.mark.parametrize("has_thoughts", [False, True])
@pytest.mark.parametrize("name", MARKED)
def test_answers_found_by_their_place_are_those_that_transformers_masks(made, name, has_thoughts):
    """The template without its marks, against `return_assistant_tokens_mask` with them."""
    specials, cue = MARKED[name]
    case = Case(name, specials, [])
    directory, tokenizer = made(case)
    marked, draw = AutoTokenizer.from_pretrained(directory), random.Random(name)
    marked.chat_template = on_day(case.text(), DATE)
    bare = re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 if true \2%}{% endif %}", case.text())
    assert bare.count("{% endif %}") > case.text().count("{% endif %}") and "generation %}" not in bare
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": bare}))
    template = Template(directory, DATE)
    for _ in range(12):
        messages = conversation(draw, has_thoughts)
        given = marked.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        masked = spans(tokenizer, np.array(given["input_ids"]), np.array(given["assistant_masks"]))
        found = template.encode(messages, "here")
        assert given["input_ids"][: len(found.ids_N)] == found.ids_N.tolist()
        # what a template marks of the cue and behind the end of a turn is its own, and nothing that a model says
        wanted = [text.removeprefix(cue).rstrip("\n") for text in masked]
        assert spans(tokenizer, found.ids_N, found.is_learned_N) == wanted, messages


@pytest.mark.parametrize("thought", [{}, {"reasoning_content": "a i an"}])
def test_a_short_answer_is_not_found_in_the_marks_before_it(made, thought):
    """gpt-oss writes `<|channel|>final<|message|>` between the cue and the words, and ends the last answer alone otherwise."""
    directory, tokenizer = made(CASES["gpt-oss"])
    said = ["a", "final", "start", "The red one.", "i", "end", "end"]
    asked = [message for one in said for message in talk("a final assistant end?", one)]
    asked[-1] |= thought
    (found,) = conversation_samples(Template(directory, DATE), asked, "here")
    last = "<|channel|>analysis<|message|>a i an<|end|><|start|>assistant" if thought else ""
    wanted = [f"<|channel|>final<|message|>{one}<|end|>" for one in said[:-1]]
    wanted += [f"{last}<|channel|>final<|message|>end<|return|>"]
    assert spans(tokenizer, found.encoded.ids_N, found.encoded.is_learned_N) == wanted
