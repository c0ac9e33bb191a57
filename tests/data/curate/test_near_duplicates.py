"""Near-duplicates: which documents are left out, for which, whoever sketches them, and what a preparation keeps of it."""

import json
import random
import subprocess
import sys

import pytest

from tests.data.conftest import data_config, make_text
from tests.data.prepare.test_prepare import content, documents_of, quietly
from tests.data.tokenize.test_chat_template import PLAIN, template_of
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.commands.data_inspect import describe_set
from windlass.data.curate import near_duplicates as room
from windlass.data.curate.config import NearDuplicatesConfig
from windlass.data.curate.near_duplicates import near_duplicates, num_bands, shingles_of
from windlass.data.lint.statistics import survey_set
from windlass.data.prepare.manifest import load_prepared
from windlass.data.tokenize import pool
from windlass.errors import UserError

CONFIG = NearDuplicatesConfig(similarity=0.7)


def text_of(seed, num_words=120):
    draw = random.Random(seed)
    return " ".join(f"word{draw.randrange(5000)}" for _ in range(num_words))


def edited(text, *places):
    words = text.split()
    for at in places:
        words[at] = f"edited{at}"
    return " ".join(words)


def jaccard(one, two, n=5):
    a, b = set(shingles_of(one, n)), set(shingles_of(two, n))
    return len(a & b) / len(a | b)


def found(texts, config=CONFIG):
    return near_duplicates(texts, config, lambda tasks: (task({}) for task in tasks))


def left_out(texts, config=CONFIG):
    return [number for number, flag in enumerate(found(texts, config)[0]) if flag]


def test_ngrams_are_words_in_lower_case_and_a_short_text_is_one():
    assert shingles_of("One, two -- THREE\nfour", 3) == ["one two three", "two three four"]
    assert shingles_of("One, two", 3) == ["one two"] and shingles_of("* * *", 3) == ["* * *"]


def test_characters_of_scripts_without_spaces_are_words():
    assert shingles_of("我爱 Python。ไทย", 3) == ["我 爱 python", "爱 python ไ", "python ไ ท", "ไ ท ย"]
    assert shingles_of("안녕 세상 हिन्दी", 2)[0] == "안녕 세상", "Hangul has spaces"
    draw = random.Random(0)
    text = "".join(chr(draw.randrange(0x4E00, 0x9FFF)) for _ in range(300))
    assert left_out([text, text[:200] + "改" + text[201:], text[::-1]]) == [1]


