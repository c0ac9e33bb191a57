"""Conversations that are longer than a sequence: refused, dropped whole, or cut in what is asked, and in no answer."""

import json

import numpy as np
import pytest

from tests.data.conftest import data_config, refusal
from tests.data.tokenize.test_chat_template import (
    EOS,
    INSTRUCT,
    MESSAGES,
    PLAIN,
    START,
    TURN,
    prepared_chat,
    template_of,
)
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.config import SourceConfig
from windlass.data.prepare.fingerprint import settings_of
from windlass.data.shards.mds import Reader
from windlass.data.sources.chat_rows import conversation_of
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.data.tokenize.fitting import Fitting, cut_prompts
from windlass.data.tokenize.flags import ID_BITS, MASKED, UNWRITTEN, WORDS, count_unwritten
from windlass.data.tokenize.resume import FinishedPart
from windlass.errors import UserError

LONG = "".join(f"{number} " for number in range(100, 160))
ASKED = [MESSAGES[0], {"role": "user", "content": f"Which rope? {LONG}?"}, *MESSAGES[2:]]


def meeting(number, words=300):
    """As a meeting and its summary: a long prompt, one answer."""
    prompt = f"Summarise meeting {number}. " + "The anchor holds. " * words + "What was decided?"
    return {"prompt": prompt, "completion": f"Meeting {number} was about the anchor."}


# ---- ids


