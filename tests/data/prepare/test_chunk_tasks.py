"""A chunk, counted and encoded by itself: its documents by set, its bad rows by number, its parts kept once."""

import json

import numpy as np
import pytest

from tests.data.conftest import make_text
from windlass.data.prepare.chunk_tasks import ChunkParts, CountChunk, EncodeChunk, SourceChunk, TextSettings
from windlass.data.sources.bad_rows import FoundRows
from windlass.data.sources.select import HASHES, Amount, Selection
from windlass.data.sources.source_files import Source, hash_file
from windlass.data.tokenize import pool, resume
from windlass.data.tokenize.tokenizer import open_tokenizer, save_trained, token_bytes, train_tokenizer


@pytest.fixture
def chunk(tmp_path):
    """Half of 20 rows belongs to each of two sets; rows 3 and 9 are bad, row 4 is empty."""
    texts = [make_text(20, number) for number in range(20)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[2], lines[3], lines[8] = "{", '{"text": ""}', "7"
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    sets = {"low": Selection((), 0, HASHES // 2), "high": Selection((), HASHES // 2, HASHES)}
    return SourceChunk(Source([hash_file(tmp_path / "x.jsonl", "x.jsonl", "text")]), sets)


def test_counts_are_by_set_and_bad_rows_have_their_numbers(chunk):
    counted = CountChunk(chunk)({})
    assert counted.num_rows == 20 and [number for number, _ in counted.bad] == [3, 9]
    one, other = counted.amounts["low"], counted.amounts["high"]
    assert one.documents + other.documents == 17 and one.documents and other.documents
    none = chunk._replace(sets={"none": Selection((), 0, 0)})
    assert CountChunk(none)({}).amounts == {"none": Amount(0, 0)}


def test_parts_hold_the_sets_in_order_and_are_made_once(chunk, tmp_path, monkeypatch):
    save_trained(train_tokenizer((make_text(50, seed) for seed in range(20)), 300), tmp_path / "tokenizer")
    tokenizer, eos_id = open_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setattr(resume, "PART_TOKENS", 100)
    monkeypatch.setattr(pool, "BATCH_CHARS", 100)
    settings = TextSettings(tmp_path / "tokenizer", False)
    places = {name: ChunkParts(tmp_path / name, settings, 0) for name in chunk.sets}
    task = EncodeChunk(chunk, places, eos_id)
    assert task({}) == {}, "no one asked for their sizes"
    texts = {name: [text for one, text in chunk.documents(FoundRows()) if one == name] for name in chunk.sets}
    for name in chunk.sets:
        parts = list(resume.kept(tmp_path / name))
        assert len(parts) > 2 and resume.is_whole(tmp_path / name)
        ids = [one for text in texts[name] for one in (*tokenizer.encode(text, add_special_tokens=False).ids, eos_id)]
        assert np.concatenate([part.ids for part in parts]).tolist() == ids
        assert [int(size) for part in parts for size in part.sizes] == [len(text.encode()) for text in texts[name]]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.part")}
    task({})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.part")} == before
    *_, last = sorted((tmp_path / "low").iterdir())
    last.unlink()
    np.save(tmp_path / "bytes.npy", token_bytes(tokenizer))
    counted = task._replace(token_bytes=tmp_path / "bytes.npy")({})
    for name, held in texts.items():
        sizes = [size for _, size in counted[name]]
        num_bytes = sum(len(text.encode()) for text in held)
        assert sum(size.documents for size in sizes) == len(held)
        assert sum(size.text_bytes for size in sizes) == sum(size.token_bytes for size in sizes) == num_bytes
        assert [size.num_ids for size in sizes] == [len(part.ids) for part in resume.kept(tmp_path / name)]
        assert [path for path, _ in counted[name]] == sorted((tmp_path / name).glob("*.part"))
    first = sorted((tmp_path / "high").iterdir())[0]
    first.write_bytes(first.read_bytes()[:-1])
    assert task._replace(token_bytes=tmp_path / "bytes.npy")({}) == counted, "what is damaged is made again"
    assert sum(len(part.sizes) for part in resume.kept(tmp_path / "low")) == len(texts["low"])
