"""From text to shards: nothing lost, the split by hash, recognised when unchanged, whole or not there at all."""

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.data.conftest import data_config, make_text, write_corpus
from windlass.data.config import SourceConfig
from windlass.data.packing import unpack_samples
from windlass.data.prepare import build as room
from windlass.data.prepare import manifest
from windlass.data.prepare.prepare import open_prepared, prepare
from windlass.data.shards import mds
from windlass.data.shards.mds import Reader
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError
from windlass.units import format_bytes


def quietly(config, sets=None, lines=None):
    return prepare(config, sets or {}, log=(lines if lines is not None else []).append)


def documents_of(prepared, name):
    """The documents again, from the shards alone."""
    tokenizer, eos_id = open_tokenizer(prepared.tokenizer_directory)
    stream = unpack_samples(Reader(prepared.directory / name))
    assert stream[0] == stream[-1] == eos_id
    parts = np.split(stream[1:], np.flatnonzero(stream[1:] == eos_id) + 1)[:-1]
    return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


def content(directory):
    """Every file but the hashes of sources, which depend on their inodes."""
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("sources.json")]
    return {path.relative_to(directory): path.read_bytes() for path in paths}


def test_every_document_comes_back_exactly_once_on_its_side(small):
    config, prepared, texts = small
    sides = {"train": [], "validation": []}
    for text in texts:
        held_out = xxhash.xxh64_intdigest(text.encode()) < 0.2 * 2**64
        sides["validation" if held_out else "train"].append(text)
    for name, wanted in sides.items():
        assert documents_of(prepared, name) == wanted and wanted
        info = prepared.sets[name]
        assert (info.documents, info.bytes) == (len(wanted), sum(len(text.encode()) for text in wanted))
        samples = list(Reader(prepared.directory / name))
        counted = sum(int((labels[1:] != -100).sum()) for _, labels in samples)
        assert (info.tokens, info.samples) == (counted, len(samples)) and info.bytes_add_up
        assert info.samples * config.sequence_length - info.tokens == info.padding < config.sequence_length
    assert len(Reader(prepared.directory / "train").shards) > 3  # so the order and its windows matter


def test_the_result_reports_what_a_model_needs(small):
    _, prepared, _ = small
    assert prepared.vocab_size == 300 and prepared.eos_id == 0
    assert len(prepared.corpus_hash) == 32
    assert {"unigram", "bigram", "gzip", "bz2", "xz"} < set(prepared.baselines)
    assert prepared.baselines["bigram"]["loss"] < prepared.baselines["unigram"]["loss"]
    assert json.loads((prepared.directory / "prepared.json").read_text())["sets"]["train"]["documents"] > 0


def test_large_batches_through_workers_give_the_same_shards(corpus, tmp_path, monkeypatch):
    plain = quietly(data_config(tmp_path, directory=str(tmp_path / "plain")))
    monkeypatch.setattr("windlass.data.tokenize.pool.IN_PROCESS_BYTES", 0)
    monkeypatch.setattr("windlass.data.tokenize.pool.BYTES_PER_WORKER", 1000)
    monkeypatch.setattr("windlass.data.tokenize.pool.BATCH_CHARS", 500)
    workers = quietly(data_config(tmp_path, directory=str(tmp_path / "workers")))
    for name in ("train", "validation", "tokenizer"):
        assert content(plain.directory / name) == content(workers.directory / name)


def test_unchanged_is_skipped_and_says_so(small):
    config, prepared, _ = small
    before = {path: path.stat().st_mtime_ns for path in prepared.directory.rglob("*") if path.name != "sources.json"}
    lines = []
    assert quietly(config, lines=lines) == prepared
    assert lines == [f"{prepared.directory} is prepared already and unchanged: skipped (corpus {prepared.corpus_hash})"]
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert set(before) >= set(prepared.directory.rglob("*")) - {prepared.directory / "sources.json"}


