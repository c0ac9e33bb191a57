"""Filters: what each removes, at its limit and beside it; what a preparation keeps, counts, prints and writes of them."""

import json

import fsspec
import pytest

from tests.data.conftest import data_config, make_text
from tests.data.prepare.test_prepare import content, documents_of, quietly
from tests.data.tokenize.test_chat_template import PLAIN, chat_rows, template_of
from tests.data.tokenize.test_chat_template import planted as planted  # a fixture
from windlass.commands.data_inspect import describe_set
from windlass.data.curate.config import FiltersConfig
from windlass.data.curate.filters import FILTERS, Filters
from windlass.data.lint.statistics import survey_set
from windlass.data.prepare import chunked_sets
from windlass.data.prepare.manifest import load_prepared
from windlass.data.sources.select import Selection
from windlass.data.tokenize import pool
from windlass.errors import UserError

LONG = "A line of more than thirty characters."
BESIDE = {  # filter: (value, a text that is kept at the limit, one that is removed beside it)
    "min_chars": (3, "éé🪝", "éé"),
    "max_chars": (3, "éé🪝", "éé🪝 "),
    "min_words": (3, "one two\nthree", "one two"),
    "min_alpha": (0.5, "a b 1 2", "a b 1 2 3"),
    "max_symbol_share": (0.5, "# one ... two", "# one ... two … #"),
    "max_line_repetition": (0.5, "a\nb\n\n a\nb", "a\nb\na\nb\na"),
    "min_punctuated_lines": (0.5, "One.\nTwo\n\n“Three”\nFour", "One.\nTwo\nThree"),
    "max_short_lines": (0.5, f"{LONG}\n\n{'x' * 30}", f"{LONG}\n{'x' * 30}\nx"),
}
EMPTY = {"min_chars": True, "min_words": True, "min_alpha": True, "min_punctuated_lines": True}


def test_every_filter_is_in_the_table_in_the_order_of_the_recipe():
    assert list(FILTERS) == list(FiltersConfig.model_fields)


@pytest.mark.parametrize("name", BESIDE)
def test_a_filter_keeps_what_is_at_its_limit_and_removes_what_is_beside_it(name):
    value, kept, removed = BESIDE[name]
    assert (FILTERS[name](kept, value), FILTERS[name](removed, value)) == (False, True)
    assert FILTERS[name](" \n", {"min_chars": 3}.get(name, value)) == EMPTY.get(name, False), "a text without words"


def test_a_document_counts_for_the_first_filter_and_once_in_all_passes():
    found = Filters(FiltersConfig(min_words=2, min_chars=3), "a")
    texts = ["a", "abc", "abc d", "b", "ab cd"]
    first = found.kept(texts)
    assert next(first) == "abc d" and list(found.kept(texts)) == ["abc d", "ab cd"] == ["abc d", *first]
    assert found.counts == {"min_chars": 2, "min_words": 1} and found.num_documents == 5
    part = found.fresh()
    assert part.counts == {"min_chars": 0, "min_words": 0} and part.num_documents == 0
    part.count([found.removed, found.removed])
    assert part.counts == {"min_chars": 4, "min_words": 2} and part.num_documents == 10


GOOD = [f"document {number} {make_text(20, number)}" for number in range(60)]
SHORT, LOUD = [f"no {number}" for number in range(7)], [f"{number} " + "# word " * 20 for number in range(4)]
SETTINGS = {"min_chars": 12, "max_symbol_share": 0.3}
COUNTS = {"min_chars": 7, "max_symbol_share": 4}
MIXED = [*GOOD[:20], *SHORT, *GOOD[20:50], *LOUD, *GOOD[50:]]


def config_of(root, texts=MIXED, name="data", settings=SETTINGS, source=(), **changes):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if not (root / "a.jsonl").exists() or (root / "a.jsonl").read_text() != lines:
        (root / "a.jsonl").write_text(lines)
    given = {"path": str(root / "a.jsonl"), **({"filters": settings} if settings else {}), **dict(source)}
    return data_config(root, **{"sources": [given], "directory": str(root / name), **changes})


