"""Documents that share an n-gram with texts that must not be learned: found word by word, removed, counted, fingerprinted."""

import json
import pickle

import pytest

from tests.data.conftest import data_config, refusal
from tests.data.prepare.test_prepare import content, documents_of, quietly
from windlass.data.curate import decontaminate as room
from windlass.data.curate.config import DecontaminateConfig
from windlass.data.curate.decontaminate import Listed, hashed, ngram_hashes
from windlass.data.prepare import chunked_sets
from windlass.data.tokenize import pool
from windlass.errors import UserError

QUESTION = "Which of the four capstans did the crew of the brig turn first that morning?"
OTHER = "How many fathoms of the heavier cable were left below after the second anchor was lost?"


class Given(tuple):
    """Texts as a function; equal where they are."""

    def __call__(self):
        return iter(self)


def by_hand(text, listed, n):
    """Whether the two share n words in a row, by comparing the words themselves."""

    def runs(words):
        return {tuple(words[at : at + n]) for at in range(len(words) - n + 1)}

    plain = "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
    return any(runs(plain) & runs("".join(c if c.isalnum() else " " for c in one.lower()).split()) for one in listed)


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        f"before {QUESTION.upper()} behind",
        "Which, of the four... capstans_did the crew of the brig turn (first) THAT",
        "of the four capstans did the crew of the brig turn first that morning",
        "of the four capstans did the crew of the brig turn first that",  # 12 words
        "which of the four capstans did the crew of the brig turned first that morning",
        "",
        "Ωmega " * 13,
    ],
)
def test_thirteen_words_in_a_row_are_found_whatever_is_between_them(text):
    listed = Listed(Given([OTHER, QUESTION]), 13)
    assert listed.is_shared(text) == by_hand(text, [OTHER, QUESTION], 13)


def test_both_answers_occur_above_and_no_words_of_two_texts_are_joined():
    listed = Listed(Given(["a b c", "d e f"]), 3)
    assert [listed.is_shared(text) for text in ("x a b c", "a b d", "c d e", "D-E_F!")] == [True, False, False, True]
    assert len(list(ngram_hashes("a b c d", 3))) == 2 and list(ngram_hashes("a b", 3)) == []
    assert list(ngram_hashes("ab c d", 3)) != list(ngram_hashes("a bc d", 3))


def test_a_process_reads_the_texts_once_whatever_is_unpickled(monkeypatch):
    calls = []
    monkeypatch.setattr(room, "ngram_hashes", lambda text, n: calls.append(text) or iter(()))
    listed = Listed(Given(["only here"]), 7)
    for _ in range(3):
        hashed(pickle.loads(pickle.dumps(listed)))
    assert calls == ["only here"]


def test_short_texts_are_counted_and_none_that_is_long_enough_is_refused():
    Listed(Given([QUESTION, "Too short", OTHER]), 13).check("a.txt", (lines := []).append)
    num = len(QUESTION.split()) - 12 + len(OTHER.split()) - 12
    assert lines == [
        f"decontaminate: a.txt is compared with {num} n-grams of 13 words of 3 texts; shorter, and not looked for: 1"
    ]
    with pytest.raises(UserError) as caught:
        Listed(Given([QUESTION, "Too short"]), 99).check("a.txt", print)
    assert caught.value.given == "`filters.decontaminate` of a.txt: none of 2 texts has 99 words"
    assert caught.value.change.startswith("give a smaller `n`, or, as `text`, the key")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": ""}, 'path="": `path` names the texts, and is empty; give a file, a directory or a glob as path'),
        ({"path": []}, "path=[]: `path` names the texts, and is empty"),
        (
            {"path": ["a", "s3://b/c"]},
            "path=s3://b/c: every worker reads these texts on this host, and this is a URL; copy them here, and name "
            "them as path",
        ),
        ({"path": "a", "n": 1}, "greater than or equal to 2"),
    ],
)
def test_a_mistake_in_the_recipe_is_refused(given, message):
    assert message in refusal(DecontaminateConfig, given)


CLEAN = [f"Document {number} about rope, canvas and tar, and {number + 1} ways to store them." for number in range(30)]
LEAKED = [f"Quiz {number}: {text} Answer: {number}." for number, text in enumerate([QUESTION, OTHER, QUESTION.lower()])]


@pytest.fixture
def place(tmp_path):
    """Documents of which three repeat a question; the questions, in rows of another key."""
    mixed = [*CLEAN[:10], LEAKED[0], *CLEAN[10:20], *LEAKED[1:], *CLEAN[20:]]
    for name, texts in {"mixed": mixed, "clean": CLEAN}.items():
        (tmp_path / name).mkdir()
        for part in range(3):
            rows = "".join(json.dumps({"text": text}) + "\n" for text in texts[part * 11 : part * 11 + 11])
            (tmp_path / name / f"{part}.jsonl").write_text(rows)
    rows = [{"question": QUESTION}, {"question": OTHER}]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_of(root, name, source="mixed", **changes):
    texts = {"path": str(root / "quiz.jsonl"), "text": "question", **changes}
    given = {
        "path": str(root / source / "*.jsonl"),
        **({"filters": {"decontaminate": texts}} if source == "mixed" else {}),
    }
    return data_config(root, sources=[given], directory=str(root / name))


def test_what_repeats_a_listed_text_is_left_out_by_one_process_and_by_workers(place, monkeypatch):
    found = quietly(config_of(place, "one"), lines=(lines := []))
    assert found.filtered == {"sources.0": {"decontaminate": 3}}
    assert sorted(documents_of(found, "train") + documents_of(found, "validation")) == sorted(CLEAN)
    assert any(line.startswith("decontaminate: ") and line.endswith(" of 13 words of 2 texts") for line in lines)
    assert any(line.startswith("corpus ") and " 3 files, " in line for line in lines), "the quiz is no source"
    clean = quietly(config_of(place, "clean-data", "clean"))
    monkeypatch.setattr(chunked_sets, "chunks_of", lambda files: ([file] for file in files))
    monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
    monkeypatch.setattr(pool, "BYTES_PER_WORKER", 1000)
    several = quietly(config_of(place, "several"))
    assert several.filtered == found.filtered
    for name in ("train", "validation", "tokenizer"):
        assert content(several.directory / name) == content(found.directory / name) == content(clean.directory / name)


def test_the_listed_texts_are_part_of_the_fingerprint(place):
    config = config_of(place, "data")
    first = quietly(config)
    quietly(config, lines=(lines := []))
    assert "unchanged: skipped" in lines[-1]
    with open(place / "quiz.jsonl", "a") as file:
        file.write(json.dumps({"question": CLEAN[3]}) + "\n")
    second = quietly(config)
    assert second.fingerprint != first.fingerprint and second.stream != first.stream
    assert second.corpus_hash == first.corpus_hash and second.filtered == {"sources.0": {"decontaminate": 4}}


def test_a_listed_text_that_cannot_be_read_and_a_directory_that_holds_it_are_refused(place):
    with pytest.raises(UserError, match=r"has no key `query`"):
        quietly(config_of(place, "data", text="query"))
    with pytest.raises(UserError, match=r"`path: .*none.jsonl` matches no file"):
        quietly(config_of(place, "data", path=str(place / "none.jsonl")))
    (place / "quiz").mkdir()
    (place / "quiz.jsonl").rename(place / "quiz" / "a.jsonl")
    with pytest.raises(UserError, match=r"data.directory .*quiz/data is inside the source"):
        quietly(config_of(place, "quiz/data", path=str(place / "quiz")))
