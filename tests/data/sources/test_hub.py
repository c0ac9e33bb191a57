"""Datasets by name, from a hub on this machine, and local ones: pinned, sliced, and refused in words."""

import io
import json

import datasets
import pytest

from tests.data.conftest import data_config, make_text
from tests.loopback import hub  # noqa: F401
from windlass.data.config import SourceConfig
from windlass.data.prepare.prepare import open_prepared, prepare
from windlass.data.sources.fetch import fetch
from windlass.data.sources.hub import commit_of
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import Source
from windlass.errors import UserError

TEXTS = [f"row {number}" if number % 4 else "" for number in range(30)]


@pytest.fixture(params=["saved", "files"])
def local(request, tmp_path):
    made = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS, "id": range(30)})})
    if request.param == "saved":
        made.save_to_disk(str(tmp_path / "saved"))
    else:
        (tmp_path / "files").mkdir()
        made["train"].to_parquet(str(tmp_path / "files" / "train-00000-of-00001.parquet"))
    return tmp_path / request.param


def read(directory, known=None, **settings):
    config = SourceConfig(**settings)
    return list(Source(fetch(config, scan(config, print, known), directory, lambda line: None)).documents())


def test_a_local_dataset_is_read_by_rows_and_limits(local, tmp_path):
    texts = [text for text in TEXTS if text]
    assert read(tmp_path / "1", hub=str(local)) == texts
    assert read(tmp_path / "2", hub=str(local), rows="3:11") == [text for text in TEXTS[3:11] if text]
    assert read(tmp_path / "3", hub=str(local), documents=4) == texts[:4]


def test_a_local_dataset_is_known_by_its_bytes(local):
    config = SourceConfig(hub=str(local))
    (before,), (again,) = scan(config, print), scan(config, print)
    victim = next(path for path in local.rglob("*") if path.suffix in (".arrow", ".parquet"))
    victim.write_bytes(victim.read_bytes() + b"\0")
    (after,) = scan(config, print)
    assert before == again and before.xxh3 != after.xxh3 and commit_of(before) is None


def test_data_named_like_a_cache_is_data(tmp_path):
    (tmp_path / "rows").mkdir()
    for text in ("one", "other"):
        (tmp_path / "rows" / "cache-train.jsonl").write_text(json.dumps({"text": text}) + "\n")
        assert read(tmp_path / text, hub=str(tmp_path / "rows")) == [text]
    (first,) = scan(SourceConfig(hub=str(tmp_path / "rows")), print)
    (tmp_path / "rows" / "cache-train.jsonl").write_text('{"text": "third"}\n')
    assert scan(SourceConfig(hub=str(tmp_path / "rows")), print)[0].xxh3 != first.xxh3


def test_one_saved_split_has_no_other_name(tmp_path):
    whole = datasets.Dataset.from_dict({"text": TEXTS})
    whole.save_to_disk(str(tmp_path / "saved"))
    texts = [text for text in TEXTS if text]
    assert read(tmp_path / "1", hub=str(tmp_path / "saved")) == texts
    assert read(tmp_path / "2", hub=str(tmp_path / "saved"), split="train") == texts
    error = refused(tmp_path / "3", hub=str(tmp_path / "saved"), split="validation")
    assert error.given.endswith("has no split `validation`") and "one of: train" in error.change
    part = datasets.Dataset.from_dict({"text": TEXTS}, split="validation")
    part.save_to_disk(str(tmp_path / "part"))
    assert read(tmp_path / "4", hub=str(tmp_path / "part"), split="validation") == texts
    assert refused(tmp_path / "5", hub=str(tmp_path / "part"), split="train").change.endswith("one of: validation")


def refused(directory, **settings):
    with pytest.raises(UserError) as caught:
        read(directory, **settings)
    return caught.value


def test_splits_and_columns_that_are_not_there_are_named(local, tmp_path):
    error = refused(tmp_path / "1", hub=str(local), split="trian")
    assert error.given == f"{local} has no split `trian`" and "did you mean `train`? set `split`" in error.change
    error = refused(tmp_path / "2", hub=str(local), text="txt")
    assert error.given == f"{local}, split train, row 0, has no column `txt`" and "columns: text, id" in error.change
    error = refused(tmp_path / "3", hub=str(local), text="id")
    assert error.given == f"{local}, split train, row 0, has int under `id`"
    error = refused(tmp_path / "4", hub=str(local), subset="other")
    assert "other" in error.given and error.change