def edit(path, text):
    path.write_text(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: ({"sequence_length": 34}, None),
        lambda root: ({"validation": 0.3}, None),
        lambda root: ({"tokenizer": {"train": 310}}, None),
        lambda root: ({"shard_bytes": 1 << 20}, None),
        lambda root: ({}, edit(root / "corpus" / "a" / "001.txt", "edited")),
        lambda root: ({}, edit(root / "corpus" / "new.txt", "added")),
        lambda root: ({}, (root / "corpus" / "a" / "001.txt").unlink()),
        lambda root: ({}, (root / "corpus" / "a" / "001.txt").rename(root / "corpus" / "a" / "0001.txt")),
    ],
    ids=["length", "share", "vocabulary", "shards", "edited", "added", "removed", "renamed"],
)
def test_whatever_changes_is_prepared_again_and_never_reused(corpus, tmp_path, change):
    first = quietly(data_config(tmp_path))
    settings, _ = change(tmp_path)
    config, lines = data_config(tmp_path, **settings), []
    second = quietly(config, lines=lines)
    assert "the sources or settings have changed since it was prepared" in lines[0]
    assert second.fingerprint != first.fingerprint
    fresh = quietly(data_config(tmp_path, directory=str(tmp_path / "fresh"), **settings))
    for name in ("train", "validation", "tokenizer"):
        assert content(second.directory / name) == content(fresh.directory / name)


def test_a_changed_tokenizer_file_is_noticed(corpus, tmp_path):
    trained = quietly(data_config(tmp_path, directory=str(tmp_path / "first")))
    shutil.copytree(trained.tokenizer_directory, tmp_path / "given")
    config = data_config(tmp_path, tokenizer={"from": str(tmp_path / "given")})
    loaded = quietly(config)
    assert content(loaded.tokenizer_directory) == content(tmp_path / "given")
    assert content(loaded.directory / "train") == content(trained.directory / "train")
    other = quietly(data_config(tmp_path, tokenizer={"train": 310}, directory=str(tmp_path / "second")))
    shutil.copy(other.tokenizer_directory / "tokenizer.json", tmp_path / "given")
    assert quietly(config).vocab_size == 310


def test_damage_that_can_be_seen_is_mended(corpus, tmp_path):
    config = data_config(tmp_path)
    whole = content(quietly(config).directory / "train")
    (tmp_path / "data" / "train" / "shard.00001.mds").unlink()
    lines = []
    quietly(config, lines=lines)
    assert "train/shard.00001.mds is missing" in lines[0] and content(tmp_path / "data" / "train") == whole


def test_a_growing_corpus_moves_no_document_between_the_sides(corpus, tmp_path):
    before = quietly(data_config(tmp_path))
    held_out = documents_of(before, "validation")
    write_corpus(tmp_path / "corpus" / "more", seed=5)
    after = quietly(data_config(tmp_path))
    assert set(held_out) <= set(documents_of(after, "validation"))
    assert not set(documents_of(after, "validation")) & set(documents_of(after, "train"))


def test_validation_may_be_a_source_and_there_may_be_further_sets(corpus, tmp_path):
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"body": make_text(50, seed)}) + "\n" for seed in range(4)))
    (tmp_path / "extra.txt").write_text("one more text")
    held = {"path": str(tmp_path / "held.jsonl"), "text": "body"}
    sets = {"extra": SourceConfig(path=str(tmp_path / "extra.txt"))}
    prepared = quietly(data_config(tmp_path, validation=held), sets)
    assert list(prepared.sets) == ["train", "validation", "extra"]
    assert documents_of(prepared, "train") == corpus
    assert documents_of(prepared, "validation") == [make_text(50, seed) for seed in range(4)]
    assert documents_of(prepared, "extra") == ["one more text"]
    assert open_prepared(data_config(tmp_path, validation=held), sets) == prepared


