"""Documents whose middle is moved behind the end: nothing is lost, shares and cuts are drawn evenly, ids are the parts' own."""

import json
from collections import Counter

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.data.conftest import make_text, refusal
from windlass.data.sources.config import FillInMiddleConfig
from windlass.data.tokenize import pool as room
from windlass.data.tokenize.fill_in_middle import MARKS, Middles, middles_of
from windlass.data.tokenize.tokenizer import open_tokenizer, save_trained, train_tokenizer
from windlass.errors import UserError

TEXTS = [make_text(60, seed) for seed in range(400)]
PREFIX, SUFFIX, MIDDLE = 9001, 9002, 9003
ALWAYS = Middles(1.0, 0.5, PREFIX, SUFFIX, MIDDLE)


def read(parts):
    """The document again, and its form: by the marks alone, as a reader of ids would."""
    if len(parts) == 1:
        assert parts[0][1] is None
        return parts[0][0], "as it is"
    assert [behind for _, behind in parts] == [PREFIX, SUFFIX, MIDDLE, None] and parts[0][0] == ""
    (_, _), (between, _), (suffix, _), (last, _) = parts
    return (between, suffix, last), "marked"


def test_parts_are_the_document_in_both_orders():
    orders = Counter()
    for text in TEXTS:
        for chosen, order in (
            (ALWAYS._replace(suffix_first=0.0), "prefix"),
            (ALWAYS._replace(suffix_first=1.0), "suffix"),
        ):
            (between, suffix, last), form = read(chosen.parts(text))
            assert form == "marked" and (between == "" or order == "prefix")
            assert between + last + suffix == text, "prefix first: P, S, M; suffix first: nothing, S, P with M"
        orders[read(ALWAYS.parts(text))[0][0] == ""] += 1
    assert 150 < orders[True] < 250


def test_the_share_and_the_cuts_are_drawn_evenly_and_from_the_text_alone():
    half = ALWAYS._replace(share=0.5, suffix_first=0.0)
    found = [half.parts(text) for text in TEXTS]
    assert found == [half.parts(text) for text in TEXTS]
    assert 160 < sum(len(parts) == 1 for parts in found) < 240
    shares = np.array(
        [
            [len(parts[1][0]), len(parts[3][0]), len(parts[2][0])]
            for parts in map(ALWAYS._replace(suffix_first=0.0).parts, TEXTS)
        ]
    )
    assert np.abs((shares / shares.sum(1, keepdims=True)).mean(0) - 1 / 3).max() < 0.05, (
        "two cuts at random: a third each"
    )
    short = [ALWAYS._replace(suffix_first=0.0).parts(f"{number:03}") for number in range(200)]
    empty = [sum(not parts[at][0] for parts in short) for at in (1, 2, 3)]
    assert min(empty) > 50, "a cut may be at either end, and both at one place"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tokenizer trained on the texts, with Qwen's marks added, which are not special there."""
    path = tmp_path_factory.mktemp("middle") / "tokenizer"
    save_trained(train_tokenizer(TEXTS[:20], 400), path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS[0]])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_ids_are_those_of_the_parts_with_a_mark_before_each(directory, monkeypatch):
    monkeypatch.setattr(room, "PIECE_CHARS", 200)  # long parts are cut, as long documents are
    monkeypatch.setattr(room, "BATCH_CHARS", 500)
    tokenizer, eos_id = open_tokenizer(directory)
    config = FillInMiddleConfig(share=0.5)
    middles = middles_of(config, [directory / "tokenizer.json"])
    assert middles.ids == [tokenizer.token_to_id(mark) for mark in MARKS[0]]
    expected = []
    for text in TEXTS[:50]:
        for part, behind in middles.parts(text):
            pieces = [piece for piece, _ in room.document_pieces(part)]
            ids = [number for piece in pieces for number in tokenizer.encode(piece).ids]
            expected += [*ids, eos_id if behind is None else behind]
    found = np.concatenate(list(room.encode(TEXTS[:50], 1, directory, 1, middles=middles)))
    assert found.tolist() == expected
    counts = Counter(found.tolist())
    assert counts[middles.prefix_id] == counts[middles.suffix_id] == counts[middles.middle_id] > 10
    fast = np.concatenate(list(room.encode(TEXTS[:50], 1, directory, 1, is_fast=True, middles=middles)))
    assert fast.tolist() == expected


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_mark_that_a_document_holds_is_text(directory, is_fast):
    """Qwen's marks are not special, so that its tokenizer takes them from any text."""
    text = "code " + MARKS[0][0] + " and " + MARKS[0][2] + " in a string"
    tokenizer, eos_id = open_tokenizer(directory)
    middles = middles_of(FillInMiddleConfig(), [directory / "tokenizer.json"])
    assert middles.prefix_id in tokenizer.encode(text).ids
    for share in (1e-9, 1.0):
        (batch,) = room.piece_batches([text, "plain"], None, middles._replace(share=share))
        found = room.Encoder(directory, is_fast, middles)(batch)
        counts = Counter(found.tolist())
        assert counts[eos_id] == 2 and [counts[mark] for mark in middles.ids] == [2 * (share == 1.0)] * 3
        texts = [number for number in found.tolist() if number not in (*middles.ids, eos_id)]
        assert sorted(tokenizer.decode(texts, skip_special_tokens=False)) == sorted(text + "plain")


def refused(config, files, eos_id=None):
    with pytest.raises(UserError) as caught:
        middles_of(config, files, eos_id)
    return caught.value


def test_a_tokenizer_that_cannot_is_refused(tmp_path, directory):
    config = FillInMiddleConfig()
    assert middles_of(None, []) is None
    assert "is trained here or has no tokenizer.json" in refused(config, []).given
    save_trained(train_tokenizer(TEXTS[:20], 300), tmp_path / "plain")
    assert refused(config, [tmp_path / "plain" / "tokenizer.json"]).given.endswith("without marks that are known")
    own = FillInMiddleConfig(marks=["<|fim_prefix|>", "<|fim_suffix|>", "<mid>"])
    error = refused(own, [directory / "tokenizer.json"])
    assert error.given.endswith("a tokenizer without '<mid>'") and "fill_in_middle.marks" in error.change
    ends = FillInMiddleConfig(marks=["<|fim_prefix|>", "<|fim_suffix|>", "<|endoftext|>"])
    eos_id = open_tokenizer(directory)[1]
    assert refused(ends, [directory / "tokenizer.json"], eos_id).given.endswith("without '<|endoftext|>'")
    letters = FillInMiddleConfig(marks=["a", "b", "c"])
    assert refused(letters, [directory / "tokenizer.json"]).given.endswith("without 'a', 'b', 'c'")
    spaced = Tokenizer(models.BPE({"▁": 0, "b": 1, "▁b": 2}, [("▁", "b")]))
    spaced.add_tokens([AddedToken(mark, special=True) for mark in MARKS[1]])
    spaced.normalizer, spaced.decoder = normalizers.Prepend("▁"), decoders.Metaspace()
    spaced.save(str(tmp_path / "tokenizer.json"))
    assert "a space before every text" in refused(config, [tmp_path / "tokenizer.json"]).given


def test_marks_are_three():
    for marks in (["<a>", "<b>"], ["<a>", "<b>", "<a>"]):
        rule = "marks are three different tokens: those before prefix, suffix and middle"
        assert f"marks={marks}: {rule}; give three as marks, or remove marks" in refusal(
            FillInMiddleConfig, {"marks": marks}
        )
    assert json.loads(FillInMiddleConfig().model_dump_json()) == {"share": 0.5, "suffix_first": 0.5, "marks": None}
