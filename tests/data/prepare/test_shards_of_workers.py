"""Shards that workers write are those that the parent writes, whatever the sources; and the parent opens no part."""

import json

import pytest

from tests.data.conftest import data_config, write_corpus
from tests.data.prepare.conftest import cut_small
from windlass.data.prepare import shard_tasks, shards_of_workers
from windlass.data.prepare.prepare import prepare
from windlass.data.prepare.shard_tasks import WriteShard
from windlass.data.prepare.shards_of_workers import ShardsOfWorkers
from windlass.data.shards.mds import Writer
from windlass.data.sources.known_hashes import KNOWN_NAME
from windlass.data.tokenize import pool, resume

KINDS = {
    "one": {},
    "several": {"validation": 0.3},
    "zstd": {"compression": "zstd"},
    "mixture": {"mixture": True},
    "limited": {"documents": 25},
    "best-fit": {"packing": "best-fit"},
    "best-fit mixture": {"packing": "best-fit", "mixture": True},
}


def files_of(directory):
    """Those of a preparation; times of source files are none of its own."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != KNOWN_NAME)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_the_same_to_the_byte(kind, sources, small_chunks, tmp_path, monkeypatch):
    small_chunks()
    monkeypatch.setattr(resume, "PART_TOKENS", 200)
    changes = dict(KINDS[kind])
    if changes.pop("mixture", False):
        sources = [{**source, "weight": 1 + number} for number, source in enumerate(sources)]
    if limit := changes.pop("documents", None):  # read by the parent, between two that workers read
        sources[1] = {**sources[1], "documents": limit}
    if kind == "one":
        sources = sources[:1]
    found, by_workers = {}, []
    real = ShardsOfWorkers.write

    def noted(self, settings, *rest):
        by_workers.append((self.name, list(settings)))
        return real(self, settings, *rest)

    monkeypatch.setattr(ShardsOfWorkers, "write", noted)
    for way, most in (("workers", shard_tasks.MOST_IDS), ("parent", 0)):
        monkeypatch.setattr(shards_of_workers, "MOST_IDS", most)
        config = data_config(tmp_path, sources=sources, directory=str(tmp_path / way), shard_bytes=4096, **changes)
        lines = []
        prepare(config, {}, log=lines.append)
        found[way] = files_of(tmp_path / way), [line for line in lines if "targets" in line or "rewrites" in line]
    assert found["workers"] == found["parent"]
    numbers = list(range(len(sources)))
    wanted = {
        "one": {("train", (0,)), ("validation", (0,))},
        "several": {("train", (0, 1, 2)), *(("validation", (number,)) for number in numbers)},
        "zstd": {("train", (0, 1, 2)), *(("validation", (number,)) for number in numbers)},
        "mixture": {(name, (number,)) for name in ("train", "validation") for number in numbers},
        "limited": {("validation", (0,)), ("validation", (2,))},  # the training set is one stream
        "best-fit": {("train", (0, 1, 2)), *(("validation", (number,)) for number in numbers)},
        "best-fit mixture": {(name, (number,)) for name in ("train", "validation") for number in numbers},
    }[kind]
    assert {(name, tuple(of)) for name, of in by_workers} == wanted
    assert sum(path.endswith((".mds", ".zstd")) for path in found["parent"][0]) > 4


def test_the_parent_opens_no_part(tmp_path, monkeypatch):
    """Of a corpus that workers read: what comes back of a chunk is as long whatever the chunk holds."""
    write_corpus(tmp_path / "corpus", num_documents=40)
    monkeypatch.setattr(pool, "IN_PROCESS_BYTES", 0)
    received = []
    real = pool.Workers.map

    def noted(self, todo):
        for found in real(self, todo):
            received.append(found)
            yield found

    def never(*_):
        raise AssertionError("the parent reads a part")

    monkeypatch.setattr(pool.Workers, "map", noted)
    for name in ("kept", "kept_part_files", "read_part"):
        monkeypatch.setattr(resume, name, never)
    for room in ("windlass.data.prepare.chunked_sets.kept", "windlass.data.prepare.shards_of_workers.read_part"):
        monkeypatch.setattr(room, never)
    prepared = prepare(data_config(tmp_path, workers=2), {}, log=lambda _: None)
    written = [found for found in received if isinstance(found, shard_tasks.WrittenShard)]
    shards = sum(
        len(json.loads((prepared.directory / name / "index.json").read_bytes())["shards"]) for name in prepared.sets
    )
    assert len(written) == shards > 2
    assert all(len(repr(found)) < 2000 for found in received)


@pytest.mark.parametrize("victim", ["000000-", "000001-"])
@pytest.mark.parametrize("harm", ["bits", "gone"])
@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_part_damaged_after_it_was_written_is_made_again(tmp_path, monkeypatch, harm, victim, packing):
    write_corpus(tmp_path / "corpus", num_documents=40)
    prepare(config := data_config(tmp_path, packing=packing), {}, log=lambda _: None)
    wanted = files_of(tmp_path / "data")
    monkeypatch.setattr(resume, "PART_TOKENS", 500)
    real, harmed = ShardsOfWorkers._parts, []

    def damaging(self, *arguments):
        for path, num_ids in real(self, *arguments):
            if path.name.startswith(victim) and not harmed:
                harmed.append(path)
                path.unlink() if harm == "gone" else path.write_bytes(path.read_bytes()[:-1])
            yield path, num_ids

    monkeypatch.setattr(ShardsOfWorkers, "_parts", damaging)
    again = config.model_copy(update={"directory": str(tmp_path / "again")})
    prepare(again, {}, log=lambda _: None)
    assert harmed and files_of(tmp_path / "again") == wanted


@pytest.mark.parametrize("harm", ["bits", "gone"])
def test_a_part_damaged_before_its_documents_are_written_is_made_again(tmp_path, monkeypatch, harm):
    """Where they end is known by then."""
    write_corpus(tmp_path / "corpus", num_documents=40)
    prepare(config := data_config(tmp_path, packing="best-fit"), {}, log=lambda _: None)
    wanted, real, harmed = files_of(tmp_path / "data"), ShardsOfWorkers._ends_of, []

    def damaging(self, path):
        found = real(self, path)
        if not harmed:
            harmed.append(path)
            path.unlink() if harm == "gone" else path.write_bytes(path.read_bytes()[:-1])
        return found

    monkeypatch.setattr(ShardsOfWorkers, "_ends_of", damaging)
    prepare(config.model_copy(update={"directory": str(tmp_path / "again")}), {}, log=lambda _: None)
    assert harmed and files_of(tmp_path / "again") == wanted


@pytest.mark.parametrize(("packing", "most"), [("concatenate", 10), ("best-fit", 12)])
def test_parts_are_deleted_as_soon_as_their_shards_are_there(tmp_path, monkeypatch, packing, most):
    """Of 30 parts or more few are on disk at once: what one chunk gives, and one that a shard still needs, or those of a buffer
    of eight samples."""
    monkeypatch.setattr("windlass.data.packing.BUFFER_SAMPLES", 8)
    write_corpus(tmp_path / "corpus", num_documents=60)
    cut_small(monkeypatch.setattr)
    monkeypatch.setattr(resume, "PART_TOKENS", 100)
    on_disk, made = [], set()
    real = Writer.adopt

    def counting(self, *arguments):
        real(self, *arguments)
        parts = {path for path in tmp_path.rglob("train/*/*/*.part") if path.stat().st_size > 300}
        made.update(parts)
        on_disk.append(len(parts))

    monkeypatch.setattr(Writer, "adopt", counting)
    prepared = prepare(data_config(tmp_path, shard_bytes=4096, packing=packing), {}, log=lambda _: None)
    assert prepared.sets["validation"].samples and len(made) > 30 and max(on_disk) <= most
    assert not (tmp_path / ".data.work").exists()


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize("at", [1, 20, 60])
def test_what_is_made_before_a_kill_is_not_made_again(tmp_path, monkeypatch, at, packing):
    write_corpus(tmp_path / "corpus", num_documents=60)
    cut_small(monkeypatch.setattr)
    monkeypatch.setattr("windlass.data.packing.BUFFER_SAMPLES", 8)
    config = data_config(tmp_path, shard_bytes=4096, packing=packing)
    prepare(config.model_copy(update={"directory": str(tmp_path / "whole")}), {}, log=lambda _: None)
    real, made, encoded = Writer.adopt, [], []
    real_write, real_encode = WriteShard._write, pool.Encoder.__call__

    def killed(self, *arguments):
        real(self, *arguments)
        if len(made) == at:
            raise RuntimeError("killed")

    monkeypatch.setattr(WriteShard, "_write", lambda self, path: (made.append(path), real_write(self, path))[1])
    monkeypatch.setattr(
        pool.Encoder, "__call__", lambda self, batch: (encoded.extend(batch), real_encode(self, batch))[1]
    )
    monkeypatch.setattr(Writer, "adopt", killed)
    with pytest.raises(RuntimeError, match="killed"):
        prepare(config, {}, log=lambda _: None)
    assert len(made) == at
    monkeypatch.setattr(Writer, "adopt", real)
    prepared = prepare(config, {}, log=lambda _: None)
    assert len(made) == len(set(made)) == len(list((tmp_path / "data").rglob("shard.*.mds")))
    assert len(encoded) == sum(info.documents for info in prepared.sets.values()), "each document once"
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")
