"""What a preparation holds, for a page: per source as it was written, left out as prepared.json counts it."""

import json
from dataclasses import replace

import pytest

from tests.data.conftest import data_config, make_text
from tests.data.prepare.test_prepare import quietly
from windlass.data.config import SourceConfig
from windlass.data.lint import overview as room
from windlass.data.lint.lint import LintResult
from windlass.data.lint.overview import LeftOut, overview
from windlass.data.tokenize.tokenizer import open_tokenizer

NOTHING = LintResult([], [])
TEXTS = [
    [f"{name} {number} {make_text(30, seed + number)}" for number in range(20)] for name, seed in (("a", 0), ("b", 50))
]


def config_of(root, **changes):
    rows = [[*TEXTS[0][:9], "short", *TEXTS[0][9:], TEXTS[0][3]], TEXTS[1]]
    for number, texts in enumerate(rows):
        (root / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with open(root / "0.jsonl", "a") as file:
        file.write("no JSON\n")
    first = {"path": str(root / "0.jsonl"), "bad_rows": {"at_most": 1}, "filters": {"min_words": 3}}
    sources = [{**first, "weight": 3, "name": "first"}, {"path": str(root / "1.jsonl"), "weight": 1}]
    return data_config(root, **{"sources": sources, "deduplicate": True, "validation": 0.3, **changes})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("overview")
    config = config_of(root)
    return config, quietly(config, {"more": SourceConfig(path=str(root / "1.jsonl"))})


def test_each_set_has_the_documents_and_tokens_of_each_source(made):
    config, prepared = made
    found = overview(prepared, NOTHING, config.mixture, config.labels)
    tokenizer, _ = open_tokenizer(prepared.tokenizer_directory)
    train, validation, more = found.sets
    assert more.by_source == [] and [one.survey.name for one in found.sets] == ["train", "validation", "more"]
    for number, (label, texts) in enumerate(zip(["first", config.labels[1]], TEXTS)):
        held = [one.by_source[number] for one in (train, validation)]
        assert [one.label for one in held] == [label, label]
        assert sum(one.documents for one in held) == len(texts)
        assert sum(one.tokens for one in held) == sum(len(tokenizer.encode(text).ids) + 1 for text in texts)
    for one in (train, validation):
        info = prepared.sets[one.survey.name]
        assert sum(source.documents for source in one.by_source) == info.documents
        assert sum(source.tokens for source in one.by_source) == info.tokens


def test_what_is_left_out_is_named_by_source_as_the_manifest_counts_it(made):
    config, prepared = made
    found = overview(prepared, NOTHING, config.mixture, config.labels).left_out
    assert found == [LeftOut("first", {"not JSON": 1}, {"min_words": 1}, 1), LeftOut(config.labels[1], {}, {}, 0)]


def test_shares_are_those_of_the_recipe_and_unknown_without_one(made):
    config, prepared = made
    assert overview(prepared, NOTHING, config.mixture, config.labels).mixture == [
        (0, [("first", 0.75), (config.labels[1], 0.25)])
    ]
    found = overview(prepared, NOTHING, [], [])
    assert found.mixture == []
    assert [one.label for one in found.sets[0].by_source] == [source.path for source in config.sources]


def test_sources_one_behind_the_other_are_counted_too_and_one_alone_is_not_listed(tmp_path):
    config = config_of(tmp_path, validation="none", directory=str(tmp_path / "two"))
    plain = [source.model_dump(exclude={"weight"}, by_alias=True) for source in config.sources]
    found = overview(quietly(config_of(tmp_path, sources=plain, validation="none")), NOTHING, [], [])
    assert [one.documents for one in found.sets[0].by_source] == [20, 20]
    single = quietly(config_of(tmp_path, sources=plain[1:], directory=str(tmp_path / "one")))
    assert overview(single, NOTHING, [], []).sets[0].by_source == [] and single.sets["train"].by_source != []


def test_a_preparation_of_before_has_no_amounts_by_source(made):
    _, prepared = made
    before = replace(prepared, sets={name: replace(info, by_source=[]) for name, info in prepared.sets.items()})
    assert [one.by_source for one in overview(before, NOTHING, [], []).sets] == [[], [], []]


def test_the_first_the_last_and_a_middle_sample_are_shown_and_long_ones_cut(made, monkeypatch):
    _, prepared = made
    last = prepared.sets["train"].samples - 1
    shown = overview(prepared, NOTHING, [], []).sets[0].samples
    assert [one.title for one in shown] == ["sample 0", f"sample {last // 2}", f"sample {last}"]
    assert not any(one.is_cut for one in shown)
    text = "".join(part.text for part in shown[0].segments)
    monkeypatch.setattr(room, "SHOWN_CHARS", 20)
    short = overview(prepared, NOTHING, [], []).sets[0].samples[0]
    assert short.is_cut and "".join(part.text for part in short.segments) == text[:20]