def test_a_tokenizer_that_rewrites_text_has_no_bytes_per_token(corpus, tmp_path):
    from tokenizers import Tokenizer, normalizers

    shutil.copytree(quietly(data_config(tmp_path)).tokenizer_directory, tmp_path / "given")
    tokenizer = Tokenizer.from_file(str(tmp_path / "given" / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Prepend("x")
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    lines = []
    prepared = quietly(data_config(tmp_path, tokenizer={"from": str(tmp_path / "given")}), lines=lines)
    extra = prepared.sets["train"].documents
    assert any(f"rewrites text (its tokens add up to +{extra} bytes)" in line for line in lines)
    assert prepared.token_bytes("train") is None and not prepared.sets["train"].bytes_add_up


def test_a_corpus_over_the_limit_is_sampled_for_the_tokenizer(corpus, tmp_path, monkeypatch):
    seen = []
    train = room.tokenizer.train_tokenizer
    monkeypatch.setattr(room.tokenizer, "train_tokenizer", lambda texts, size: train(seen.extend(texts) or seen, size))
    quietly(data_config(tmp_path))
    everything = len(seen)
    monkeypatch.setattr(room, "TOKENIZER_TRAINING_BYTES", sum(len(text.encode()) for text in seen) // 2)
    seen.clear()
    quietly(data_config(tmp_path, sequence_length=40))
    assert 0 < len(seen) < everything


def test_a_tokenizer_that_is_trained_says_how_far_it_is(corpus, tmp_path, monkeypatch):
    """With every line due, one before each document; at the usual rate, in seconds, none of a small corpus."""
    lines = []
    prepared = quietly(data_config(tmp_path), lines=lines)
    size, documents = format_bytes(prepared.sets["train"].bytes), prepared.sets["train"].documents
    start = f"tokenizer: training a byte-level BPE of 300 tokens on about {size} of text"
    end = f"tokenizer: all {size} read, merging the most frequent pairs"
    at = lines.index(start)
    assert lines[at + 1] == end and lines[at + 2].startswith("tokenizer: byte-level BPE of 300 tokens, trained on")
    monkeypatch.setattr(room, "REPORT_EVERY_S", -1.0)
    lines.clear()
    quietly(data_config(tmp_path, sequence_length=40), lines=lines)
    due = lines[lines.index(start) + 1 : lines.index(end)]
    assert [line.partition(",")[0] for line in due] == [f"tokenizer: documents read: {n}" for n in range(documents)]
    assert due[0].endswith(f", 0 B of about {size}")


# ---- mistakes


def refused(config, sets=None):
    with pytest.raises(UserError) as caught:
        quietly(config, sets)
    directory = config.directory
    assert not os.path.exists(directory) and not os.path.exists(f"{os.path.dirname(directory)}/.data.preparing")
    return caught.value


def test_a_share_that_leaves_a_side_empty_says_so(tmp_path):
    """Rows of a chat are not cut, and in a mixture no text is. (A text that may be cut: test_hold_out.)"""
    (tmp_path / "corpus").mkdir()
    for name in ("one", "two"):
        (tmp_path / "corpus" / f"{name}.txt").write_text(make_text(100, 0))
    weighted = [{"path": str(tmp_path / "corpus" / f"{name}.txt"), "weight": 1.0} for name in ("one", "two")]
    found = [refused(data_config(tmp_path, sources=weighted, validation=share)) for share in (0.0001, 0.9999)]
    assert {error.given for error in found} == {
        "validation: 0.0001 of 2 documents leaves none for validation",
        "validation: 0.9999 of 2 documents leaves none for train",
    }
    assert "validation: {path: ...}" in found[0].change


def test_sources_without_text_are_refused(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "empty.txt").write_text("")
    assert refused(data_config(tmp_path)).given == "the source of train holds no text"
    write_corpus(tmp_path / "corpus")
    (tmp_path / "none.jsonl").write_text("\n")
    sets = {"extra": SourceConfig(path=str(tmp_path / "none.jsonl"))}
    assert refused(data_config(tmp_path), sets).given == "the source of extra holds no text"


def test_a_sequence_longer_than_the_corpus_is_refused(corpus, tmp_path):
    error = refused(data_config(tmp_path, sequence_length=1 << 20))
    assert f"sequence_length {1 << 20}, but the training text has " in error.given


def test_a_bad_line_deep_in_the_corpus_leaves_nothing(corpus, tmp_path):
    (tmp_path / "corpus" / "z.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    assert "z.jsonl:2 has no key `text`" in refused(data_config(tmp_path)).given


def test_a_directory_with_other_files_is_left_alone(corpus, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.md").write_text("mine")
    with pytest.raises(UserError, match=r"did not prepare: notes\.md"):
        quietly(data_config(tmp_path))
    assert not (tmp_path / ".data.lock").exists()
    assert content(tmp_path / "data") == {(tmp_path / "data" / "notes.md").relative_to(tmp_path / "data"): b"mine"}


def test_an_unchanged_start_reads_prepared_json_and_each_index_once(corpus, tmp_path, monkeypatch):
    first, calls = quietly(data_config(tmp_path)), []

    def counted(name, module):
        call = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: calls.append((name, given[0].name)) or call(*given))

    counted("load_prepared", manifest)
    counted("read_shard_index", mds)
    found = quietly(data_config(tmp_path))
    assert found == first and [found.shards(name).where for name in found.sets]
    assert sorted(calls) == [
        ("load_prepared", "data"),
        ("read_shard_index", "train"),
        ("read_shard_index", "validation"),
    ]


def test_unchanged_data_is_used_where_nothing_can_be_written(corpus, tmp_path, monkeypatch):
    first = quietly(data_config(tmp_path))
    kept = content(tmp_path / "data")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr("windlass.data.sources.known_hashes.write_durably", unwritable)
    lines = []
    assert quietly(data_config(tmp_path), lines=lines) == first and "unchanged: skipped" in lines[-1]
    with pytest.raises(UserError) as caught:
        quietly(data_config(tmp_path, sequence_length=34))
    assert caught.value.given == f"data.directory {tmp_path}/data cannot be made: {tmp_path} cannot be written"
    with pytest.raises(UserError, match="cannot be written"):
        quietly(data_config(tmp_path, directory=str(tmp_path / "new")))
    assert content(tmp_path / "data") == kept


def unwritable(*_):
    raise PermissionError("read-only")


# ---- kills and company

ROOT = Path(__file__).parents[3]  # KILLED imports from tests
KILLED = """
import os, signal, sys
from tests.data.conftest import data_config
from windlass.data.prepare.prepare import prepare
left = [int(sys.argv[2])]
def counted(call):
    def wrapper(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return wrapper
os.rename, os.replace, os.fsync, os.mkdir = map(counted, (os.rename, os.replace, os.fsync, os.mkdir))
import pathlib
prepare(data_config(pathlib.Path(sys.argv[1]), sequence_length=40), {}, log=lambda line: None)
print("done", left[0])
"""


def kill_at(root, event):
    """Prepares with other settings and dies at the event-th rename, fsync or mkdir. True if it lived to the end."""
    command = [sys.executable, "-c", KILLED, str(root), str(event)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode == 0


def shards(directory):
    return {path: data for path, data in content(directory).items() if path.name != "prepared.json"}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(a root with an older preparation, the shards of the new one, how many events a preparation has)."""
    template, root = (tmp_path_factory.mktemp(name) / "root" for name in ("template", "whole"))
    write_corpus(template / "corpus", num_documents=12)
    for path in (template / "corpus").rglob("*.txt"):
        os.utime(path, (1, 1))  # old, so that its hash is kept, whenever this runs
    quietly(data_config(template))
    shutil.copytree(template, root)
    command = [sys.executable, "-c", KILLED, str(root), "100000"]
    counted = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return template, shards(root / "data"), 100000 - int(counted.stdout.split()[1])


def check_kills(killed, tmp_path, events):
    """Whatever the moment: what opens is whole, and preparing again gives the very same shards, and nothing else."""
    template, wanted, _ = killed
    for event in events:
        root = tmp_path / str(event)
        shutil.copytree(template, root)
        assert not kill_at(root, event)
        config = data_config(root, sequence_length=40)
        try:
            assert shards(open_prepared(config, {}).directory) == wanted
        except UserError as error:
            assert "holds no prepared data" in error.given or "was prepared with" in error.given
        assert shards(quietly(config).directory) == wanted
        assert sorted(os.listdir(root)) == [".data.lock", "corpus", "data"]


def test_a_killed_preparation_is_never_trusted_and_the_next_one_is_whole(killed, tmp_path):
    last = killed[2]
    assert last > 12
    check_kills(killed, tmp_path, [*random.Random(0).sample(range(1, last - 2), 3), last - 2, last - 1, last])


@pytest.mark.long
def test_a_kill_at_every_rename_and_fsync_is_survived(killed, tmp_path):
    check_kills(killed, tmp_path, range(1, killed[2] + 1))


def test_two_at_once_make_it_once(corpus, tmp_path):
    config, lines, found = data_config(tmp_path), [], []
    threads = [threading.Thread(target=lambda: found.append(quietly(config, lines=lines))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] == open_prepared(config, {})
    assert len([line for line in lines if line.startswith("preparing ")]) == 1
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "corpus", "data"]


def test_the_shards_of_a_fixed_text_never_change(tmp_path):
    """Golden, without merges so that it depends on our code alone. If it changes, raise ALGORITHM_VERSION."""
    (tmp_path / "corpus").mkdir()
    for number in range(6):
        (tmp_path / "corpus" / f"{number}.txt").write_text(f"document {number} <|endoftext|> é\n" * (number + 1))
    prepared = quietly(data_config(tmp_path, tokenizer={"train": 257}))
    digest = xxhash.xxh64()
    for name in ("train", "validation"):
        for ids, labels in Reader(prepared.directory / name):
            digest.update(ids.tobytes() + labels.tobytes())
    assert digest.hexdigest() == "452533cb39b3e4be"