def test_what_is_removed_is_counted_printed_shown_and_part_of_the_fingerprint(tmp_path):
    prepared = quietly(config_of(tmp_path), lines=(lines := []))
    assert sorted(documents_of(prepared, "train") + documents_of(prepared, "validation")) == sorted(GOOD)
    assert prepared.filtered == load_prepared(prepared.directory).filtered == {"sources.0": COUNTS}
    words = "min_chars 7, max_symbol_share 4"
    assert f"11 of 71 documents of {tmp_path}/a.jsonl are removed by its filters: {words}" in lines
    for name in ("train", "validation"):
        shown = "  filters     11 of sources.0 are left out: 7 min_chars, 4 max_symbol_share"
        assert shown in list(describe_set(prepared, survey_set(prepared, name, 99)))
    assert prepared.settings["sources"][0]["filters"] == SETTINGS, (
        "filters that are not asked for are in no fingerprint"
    )
    quietly(config_of(tmp_path), lines=(again := []))
    assert "unchanged: skipped" in again[-1]
    other = quietly(config_of(tmp_path, settings=SETTINGS | {"min_chars": 13}))
    assert other.fingerprint != prepared.fingerprint and other.stream != prepared.stream


def test_what_is_left_are_the_shards_of_the_kept_documents_alone(tmp_path):
    found = quietly(config_of(tmp_path))
    alone = quietly(config_of(tmp_path, GOOD, "alone", settings=None))
    for name in ("train", "validation", "tokenizer"):
        assert content(found.directory / name) == content(alone.directory / name)
    assert alone.filtered == {} and "filters" not in alone.settings["sources"][0]


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ({}, {"deduplicate": True}),
        ({"documents": 71}, {}),
        ({"rows": ":71"}, {"validation": {"bytes": 500}}),
        ({"tokens": 10**6}, {"validation": "none"}),
        ({}, {"order": {"first_epoch": "written", "held_out_of": 71}}),
    ],
)
def test_counts_are_the_same_whoever_reads(tmp_path, source, changes):
    """The parent reads where a limit counts documents, and reads more than once."""
    prepared = quietly(config_of(tmp_path, source=source, **changes))
    assert prepared.filtered == {"sources.0": COUNTS} and sum(info.documents for info in prepared.sets.values()) >= 60


def test_chunks_count_what_one_reading_counts_in_this_process_and_in_workers(tmp_path, monkeypatch):
    one = quietly(config_of(tmp_path, name="one"))
    folder = tmp_path / "split"
    folder.mkdir()
    for number in range(4):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in MIXED[20 * number : 20 * number + 20])
        (folder / f"{number}.jsonl").write_text(rows)
    monkeypatch.setattr(chunked_sets, "chunks_of", lambda files: ([file] for file in files))
    for name in ("here", "workers"):
        if name == "workers":
            monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
            monkeypatch.setattr(pool, "BYTES_PER_WORKER", 1000)
        several = quietly(config_of(tmp_path, name=name, source={"path": str(folder / "*.jsonl")}))
        assert several.filtered == one.filtered == {"sources.0": COUNTS} and several.sets == one.sets
        assert content(several.directory / "train") == content(one.directory / "train")


def test_limits_in_documents_count_before_filters(tmp_path):
    prepared = quietly(config_of(tmp_path, source={"documents": 25}, validation="none"))
    assert prepared.filtered == {"sources.0": {"min_chars": 5, "max_symbol_share": 0}}
    assert documents_of(prepared, "train") == GOOD[:20]


def growing(root, planted, settings=SETTINGS, **changes):
    """A directory that is filled while it is read: nothing reads it to its end before it is encoded."""
    (root / "incoming").mkdir(exist_ok=True)
    for number, text in enumerate(MIXED):
        (root / "incoming" / f"{number:03}.txt").write_text(text)
    (root / "incoming" / "_SUCCESS").touch()
    source = {"path": str(root / "incoming"), "grows_until": "_SUCCESS", "filters": settings}
    tokenizer = {"from": str(planted.directory / "tokenizer")}
    order = {"order": {"first_epoch": "written", "held_out_of": 20}}
    return data_config(root, sources=[source], tokenizer=tokenizer, **{**order, **changes})


def test_a_source_that_grows_is_counted_to_its_end(planted, tmp_path):
    prepared = quietly(growing(tmp_path, planted), lines=(lines := []))
    assert prepared.filtered == {"sources.0": COUNTS}
    assert sum(info.documents for info in prepared.sets.values()) == len(GOOD)
    assert [line for line in lines if "removed by its filters" in line] == [
        f"11 of 71 documents of {tmp_path}/incoming are removed by its filters: min_chars 7, max_symbol_share 4"
    ]


