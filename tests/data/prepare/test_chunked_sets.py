"""Read in chunks, by whichever process: the shards, the counts and the bad rows of one reading from front to back."""

import pytest

from tests.data.conftest import data_config
from tests.data.prepare.conftest import BAD
from tests.data.prepare.test_prepare import content, quietly
from windlass.data.prepare import shards_of_workers
from windlass.data.prepare.fingerprint import settings_of
from windlass.data.sources import formats, source_files
from windlass.data.sources.bad_rows import TooManyBadRows
from windlass.data.tokenize import pool, resume


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize("validation", [0.2, {"bytes": 4000}, "none"])
def test_many_chunks_give_what_one_reading_gives(tmp_path, sources, small_chunks, packing, validation):
    found = []
    for name in ("whole", "chunks"):
        if name == "chunks":
            small_chunks()
        settings = {"packing": packing, "validation": validation, "directory": str(tmp_path / name)}
        lines = []
        prepared = quietly(data_config(tmp_path, sources=sources, **settings), lines=lines)
        validated = content(prepared.directory / "validation") if validation != "none" else None
        logged = [line for line in lines if "bad row" in line or "rows of" in line]
        report = (tmp_path / "report").read_text()
        found.append(
            (content(prepared.directory / "train"), validated, prepared.sets, prepared.bad_rows, logged, report)
        )
    assert found[0] == found[1] and len(found[0][4]) == len(BAD) + 1
    assert len(list(source_files.chunks_of(quietly_scanned(tmp_path / "a.jsonl")))) > 30


def quietly_scanned(path):
    return [source_files.hash_file(path, path.name, "text")]


def test_workers_give_the_same_in_the_same_order(tmp_path, sources, monkeypatch):
    config = data_config(tmp_path, sources=sources[:2], directory=str(tmp_path / "one"))
    one = quietly(config)
    monkeypatch.setattr(formats, "CHUNK_BLOCKS", 0)  # every file by itself
    monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
    monkeypatch.setattr(pool, "BYTES_PER_WORKER", 1000)
    many = quietly(data_config(tmp_path, sources=sources[:2], directory=str(tmp_path / "many"), workers=3))
    assert many.sets == one.sets and many.fingerprint == one.fingerprint
    for name in ("train", "validation", "tokenizer"):
        assert content(one.directory / name) == content(many.directory / name)


def test_the_number_of_workers_is_no_part_of_the_data(tmp_path):
    one, other = (settings_of(data_config(tmp_path, workers=count), {}) for count in (None, 7))
    assert one == other and "workers" not in one


def test_a_refusal_of_rows_keeps_nothing_half_done_and_names_all(tmp_path, sources, small_chunks):
    small_chunks()
    sources[2]["bad_rows"] = {"at_most": 2}
    with pytest.raises(TooManyBadRows) as error:
        quietly(data_config(tmp_path, sources=sources))
    assert "5 of 305 rows" in error.value.given
    sources[2]["bad_rows"] = {"at_most": 5}
    assert quietly(data_config(tmp_path, sources=sources)).bad_rows["sources.2"] == {
        "not JSON": 1, "null": 1, "wrong type": 1, "lone surrogate": 1, "missing key": 1,
    }  # fmt: skip


def test_parts_of_chunks_are_kept_and_one_that_is_damaged_is_made_again(tmp_path, sources, small_chunks, monkeypatch):
    """Where the parent packs: where workers do, parts are deleted (test_shards_of_workers)."""
    monkeypatch.setattr(shards_of_workers, "MOST_IDS", 0)
    packed = {"sources": sources, "packing": "best-fit"}
    whole = quietly(data_config(tmp_path, **packed, directory=str(tmp_path / "whole")))
    small_chunks()
    monkeypatch.setattr(resume, "PART_TOKENS", 60)
    monkeypatch.setattr(pool, "BATCH_CHARS", 60)
    config = data_config(tmp_path, **packed)

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("windlass.data.prepare.build._prepared", stopped)
        quietly(config)
    parts = sorted((tmp_path / ".data.work" / "train").rglob("*.part"))
    assert len(parts) > 40 and all(resume.is_whole(part.parent) for part in parts)
    damaged = next(part for part in parts if part.name.startswith("000001-"))  # behind one that is read before
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-9] + b"X" + data[-8:])
    encoded, batches = [], pool.piece_batches
    monkeypatch.setattr(pool, "piece_batches", lambda texts, *more: batches(encoded.extend(texts) or texts, *more))
    again = quietly(config)
    num_documents = sum(info.documents for info in whole.sets.values())
    assert 0 < len(encoded) < num_documents // 3 and again.sets == whole.sets
    assert content(again.directory / "train") == content(whole.directory / "train")
