"""What is asked of a source that comes as it is read: no more than can be known of it then."""

import json
from pathlib import Path

import pytest

from tests.data.conftest import data_config, make_text
from tests.data.prepare.test_build import Killed, killed_at
from tests.data.prepare.test_prepare import content, quietly
from tests.data.sources.test_hub import served  # noqa: F401
from tests.loopback import hub  # noqa: F401
from windlass.errors import UserError

TEXTS = [make_text(40, number) if number % 9 else "" for number in range(80)]


@pytest.fixture
def dataset(tmp_path):
    """A local dataset with two splits, and a tokenizer."""
    import datasets

    splits = {"train": TEXTS, "test": ["held out", *TEXTS[:3]]}
    made = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()})
    made.save_to_disk(str(tmp_path / "stories"))
    (tmp_path / "src").mkdir()
    for number, text in enumerate(TEXTS[1:5]):
        Path(tmp_path, "src", f"{number}.txt").write_text(text)
    quietly(data_config(tmp_path, sources=[{"path": str(tmp_path / "src")}], validation=0.5))
    return str(tmp_path / "stories")


def settings(tmp_path, dataset, **changes):
    own = {
        "sources": [{"hub": dataset}],
        "tokenizer": {"from": str(tmp_path / "data" / "tokenizer")},
        "validation": {"hub": dataset, "split": "test"},
        "order": {"first_epoch": "written"},
        "directory": str(tmp_path / "grown"),
    }
    return data_config(tmp_path, **{**own, **changes})


@pytest.mark.parametrize(
    "limit",
    [
        {},
        {"tokens": 900},
        *(pytest.param(limit, marks=pytest.mark.long) for limit in ({"documents": 30}, {"rows": "7:60"})),
    ],
)
def test_a_dataset_that_is_streamed_gives_the_shards_of_one_that_is_fetched(dataset, tmp_path, limit):
    sources = [{"hub": dataset, **limit}]
    lines = []
    grown = quietly(settings(tmp_path, dataset, sources=sources), lines=lines)
    whole = quietly(settings(tmp_path, dataset, sources=sources, order={}, directory=str(tmp_path / "whole")))
    for name in ("train", "validation"):
        assert content(grown.directory / name) == content(whole.directory / name)
    assert (
        grown.stream == whole.stream and grown.sets == whole.sets and grown.baselines.items() <= whole.baselines.items()
    )


def test_documents_are_not_fetched_before_they_are_encoded(dataset, tmp_path, monkeypatch):
    """What the rows of the dataset have reached when the first shard is reported."""
    from windlass.data.shards import journal
    from windlass.data.sources import fetch

    order, hub_advance, put = [], fetch.Stream.advance, journal.JournaledWriter.put

    def advance(self):
        text = hub_advance(self)
        if self._config.split is None:  # not the validation set, which comes first
            order.append("row" if text is not None else "end")
        return text

    monkeypatch.setattr(fetch.Stream, "advance", advance)
    monkeypatch.setattr(journal.JournaledWriter, "put", lambda *given: (order.append("shard"), put(*given)))
    monkeypatch.setattr("windlass.data.tokenize.resume.PART_TOKENS", 100)
    monkeypatch.setattr("windlass.data.tokenize.pool.BATCH_CHARS", 100)
    quietly(settings(tmp_path, dataset, shard_bytes=4 << 10))
    assert order[: order.index("end")].count("shard") > 3
    assert order.count("row") == len(TEXTS)


def test_no_more_is_read_than_a_limit_in_tokens_asks_for(dataset, tmp_path, monkeypatch):
    """Baselines, too, look at nothing behind it: a dataset of the hub may have no end that one would wait for."""
    from windlass.data.sources import fetch

    advance, rows = fetch.Stream.advance, []
    monkeypatch.setattr(fetch.Stream, "advance", lambda self: rows.append(self._config.split) or advance(self))
    monkeypatch.setattr("windlass.data.tokenize.pool.BATCH_CHARS", 100)
    monkeypatch.setattr("windlass.data.tokenize.resume.PART_TOKENS", 100)
    found = quietly(settings(tmp_path, dataset, sources=[{"hub": dataset, "tokens": 900}]))
    assert found.baselines and 900 <= found.sets["train"].tokens < 1200
    assert rows.count(None) < len(TEXTS) / 2


@pytest.mark.parametrize(
    ("changes", "given", "change"),
    [
        ({"validation": 0.1}, "data.validation: 0.1, a share of all documents", "set data.order.held_out_of"),
        ({"tokenizer": {"train": 300}}, "data.tokenizer.train: 300, on all training text", "data.tokenizer.from"),
        ({"deduplicate": {"similarity": 0.8}}, "data.deduplicate, which compares all documents first", "leave it out"),
        ({"deduplicate": True}, "data.deduplicate, which compares all documents first", "leave it out"),
    ],
)
def test_what_needs_all_documents_first_is_refused(dataset, tmp_path, changes, given, change):
    with pytest.raises(UserError) as caught:
        quietly(settings(tmp_path, dataset, **changes))
    assert caught.value.given == given and change in caught.value.change
    assert caught.value.rule == f"data.order.first_epoch: written, and {dataset} comes as it is read"
    assert not (tmp_path / "grown").exists()


def test_a_share_of_the_first_documents_is_said_aloud(dataset, tmp_path):
    lines = []
    order = {"first_epoch": "written", "held_out_of": 40}
    found = quietly(settings(tmp_path, dataset, validation=0.3, order=order), lines=lines)
    assert any(
        line.startswith("0.3 of the first 40 documents of each source are held out for validation") for line in lines
    )
    texts = [text for text in TEXTS if text]
    assert found.sets["train"].documents + found.sets["validation"].documents == len(texts)
    assert 0 < found.sets["validation"].documents < 25


@pytest.mark.long
def test_a_dataset_of_the_hub_is_streamed_and_keeps_its_commit_over_a_kill(served, tmp_path, monkeypatch):  # noqa: F811
    """The branch moves between the two attempts; a preparation of the first commit, fetched whole, is the measure."""
    texts = [make_text(60, number) for number in range(60)]
    first = served.add("datasets/org/own", {"train.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in texts)})
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "some.txt").write_text(" ".join(texts[:20]))
    (tmp_path / "src" / "more.txt").write_text(" ".join(texts[20:40]))
    trained = quietly(data_config(tmp_path, sources=[{"path": str(tmp_path / "src")}], validation=0.5))
    order = {"first_epoch": "written", "held_out_of": 20}
    own = {
        "tokenizer": {"from": str(trained.tokenizer_directory)},
        "order": order,
        "directory": str(tmp_path / "grown"),
    }
    monkeypatch.setattr("windlass.data.sources.fetch.CHUNK_BYTES", 3000)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        killed_at(patched, 2)
        quietly(data_config(tmp_path, **own, sources=[{"hub": "org/own"}]))
    served.add("datasets/org/own", {"train.jsonl": '{"text": "another"}\n'})
    lines = []
    grown = quietly(data_config(tmp_path, **own, sources=[{"hub": "org/own"}]), lines=lines)
    assert grown.commits == {"org/own@main": first} and "2 shards of the training set exist" in "\n".join(lines)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    plain = {**own, "directory": str(tmp_path / "plain")}
    whole = quietly(data_config(tmp_path, **plain, sources=[{"path": str(tmp_path / "texts.jsonl")}]))
    for name in ("train", "validation"):
        assert content(grown.directory / name) == content(whole.directory / name)