def test_what_is_neither_a_name_nor_a_directory_is_refused():
    with pytest.raises(UserError, match="neither a directory here nor a name"):
        scan(SourceConfig(hub="no-such-directory"), print)


def test_a_split_that_is_not_there_is_cut_from_the_training_documents_and_reported(local, tmp_path):
    texts = [make_text(50, number) for number in range(200)]
    made = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts})})
    made.save_to_disk(str(tmp_path / "own"))
    source, lines = {"hub": str(tmp_path / "own")}, []
    config = data_config(tmp_path, sources=[source], validation={**source, "split": "validation"})
    prepared = prepare(config, {}, log=lines.append)
    logged = f"{tmp_path}/own has no split `validation`: 0.02 of the training documents are held out for validation, "
    assert logged + "by the hash of their text" in lines
    assert prepared.sets["train"].documents + prepared.sets["validation"].documents == 200
    assert open_prepared(config, {}) == prepared and prepare(config, {}, log=lines.append) == prepared


# ---- by name


def parquet(texts):
    stream = io.BytesIO()
    datasets.Dataset.from_dict({"text": texts}).to_parquet(stream)
    return stream.getvalue()


@pytest.fixture
def served(hub, monkeypatch, tmp_path):  # noqa: F811
    """A hub with one dataset of two shards and two splits, and the library `datasets` asking it."""
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("datasets.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    files = {
        "README.md": "a data set",
        "data/train-00000-of-00002.parquet": parquet(TEXTS[:18]),
        "data/train-00001-of-00002.parquet": parquet(TEXTS[18:]),
        "data/test-00000-of-00001.parquet": parquet(["held out"]),
    }
    hub.add("datasets/org/stories", files)
    yield hub
    from huggingface_hub import HfFileSystem

    HfFileSystem.clear_instance_cache()


def test_a_name_is_streamed_and_pinned_to_its_commit(served, tmp_path):
    commit = served.repositories["datasets/org/stories"].revisions["main"]
    config = SourceConfig(hub="org/stories")
    (file,) = scan(config, print)
    assert commit_of(file) == commit and file.name == "org/stories//train"
    served.add("datasets/org/stories", {"data/train-00000-of-00001.parquet": parquet(["moved on"])})
    assert list(Source(fetch(config, [file], tmp_path / "1", print)).documents()) == [text for text in TEXTS if text]
    assert read(tmp_path / "2", hub="org/stories") == ["moved on"]
    assert read(tmp_path / "3", hub="org/stories", revision=commit, rows="15:22") == [t for t in TEXTS[15:22] if t]
    assert read(tmp_path / "4", known=commit, hub="org/stories", split="test") == ["held out"]


def test_a_preparation_keeps_its_commit_until_the_recipe_says_otherwise(served, tmp_path):
    texts = [make_text(60, number) for number in range(60)]
    first = served.add("datasets/org/own", {"train.jsonl": "".join(json.dumps({"text": t}) + "\n" for t in texts)})
    config = data_config(tmp_path, sources=[{"hub": "org/own"}])
    prepared = prepare(config, {}, log=lambda line: None)
    assert prepared.commits == {"org/own@main": first}
    served.add("datasets/org/own", {"train.jsonl": '{"text": "another"}\n'})
    served.down = True  # nothing is asked of it
    lines = []
    assert prepare(config, {}, log=lines.append) == prepared
    assert lines[0] == f"org/own: main was {first[:12]} when it was prepared: kept" and "skipped" in lines[1]


def test_what_the_hub_does_not_give_is_named(served, tmp_path):
    served.add("datasets/org/gated", {"train.jsonl": '{"text": "x"}\n'}, gated=True)
    error = refused(tmp_path / "1", hub="org/none")
    assert "the hub has no repository datasets/org/none" in error.given and "/datasets/org/none" in error.change
    error = refused(tmp_path / "2", hub="org/gated")
    assert "org/gated" in error.given and "gated" in error.given
    error = refused(tmp_path / "3", hub="org/stories", revision="v9")
    assert error.given == "datasets/org/stories has no revision v9"
    served.down = True
    error = refused(tmp_path / "4", hub="org/stories")
    assert "503" in error.given and "datasets/org/stories" in error.given