def test_a_source_that_grows_and_has_nothing_left_is_refused_at_its_end(planted, tmp_path):
    changes = {"validation": "none", "order": {"first_epoch": "written"}}
    config = growing(tmp_path, planted, {"min_words": 1000}, **changes)
    with pytest.raises(
        UserError, match=r"71 of 71 documents of .*incoming are removed by its filters \(min_words 71\)"
    ):
        quietly(config)


def test_a_limit_in_tokens_that_filters_leave_out_of_reach_is_refused(planted, tmp_path):
    """Of a source that is not on this host eight bytes are fetched for each token, before filters."""
    system = fsspec.filesystem("memory")
    texts = [GOOD[0], *(f"# {number} " * 300 for number in range(9)), *GOOD]
    system.pipe("/curate/a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    source = {"path": "memory://curate/a.jsonl", "tokens": 500, "filters": {"max_symbol_share": 0.1}}
    tokenizer = {"from": str(planted.directory / "tokenizer")}
    with pytest.raises(UserError) as caught:
        quietly(data_config(tmp_path, sources=[source], tokenizer=tokenizer, validation="none"))
    assert caught.value.rule.endswith("and this text has more, or its filters remove too much")
    system.rm("/curate", recursive=True)


@pytest.mark.parametrize("changes", [{}, {"deduplicate": True}])
def test_filters_that_remove_everything_are_refused_before_anything_is_encoded(tmp_path, monkeypatch, changes):
    monkeypatch.setattr("windlass.data.prepare.build.set_tokenizer", None)
    with pytest.raises(UserError) as caught:
        quietly(config_of(tmp_path, settings={"min_chars": 12, "min_words": 1000}, **changes))
    everything = f"71 of 71 documents of {tmp_path}/a.jsonl are removed by its filters (min_chars 7, min_words 64)"
    assert caught.value.given == everything and caught.value.change.startswith("loosen the filter that removes most")
    assert not (tmp_path / "data").exists()


def test_a_validation_set_and_a_further_one_have_filters_of_their_own(tmp_path):
    config = config_of(tmp_path, settings=None, validation={"path": str(tmp_path / "a.jsonl"), "filters": SETTINGS})
    prepared = quietly(config, {"more": config.sources[0].model_copy(update={"filters": FiltersConfig(min_chars=12)})})
    assert prepared.filtered == {"validation": COUNTS, "sets.more": {"min_chars": 7}}
    documents = {name: info.documents for name, info in prepared.sets.items()}
    assert documents == {"train": 71, "validation": 60, "more": 64}
    shown = {
        name: [line for line in describe_set(prepared, survey_set(prepared, name, 9)) if "  filters " in line]
        for name in documents
    }
    assert (
        shown["train"] == [] and "7 of sets.more" in shown["more"][0] and "11 of validation" in shown["validation"][0]
    )


def test_of_a_conversation_the_words_of_all_messages_are_looked_at(planted, tmp_path):
    template_of(planted, PLAIN)
    rows = [row for row in chat_rows() if "messages" in row]
    said = ["\n".join(message["content"] for message in row["messages"]) for row in rows]
    most = sorted(map(len, said))[len(said) // 2]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "chat.jsonl"), "format": "chat", "filters": {"max_chars": most}}
    tokenizer = {"from": str(planted.directory / "tokenizer")}
    prepared = quietly(
        data_config(tmp_path, sources=[source], tokenizer=tokenizer, sequence_length=256, validation="none")
    )
    num_removed = sum(len(text) > most for text in said)
    assert 0 < num_removed == prepared.filtered["sources.0"]["max_chars"]
    assert prepared.sets["train"].documents == len(rows) - num_removed


def test_a_selection_of_another_part_sees_the_same_documents(tmp_path):
    """The filters hang on the source, so whatever reads its documents reads the kept ones."""
    from windlass.data.sources.scan import scan
    from windlass.data.sources.source_files import source_of_files

    given = config_of(tmp_path).sources[0]
    source = source_of_files(given, scan(given, print))._replace(filters=Filters(given.filters, given.label))
    assert list(Selection([source], 0, 1 << 64).texts()) == GOOD == list(source.documents())