@pytest.mark.parametrize(
    ("similarity", "num_perm", "rows"), [(0.8, 128, 4), (0.9, 128, 8), (1.0, 128, 16), (0.5, 128, 2), (0.1, 64, 1)]
)
def test_bands_find_nearly_all_pairs_at_the_limit_and_no_wider_ones_would(similarity, num_perm, rows):
    assert num_bands(similarity, num_perm) == num_perm // rows

    def recall(rows):
        return 1 - (1 - similarity**rows) ** (num_perm // rows)

    assert recall(rows) >= room.RECALL and (rows == 16 or recall(2 * rows) < room.RECALL)


def test_the_first_of_a_kind_is_kept_and_the_others_name_it():
    a, b = text_of(1), text_of(2)
    texts = [a, b, edited(a, 60), text_of(3), edited(b, 3, 90), a.upper().replace(" ", ", ")]
    flags, pairs = found(texts)
    assert flags == [False, False, True, False, True, True]
    assert [(pair.kept, pair.left_out) for pair in pairs] == [(0, 2), (1, 4), (0, 5)]
    for pair in pairs:
        assert (pair.kept_text, pair.left_out_text) == (texts[pair.kept][:200], texts[pair.left_out][:200])
        assert pair.similarity == pytest.approx(jaccard(texts[pair.kept], texts[pair.left_out]), abs=0.1)  # 2.5 sigma
    assert pairs[2].similarity == 1


def test_no_document_is_left_out_for_one_that_is_left_out_itself():
    """b resembles a, and c resembles b but not a."""
    a = text_of(1)
    b, c = edited(a, 20), edited(a, 20, 50, 80)
    limit = NearDuplicatesConfig(similarity=0.86)
    assert jaccard(a, b) > 0.9 and jaccard(b, c) > 0.83 > 0.78 > jaccard(a, c)
    assert left_out([a, b, c], limit) == [1] and left_out([b, a], limit) == [1]


def test_of_several_that_it_resembles_a_document_names_the_first():
    a = text_of(1)
    b, c = edited(a, 20), edited(a, 20, 80)
    for kept in ([a, c], [c, a]):
        flags, pairs = found([*kept, b], NearDuplicatesConfig(similarity=0.88))
        assert flags == [False, False, True] and [(pair.kept, pair.kept_text) for pair in pairs] == [(0, kept[0][:200])]


def test_a_share_of_pairs_at_every_similarity_is_found_as_it_should_be():
    """500 pairs each: nearly all above the limit by four standard errors, nearly none below."""
    for num_edits, is_copy in ((1, True), (12, False)):
        texts = [
            one for seed in range(500) for one in (text_of(seed), edited(text_of(seed), *range(5, 120, 9)[:num_edits]))
        ]
        flags = found(texts, NearDuplicatesConfig(similarity=0.7))[0]
        assert not any(flags[::2])
        assert sum(flags[1::2]) >= 495 if is_copy else sum(flags[1::2]) <= 5


def test_short_texts_and_those_without_words_are_copies_where_they_are_equal():
    assert left_out(["one", "two", "One!", "* * *", "* * * *", "* * *"]) == [2, 5]


def test_few_pairs_are_kept_and_only_of_the_first_documents(monkeypatch):
    texts = [text_of(seed) for seed in range(9)] * 2
    flags, pairs = found(texts)
    assert flags == [False] * 9 + [True] * 9 and [pair.kept for pair in pairs] == list(range(room.MOST_PAIRS))
    monkeypatch.setattr(room, "MOST_EXCERPTS", 2)
    assert [pair.kept for pair in found(texts)[1]] == [0, 1] and found(texts)[0] == flags


ORIGINALS = [f"{make_text(60, number)} {text_of(number, 60)}" for number in range(50)]
MIXED = [*ORIGINALS[:30], *(edited(ORIGINALS[number], 7) for number in range(0, 30, 3)), *ORIGINALS[30:], ORIGINALS[40]]


def config_of(root, name="data", similarity=0.8, **changes):
    for number in range(2):
        texts = MIXED[:35] if number == 0 else MIXED[35:]
        (root / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = [{"path": str(root / f"{number}.jsonl")} for number in range(2)]
    settings = {"sources": sources, "directory": str(root / name), "deduplicate": {"similarity": similarity}}
    return data_config(root, **settings | changes)


def test_what_is_left_out_is_counted_printed_shown_and_part_of_the_fingerprint(tmp_path, monkeypatch):
    prepared = quietly(config_of(tmp_path), lines=(lines := []))
    assert sorted(documents_of(prepared, "train") + documents_of(prepared, "validation")) == sorted(ORIGINALS)
    assert "deduplicate: 11 documents are left out, which have a similarity of 0.8 or more with an earlier one" in lines
    assert prepared == load_prepared(prepared.directory) and prepared.duplicates == {"sources.0": 5, "sources.1": 6}
    assert [(pair["kept"], pair["left_out"]) for pair in prepared.near_pairs] == [(3 * n, 30 + n) for n in range(5)]
    for name in ("train", "validation"):
        shown = list(describe_set(prepared, survey_set(prepared, name, 99)))
        assert (
            "  duplicates  5 of sources.0 are left out" in shown
            and "  duplicates  6 of sources.1 are left out" in shown
        )
        near = f"({prepared.near_pairs[1]['similarity']:.2f}): {MIXED[31][:60]!r}"
        assert f"  near copy   document 31 resembles 3 {near}" in shown
    quietly(config_of(tmp_path), lines=(again := []))
    assert "unchanged: skipped" in again[-1]
    monkeypatch.setattr(room, "version", lambda name: f"9.9 of {name}")
    other = quietly(config_of(tmp_path))
    assert other.fingerprint != prepared.fingerprint and other.stream != prepared.stream
    assert quietly(config_of(tmp_path, similarity=0.81)).fingerprint != other.fingerprint


@pytest.mark.parametrize(
    "changes",
    [{"validation": "none"}, {"validation": {"bytes": 900}}, {"order": {"first_epoch": "written", "held_out_of": 9}}],
)
def test_counts_are_the_same_however_a_set_is_read(tmp_path, changes):
    prepared = quietly(config_of(tmp_path, **changes))
    assert prepared.duplicates == {"sources.0": 5, "sources.1": 6} and len(prepared.near_pairs) == room.MOST_PAIRS
    assert sum(info.documents for info in prepared.sets.values()) in (50, 51)  # one is cut where bytes are held out


def test_workers_and_batches_of_any_size_leave_out_the_same(tmp_path, monkeypatch):
    """Workers are interpreters with other seeds of hash()."""
    one = quietly(config_of(tmp_path, "one"))
    monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
    monkeypatch.setattr(pool, "BYTES_PER_WORKER", 1000)
    monkeypatch.setattr(room, "BATCH_CHARS", 2000)
    several = quietly(config_of(tmp_path, "several", workers=2))
    assert several.near_pairs == one.near_pairs and content(several.directory) == content(one.directory)


def test_of_conversations_the_words_are_compared_and_not_their_form(planted, tmp_path):
    template_of(planted, PLAIN)
    says = [("Haul?", "Yes."), ("Heave?", "No."), ("haul", "yes"), ("Haul?", "Yes. Now.")]
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": role, "content": text} for role, text in zip(roles, pair)]} for pair in says]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "chat.jsonl"), "format": "chat"}
    tokenizer = {"from": str(planted.directory / "tokenizer")}
    near = {"deduplicate": {"similarity": 0.8}, "validation": "none"}
    prepared = quietly(data_config(tmp_path, sources=[source], tokenizer=tokenizer, sequence_length=64, **near))
    assert prepared.duplicates == {"sources.0": 1} and prepared.sets["train"].documents == 3
    assert (prepared.near_pairs[0]["kept_text"], prepared.near_pairs[0]["left_out_text"]) == (
        "Haul?\nYes.",
        "haul\nyes",
    )


def test_where_the_package_is_missing_the_extra_is_named_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UserError) as caught:
        quietly(config_of(tmp_path))
    assert caught.value.given == "`data.deduplicate` with `similarity`, and rensa is not installed"
    assert caught.value.change == "pip install 'windlass-lm[curate]'"
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["0.jsonl", "1.jsonl"]
    assert quietly(config_of(tmp_path, deduplicate=True)).duplicates == {"sources.0": 0, "sources.1": 1}


def test_nobody_loads_it_who_does_not_ask_for_it():
    code = "import sys, windlass.data.prepare.prepare; print('rensa' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
