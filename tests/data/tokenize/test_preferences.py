"""Preference pairs: two answers to one prompt stay together, and each is learned from where they part."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests import tiny
from tests.data.conftest import data_config, refusal
from tests.data.planted import TURN
from tests.data.sources.test_preference_rows import ASKED, BAD, GOOD
from tests.data.tokenize.test_chat_template import (
    COUNTING,
    MARKED,
    MESSAGES,
    PLAIN,
    START,
    THINKING,
    WRITTEN,
    template_of,
)
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.cli.main import app
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.config import SourceConfig
from windlass.data.lint.lint import lint
from windlass.data.lint.statistics import read_sample, survey_set
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.mds import Reader
from windlass.data.sources.preference_rows import pair_of
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.data.tokenize.fitting import Fitting
from windlass.data.tokenize.flags import labelled
from windlass.data.tokenize.preferences import chosen_and_rejected, pack_pairs
from windlass.data.tokenize.resume import FinishedPart
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError
from windlass.training.preflight import make_ready

# ---- ids


def encoded(planted, row):
    """(text, learned text) of chosen and rejected, and the ids with flags."""
    settings = RowSettings(planted.directory / "tokenizer", "train", is_pairs=True)
    ((ids, _, refused),) = encode_rows([pair_of(row, "here")], settings)
    if refused:
        raise UserError(*refused[0][1:])
    found = []
    for row_ids in chosen_and_rejected(ids):
        input_ids, labels = labelled(row_ids[None], row_ids[None])
        counted = labels[0] != NOT_COUNTED
        assert counted[int(counted.argmax()) :].all(), "an answer of texts is learned to its end"
        decode = planted.tokenizer.decode
        found.append(
            [decode(part.tolist(), skip_special_tokens=False) for part in (input_ids[0], input_ids[0][counted])]
        )
    return found, ids


EOS = "<|endoftext|>"


def test_texts_are_learned_behind_their_prompt(planted):
    found, ids = encoded(planted, {"prompt": "rope: ", "chosen": "red", "rejected": "any <|endoftext|>"})
    assert found == [["rope: red" + EOS, "red" + EOS], ["rope: any <|endoftext|>" + EOS, "any <|endoftext|>" + EOS]]
    assert (ids == planted.eos).sum() == 1 and ids[-1] == planted.eos, "a pair is one document"


def test_without_a_prompt_what_both_begin_with_is_not_learned(planted):
    found, _ = encoded(planted, {"chosen": "the anchor holds", "rejected": "the anchor drags"})
    assert found[0][0] == "the anchor holds" + EOS
    assert all(learned != whole and whole.endswith(learned) for whole, learned in found)
    found, _ = encoded(planted, {"chosen": "the anchor", "rejected": "the anchor drags"})
    assert found[0][1] == EOS and found[1][1].endswith("drags" + EOS), "one that only stops earlier learns to stop"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_conversations_only_what_follows_the_prompt_is_learned(planted, template):
    template_of(planted, template)
    other = {"role": "assistant", "content": "Let it go."}
    ((ids, *_),) = encode_rows(
        [pair_of({"chosen": MESSAGES, "rejected": [*MESSAGES[:4], other]}, "")],
        RowSettings(planted.directory / "tokenizer", "train", is_pairs=True),
    )
    for row, words in zip(chosen_and_rejected(ids), ("Pull it in\nslowly.", "Let it go.")):
        input_ids, labels = labelled(row[None], row[None])
        decode = planted.tokenizer.decode
        learned = decode(labels[0][labels[0] != NOT_COUNTED].tolist(), skip_special_tokens=False)
        assert learned == f"{words}<|im_end|>{EOS}", "the first answer belongs to the prompt"
        whole = decode(input_ids[0].tolist(), skip_special_tokens=False)
        assert whole == WRITTEN.replace("Pull it in\nslowly.", words) + EOS


def test_a_template_that_writes_the_prompt_in_two_ways_is_refused(planted):
    counting = THINKING.replace(START, "{% if messages | length > 3 %}long{% endif %}" + START, 1)
    template_of(planted, counting)
    longer = [ASKED, BAD, ASKED, GOOD]
    with pytest.raises(UserError) as caught:
        encoded(planted, {"chosen": [ASKED, GOOD], "rejected": longer})
    assert "cannot be found by the chat template" in caught.value.given or "in two ways" in caught.value.given


def test_answers_of_a_pair_are_behind_what_inference_would_give(planted):
    """The template says how many messages there are: before an answer, one."""
    template_of(planted, COUNTING)
    settings = RowSettings(planted.directory / "tokenizer", "train", is_pairs=True)
    ((ids, _, refused),) = encode_rows([pair_of({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "")], settings)
    texts = [
        planted.tokenizer.decode(labelled(row[None], row[None])[0][0].tolist()) for row in chosen_and_rejected(ids)
    ]
    assert not refused and all(text.startswith("1 messages\n") for text in texts)


def test_special_tokens_in_calls_and_messages_that_are_dropped_are_refused_in_pairs_too(planted):
    template_of(planted, PLAIN.replace("messages %}", "messages if m.role != 'tool' %}", 1))
    call = {"function": {"name": "pull", "arguments": {"rope": TURN}}}
    with pytest.raises(UserError) as caught:
        encoded(planted, {"chosen": [ASKED, {**GOOD, "tool_calls": [call]}], "rejected": [ASKED, BAD]})
    begin = "pair 0 of train ('Which rope?') chosen"
    assert caught.value.given == f"{begin} holds {TURN} in `tool_calls` of the assistant"
    turns = [ASKED, {"role": "tool", "content": "red"}]
    with pytest.raises(UserError) as caught:
        encoded(planted, {"chosen": [*turns, GOOD], "rejected": [*turns, BAD]})
    assert caught.value.given == f"{begin}: the chat template leaves out what the tool says: 'red'"


# ---- samples


def parts_of(lengths, eos=5, per_part=3):
    """Pairs of answers of these lengths (with EOS), as parts."""
    from windlass.data.tokenize.flags import CHOSEN_END

    pairs = []
    for number, (chosen, rejected) in enumerate(lengths):
        ids = np.full(chosen + rejected, 10 + number, np.int32)
        ids[chosen - 1], ids[-1] = eos | CHOSEN_END, eos
        pairs.append(ids)
    for at in range(0, len(pairs), per_part):
        held = pairs[at : at + per_part]
        yield FinishedPart(np.concatenate(held), np.arange(at, at + len(held)))


def test_a_sample_is_a_pair_whatever_way_the_ids_come():
    lengths = [(3, 4), (2, 8), (8, 2), (2, 2), (5, 5)]
    stream = np.concatenate([part.ids for part in parts_of(lengths)])
    for cut in (1, 4, 100):
        pieces = iter(np.split(stream, range(cut, len(stream), cut)))
        input_ids, labels = (np.concatenate(c) for c in zip(*(labelled(*s) for s in pack_pairs(pieces, 5, 8))))
        assert input_ids.shape == labels.shape == (5, 18) and input_ids.dtype == np.int32
        assert input_ids[0].tolist() == [5, 10, 10, 5, 5, 5, 5, 5, 5, 5, 10, 10, 10, 5, 5, 5, 5, 5]
        assert labels[0].tolist() == [-100, 10, 10, 5, *[-100] * 6, 10, 10, 10, 5, *[-100] * 4]
        assert (labels != NOT_COUNTED).sum(1).tolist() == [sum(pair) for pair in lengths]


def test_pairs_that_are_too_long_are_dropped_whole_and_counted():
    lengths = [(3, 4), (2, 9), (9, 2), (2, 2), (8, 8)]
    fitting = Fitting(5, 8, "preference", "drop")
    kept = list(fitting.through(parts_of(lengths), "train"))
    assert np.concatenate([part.sizes for part in kept]).tolist() == [0, 3, 4] and fitting.num_dropped == 2
    assert sum(len(part.ids) for part in kept) == 7 + 4 + 16


@pytest.mark.parametrize(
    ("lengths", "too_long", "change"),
    [
        (
            [(3, 4), (2, 9)],
            None,
            "set data.sequence_length=64, or `too_long: drop` of the source of train, which leaves them out",
        ),
        ([(9, 4), (2, 9)], "drop", "set data.sequence_length=64"),
    ],
)
def test_pairs_that_are_too_long_are_refused_with_the_length_that_holds_all(lengths, too_long, change):
    with pytest.raises(UserError) as caught:
        list(Fitting(5, 8, "preference", too_long).through(parts_of(lengths), "train"))
    dropped = sum(max(pair) > 8 for pair in lengths)
    assert caught.value.given.startswith(
        f"{dropped} of 2 pairs of train are longer than data.sequence_length=8; the longest"
    )
    assert caught.value.change == change


# ---- prepared


def pair_rows(count=40):
    rows = []
    for n in range(count):
        asked = {"role": "user", "content": f"What is the square of {n}?"}
        good, bad = (
            {"role": "assistant", "content": text} for text in (f"It is {n * n}.", f"It is {n * n + 1}, I believe.")
        )
        rows.append(
            {"chosen": [asked, good], "rejected": [asked, bad]}
            if n % 2
            else {"prompt": asked["content"], "chosen": [good], "rejected": [bad]}
        )
    return rows


def prepared_pairs(planted, root, rows=None, source=None, **changes):
    root.mkdir(exist_ok=True)
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or pair_rows()))
    said = []
    config = data_config(
        root,
        sources=[{"path": str(root / "pairs.jsonl"), "format": "preference", **(source or {})}],
        **{"sequence_length": 128, "tokenizer": {"from": str(planted.directory / "tokenizer")}, **changes},
    )
    return prepare(config, {}, log=said.append), said, config


def test_a_preparation_keeps_pairs_together_and_has_no_findings(planted, tmp_path):
    template_of(planted, PLAIN)
    prepared, said, config = prepared_pairs(planted, tmp_path / "rows")
    seen = set()
    for name, info in prepared.sets.items():
        reader = Reader(prepared.shards(name))
        assert reader.num_samples == info.documents == info.samples and info.max_documents == 2, (
            "the first EOS, and one"
        )
        for ids, labels in reader:
            answers = [planted.tokenizer.decode(row[row != NOT_COUNTED].tolist()) for row in labels.reshape(2, 129)]
            number = int(planted.tokenizer.decode(ids[:129].tolist()).split("square of ")[1].split("?")[0])
            assert answers == [f"It is {number**2}.", f"It is {number**2 + 1}, I believe."]
            seen.add(number)
    assert seen == set(range(40)) and prepared.sets["validation"].documents > 0
    assert prepared.baselines == {} and prepared.sets["train"].left_out == 0
    assert any(line == "of a pair only the answers count: there are no bits per byte" for line in said)
    assert not any("conversations" in line for line in said)
    assert lint(prepared).findings == []
    assert prepare(config, {}, log=said.append) and "unchanged: skipped" in said[-1]


def test_a_tokenizer_is_trained_on_the_texts_of_pairs_and_refused_for_conversations(planted, tmp_path):
    answer = "the answer is a number that nobody has seen, "
    rows = [{"prompt": f"ask {n}: ", "chosen": f"{answer}{n}", "rejected": f"{answer}not {n}"} for n in range(40)]
    prepared, _, _ = prepared_pairs(planted, tmp_path / "texts", rows, tokenizer={"train": 300})
    assert prepared.vocab_size == 300 and prepared.sets["train"].documents > 20
    tokenizer, _ = open_tokenizer(prepared.tokenizer_directory)
    assert len(tokenizer.encode(answer).ids) < len(answer) / 3, "merges come from the answers"
    assert not any("chosen" in token or '":' in token for token in tokenizer.get_vocab()), (
        "and not from how a pair is kept"
    )
    ids, labels = next(iter(Reader(prepared.shards("train"))))
    assert tokenizer.decode(labels[:129][labels[:129] != NOT_COUNTED].tolist()).startswith(answer)
    assert tokenizer.decode(ids[:129].tolist()).removeprefix("<|endoftext|>").startswith("ask ")
    with pytest.raises(UserError) as caught:
        prepared_pairs(planted, tmp_path / "talk", tokenizer={"train": 300})
    assert "a pair is of conversations" in caught.value.given and "as plain texts" in caught.value.change


def test_parquet_and_datasets_hold_pairs_too(planted, tmp_path):
    import datasets

    template_of(planted, PLAIN)
    read, _, _ = prepared_pairs(planted, tmp_path / "lines", pair_rows()[1::2])
    rows = datasets.Dataset.from_list(pair_rows()[1::2])
    rows.to_parquet(tmp_path / "pairs.parquet")
    rows.save_to_disk(tmp_path / "saved")
    tokenizer = {"from": str(planted.directory / "tokenizer")}
    for number, source in enumerate(({"path": str(tmp_path / "pairs.parquet")}, {"hub": str(tmp_path / "saved")})):
        root = tmp_path / str(number)
        config = data_config(
            root, sources=[{**source, "format": "preference"}], tokenizer=tokenizer, sequence_length=128
        )
        found = prepare(config, {}, log=lambda line: None)
        for name in read.sets:
            wanted = [(ids.tolist(), labels.tolist()) for ids, labels in Reader(read.shards(name))]
            assert [(ids.tolist(), labels.tolist()) for ids, labels in Reader(found.shards(name))] == wanted


def test_what_is_dropped_is_said_and_kept_in_mind(planted, tmp_path):
    template_of(planted, PLAIN)
    rows = [*pair_rows(), {"prompt": "Why?", "chosen": "word " * 300, "rejected": "No."}]
    prepared, said, _ = prepared_pairs(planted, tmp_path / "rows", rows, {"too_long": "drop"})
    assert sum(info.left_out for info in prepared.sets.values()) == 1
    assert any("1 pairs are left out, which are longer than a sequence" in line for line in said)
    assert sum(info.documents for info in prepared.sets.values()) == 40


def test_a_sample_is_shown_as_two_rows(planted, tmp_path):
    template_of(planted, PLAIN)
    prepared, _, _ = prepared_pairs(planted, tmp_path / "rows")
    chosen, rejected = read_sample(prepared, "train", 0).rows
    assert [segment.kind for segment in chosen] == [segment.kind for segment in rejected]
    assert [segment.kind for segment in chosen][:3] == ["context", "masked", "target"]
    assert chosen[1] == rejected[1] and chosen[2] != rejected[2]
    found = survey_set(prepared, "train", 1000)
    assert found.rows_per_sample == 2 and len(found.lengths) == 2 * prepared.sets["train"].documents
    assert 0 < found.fill < 1 and found.num_pieces == 0
    out = CliRunner().invoke(app, ["data", "inspect", str(prepared.directory), "--no-color"]).stdout
    assert (
        f"  pairs       {found.info.documents}, a sample each: prompt and chosen answer, prompt and rejected one" in out
    )
    assert out.index("chosen:\n") < out.index("rejected:\n") and "of 2 times 128 targets" in out
    done = CliRunner().invoke(app, ["data", "lint", str(prepared.directory)])
    assert done.exit_code == 0 and done.stdout.endswith("nothing found\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing": "best-fit"},
            "packing=best-fit with sources[0].format=preference: each answer of a pair has a sequence of its own, so the setting "
            "has no effect; remove packing",
        ),
        (
            {"isolate": True},
            "isolate=true with sources[0].format=preference: each answer of a pair has a sequence of its own",
        ),
        (
            {"validation": {"path": "x.jsonl"}},
            "sources[0].format=preference with validation.format=text: a sample of pairs differs from a sample of text or chat, "
            "so all sources (validation among them) hold pairs or none does; here 1 of 2 do; set format=preference in all of "
            "them, or in none",
        ),
    ],
)
def test_settings_that_contradict_pairs_are_refused(tmp_path, changes, message):
    source = {"path": "x.jsonl", "format": "preference"}
    with pytest.raises(ValueError, match=re.escape(message)):
        data_config(tmp_path, **{"sources": [source], "tokenizer": {"from": "t"}, **changes})


def test_too_long_is_for_pairs_alone():
    assert (
        "too_long=drop with format=text: it is for chat and preference, and has no effect on this format, whose documents may be "
        "cut; remove too_long"
    ) in refusal(SourceConfig, {"path": "x.jsonl", "too_long": "drop"})


def test_a_run_does_not_train_on_pairs(tmp_path):
    source = {"path": "x.jsonl", "format": "preference"}
    config = tiny.recipe(tmp_path, data={"sources": [source], "tokenizer": {"from": "t"}})
    with pytest.raises(UserError) as caught:
        make_ready(config, 1, "cpu")
    assert caught.value.given == "objective.kind=pretrain with `format: preference` of data.sources[0]"
    assert caught.value.change.startswith("set objective.kind=dpo; or give texts or conversations")
    config = tiny.recipe(tmp_path, evaluate={"sets": {"liked": source}})
    with pytest.raises(UserError) as caught:
        make_ready(config, 1, "cpu")
    assert caught.value.given.endswith("of evaluate.sets.liked")