@pytest.mark.parametrize(("template", "messages"), [(PLAIN, ASKED), (INSTRUCT, ASKED[1:])])
def test_the_middle_of_the_longest_question_is_cut_and_nothing_else(planted, template, messages):
    tokenizer = template_of(planted, template) and planted.tokenizer
    texts = [conversation_of({"messages": messages}, "here")]
    ((whole, *_),) = encode_rows(texts, RowSettings(planted.directory / "tokenizer", "train", cut_above=0))
    ((unmarked, *_),) = encode_rows(texts, RowSettings(planted.directory / "tokenizer", "train"))
    assert (whole & ~WORDS).tolist() == unmarked.tolist()

    def decode(ids):
        return tokenizer.decode((ids & ID_BITS).tolist(), skip_special_tokens=False)

    is_words = (whole & WORDS) != 0
    runs = np.split(np.arange(len(whole)), np.flatnonzero(np.diff(is_words)) + 1)
    words = [run for run in runs if is_words[run[0]]]
    asked = [message["content"] for message in messages if message["role"] != "assistant"]
    assert [decode(whole[run]).strip() for run in words] == [text.strip() for text in asked]

    cut = cut_prompts(whole, len(whole) - 40)
    longest = max(words, key=len)
    kept = len(longest) - 40
    gone = range(longest[0] + (kept + 1) // 2, longest[-1] + 1 - kept // 2)
    assert cut.tolist() == [one for at, one in enumerate(whole.tolist()) if at not in gone] and len(gone) == 40
    assert decode(cut[(cut & MASKED) == 0]) == decode(whole[(whole & MASKED) == 0])
    assert "Which rope?" in decode(cut) and cut[-1] == planted.eos and (cut == planted.eos).sum() == 1


def test_words_that_are_also_a_mark_of_the_turn_are_not_taken_for_it(planted):
    template_of(planted, PLAIN)
    rows = {"messages": [{"role": "user", "content": "user"}, MESSAGES[2]]}
    ((ids, *_),) = encode_rows(
        [conversation_of(rows, "")], RowSettings(planted.directory / "tokenizer", "train", cut_above=0)
    )
    (at,) = np.split(np.flatnonzero(ids & WORDS), np.flatnonzero(np.diff(np.flatnonzero(ids & WORDS)) > 1) + 1)
    before = planted.tokenizer.decode((ids[: at[0]] & ID_BITS).tolist(), skip_special_tokens=False)
    assert before == f"{START}user\n"


def document(*spans, eos=5):
    """Ids 10, 11, ...: spans of (length, flags), and EOS."""
    flags = np.concatenate([np.full(length, flag) for length, flag in spans])
    return np.append((10 + np.arange(len(flags))) | flags, eos).astype(np.int32)


ASK = MASKED | WORDS


def test_short_messages_stay_whole_and_long_ones_are_cut_to_one_length():
    ids = document((2, MASKED), (20, ASK), (1, MASKED), (60, ASK), (1, MASKED), (40, ASK), (3, 0))
    assert len(ids) == 128 and cut_prompts(ids, 128).tolist() == ids.tolist()
    cut = cut_prompts(ids, 8 + 20 + 2 * 31 + 1) & ID_BITS  # one id is left over
    kept = [*range(10, 33), *range(33, 49), *range(78, 93), 93, *range(94, 110), *range(119, 134), *range(134, 137)]
    assert cut.tolist() == [*kept, 5]


def test_flags_of_answers_stay_on_the_first_ids():
    ids = document((100, ASK), (3, 0))
    ids[60] |= UNWRITTEN["name"]
    cut = cut_prompts(ids, 80)
    assert len(cut) == 80 and count_unwritten(cut)["name"] == 1 and cut[60] & UNWRITTEN["name"]


@pytest.mark.parametrize(("room", "fits"), [(16, True), (15, False)])
def test_a_question_is_not_cut_away(room, fits):
    ids = document((2, MASKED), (100, ASK), (30, 0))
    assert (cut_prompts(ids, 33 + room) is not None) == fits
    assert cut_prompts(document((2, MASKED), (50, 0)), 20) is None


# ---- which are kept


def parts():
    """Lengths 33, 104, 104 and 54; the last one is an answer alone."""
    documents = [document((2, ASK), (30, 0)), *[document((100, ASK), (3, 0))] * 2, document((1, MASKED), (52, 0))]
    yield FinishedPart(np.concatenate(documents[:2]), np.array([0, 1]))
    yield FinishedPart(np.concatenate(documents[2:]), np.array([2, 3]))


@pytest.mark.parametrize(
    ("too_long", "sizes", "lengths", "report"),
    [
        ("drop", [0], 33, ["3 conversations are left out, which are longer than a sequence (too_long: drop); "
          "the first is number 1"]),
        (
            "cut-prompt",
            [0, 1, 2],
            33 + 2 * 40,
            [
                "2 of 4 conversations are cut to a sequence: 128 tokens of what is asked are left out, and of no answer "
                "(too_long: cut-prompt)",
                "1 conversations are left out, which are longer than a sequence with prompts cut to 16 tokens "
                "(too_long: cut-prompt); the first is number 3",
            ],
        ),
    ],
)  # fmt: skip
def test_what_is_cut_and_what_is_left_out_is_counted(too_long, sizes, lengths, report):
    fitting = Fitting(5, 40, "chat", too_long)
    kept = list(fitting.through(parts(), "train"))
    assert np.concatenate([part.sizes for part in kept]).tolist() == sizes
    assert sum(len(part.ids) for part in kept) == lengths and list(fitting.report()) == report


@pytest.mark.parametrize(
    ("too_long", "length", "given", "change"),
    [
        (
            None,
            40,
            "3 of 4 conversations of train are longer than data.sequence_length=40; the longest has 104 tokens with its EOS",
            "set data.sequence_length=128, or `too_long: cut-prompt` of the source of train, which shortens what is asked, or "
            "`too_long: drop` of the source of train, which leaves them out",
        ),
        ("drop", 30, "4 of 4 conversations of train are longer than data.sequence_length=30; the longest has 104 tokens",
         "set data.sequence_length=128, or `too_long: cut-prompt` of the source of train, which shortens what is asked"),
        ("cut-prompt", 19, "4 of 4 conversations of train are longer than data.sequence_length=19 with prompts cut to 16 tokens",
         "set data.sequence_length=64"),
    ],
)  # fmt: skip
def test_where_none_fits_or_nothing_is_said_it_is_an_error(too_long, length, given, change):
    fitting = Fitting(5, length, "chat", too_long)
    with pytest.raises(UserError) as caught:
        list(fitting.through(parts(), "train"))
    assert caught.value.given.startswith(given) and caught.value.change == change


# ---- prepared


def test_every_sample_of_long_meetings_counts_whole_answers(planted, tmp_path):
    template_of(planted, PLAIN)
    rows = [meeting(number) for number in range(30)] + [meeting(number, 1) for number in range(30, 40)]
    source = {"too_long": "cut-prompt"}
    prepared, said = prepared_chat(planted, tmp_path / "rows", rows, source, sequence_length=256)
    seen = []
    for name in prepared.sets:
        for ids, labels in Reader(prepared.shards(name)):
            learned = planted.tokenizer.decode(labels[labels != NOT_COUNTED].tolist(), skip_special_tokens=False)
            answers = learned.split(TURN + EOS)
            assert len(answers) > 1 and answers[-1] == "", "no sample without a target, each answer to its end"
            seen += answers[:-1]
            text = planted.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            assert all(f"{START}user\nSummarise meeting {answer.split()[1]}. " in text for answer in answers[:-1])
            assert text.count(f"What was decided?{TURN}\n{START}assistant\n") == len(answers) - 1
    assert sorted(seen) == sorted(row["completion"] for row in rows)
    assert sum(info.cut for info in prepared.sets.values()) == 30
    assert not any(info.left_out for info in prepared.sets.values())
    info = prepared.sets["train"]
    targets = sum(int((labels[1:] != NOT_COUNTED).sum()) for _, labels in Reader(prepared.shards("train")))
    counted = f"{info.documents} documents, {info.tokens} tokens, {targets} of them targets"
    assert f"train: source 0: {counted}, {info.tokens / 256:.1f} samples full" in said
    assert sum("whatever data.packing is" in line for line in said) == 1, "once, not for each set"


def test_a_long_conversation_is_refused_also_before_a_limit_in_tokens(planted, tmp_path):
    template_of(planted, PLAIN)
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps(meeting(number, 1)) + "\n" for number in range(3)))
    rows = [meeting(number, 300 if number % 2 else 1) for number in range(3, 13)]
    for more in ({}, {"tokens": 100}):
        with pytest.raises(
            UserError, match=r"5 of 10 conversations of train are longer than data\.sequence_length=256"
        ):
            prepared_chat(
                planted,
                tmp_path / "rows",
                rows,
                more,
                sequence_length=256,
                validation={"path": str(short), "format": "chat"},
            )


# ---- settings


def test_too_long_is_part_of_what_a_preparation_is_known_by(tmp_path):
    def of(**more):
        return settings_of(
            data_config(tmp_path, sources=[{"path": "chat.jsonl", "format": "chat", **more}], tokenizer={"from": "t"}),
            {},
        )

    assert of() == of(too_long="refuse") != of(too_long="drop") != of(too_long="cut-prompt") != of()


def test_a_pair_has_no_prompt_to_cut():
    assert (
        "too_long=cut-prompt with format=preference: cut-prompt is for chat; nothing of a pair is cut; set too_long=drop, or "
        "remove too_long"
    ) in refusal(SourceConfig, {"path": "x.jsonl", "format": "preference", "too_long": "cut-prompt"})
