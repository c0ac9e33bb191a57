"""Ids that were kept are not made again, damaged ones are, and what comes out is the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import data_config, write_corpus
from windlass.data.prepare.prepare import prepare
from windlass.data.tokenize import pool
from windlass.data.tokenize import resume as room
from windlass.data.tokenize.resume import FinishedPart, encode_in_parts, found_once, kept, limited, open_parts

EOS = 0
TEXTS = ["a" * (1 + 7 * number % 13) for number in range(40)]


def one_by_one(seen):
    def encode(texts):
        for text in texts:
            seen.append(text)
            yield np.array([*map(ord, text), EOS], np.int32)

    return encode


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(room, "PART_TOKENS", 50)


def joined(parts):
    parts = list(parts)
    return np.concatenate([p.ids for p in parts]).tolist(), np.concatenate([p.sizes for p in parts]).tolist()


def test_parts_are_the_stream_in_whole_documents(tmp_path):
    found = list(encode_in_parts(TEXTS, one_by_one([]), EOS, tmp_path))
    assert len(found) > 5 and all(part.ids[-1] == EOS and (part.ids == EOS).sum() == len(part.sizes) for part in found)
    assert joined(found) == ([i for t in TEXTS for i in (*map(ord, t), EOS)], [len(t) for t in TEXTS])
    assert joined(kept(tmp_path)) == joined(found)


@pytest.mark.parametrize("num_kept", [1, 3])
def test_what_was_kept_is_not_encoded_again(tmp_path, num_kept):
    stream = encode_in_parts(TEXTS, one_by_one([]), EOS, tmp_path)
    begun = [next(stream) for _ in range(num_kept)]
    stream.close()  # as a kill does: nothing is tidied
    seen = []
    whole = joined(encode_in_parts(TEXTS, one_by_one(seen), EOS, tmp_path))
    assert whole[0] == [i for t in TEXTS for i in (*map(ord, t), EOS)]
    assert seen == TEXTS[sum(len(part.sizes) for part in begun) :]


def test_a_part_with_a_flipped_bit_and_all_behind_it_are_made_again(tmp_path):
    whole = joined(encode_in_parts(TEXTS, one_by_one([]), EOS, tmp_path))
    victim = sorted(tmp_path.glob("*.part"))[2]
    data = bytearray(victim.read_bytes())
    data[-9] ^= 1
    victim.write_bytes(data)
    assert len(list(kept(tmp_path))) == 2
    assert joined(encode_in_parts(TEXTS, one_by_one([]), EOS, tmp_path)) == whole


def test_another_fingerprint_finds_nothing(tmp_path):
    work = open_parts(tmp_path / "work", "one")
    (work / "x").write_text("kept")
    assert (open_parts(work, "one") / "x").exists() and not (open_parts(work, "two") / "x").exists()


@pytest.mark.parametrize(
    ("limit", "documents"), [(1, 1), (2, 1), (3, 2), (5, 2), (9, 4), (10, 4), (11, 4), (10**6, 4), (None, 4)]
)
def test_a_limit_ends_behind_the_document_that_reaches_it(limit, documents):
    lengths = [2, 3, 3, 3]
    ids = np.ones(11, np.int32)
    ids[np.cumsum(lengths) - 1] = EOS
    whole = [FinishedPart(ids[:5], np.array([1, 2])), FinishedPart(ids[5:], np.array([2, 2]))]
    assert len(joined(limited(whole, EOS, limit))[1]) == documents


KILLED = """
import os, pathlib, signal, sys
from tests.data.conftest import data_config
from windlass.data.prepare.prepare import prepare
from windlass.data.tokenize import pool, resume
resume.PART_TOKENS, pool.BATCH_CHARS = 300, 500
left, write = [int(sys.argv[2])], resume.write_durably
def counted(path, *chunks, **how):
    write(path, *chunks, **how)
    left[0] -= path.suffix == ".part"
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
resume.write_durably = counted
prepare(data_config(pathlib.Path(sys.argv[1])), {}, log=print)
"""


@pytest.mark.parametrize("event", [1, 4, 9])
def test_a_preparation_that_was_killed_goes_on_and_gives_the_same(tmp_path, monkeypatch, event):
    write_corpus(tmp_path / "corpus")
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(event)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == -9, done.stderr
    assert len(list((tmp_path / ".data.work").rglob("*.part"))) == event
    encoded, original = [], pool.piece_batches

    def spied(texts, *more):
        encoded.extend(texts)
        return original(texts, *more)

    monkeypatch.setattr(pool, "piece_batches", spied)
    lines = []
    resumed = prepare(data_config(tmp_path), {}, log=lines.append)
    assert "tokenizer: trained before, on the same text" in lines
    num_again = len(encoded)
    assert sorted(os.listdir(tmp_path)) == [".data.lock", "corpus", "data"]
    whole = prepare(data_config(tmp_path, directory=str(tmp_path / "whole")), {}, log=lambda line: None)
    assert num_again < len(encoded) - num_again == sum(info.documents for info in whole.sets.values())
    for name in ("train", "validation", "tokenizer"):
        files = {path.name: path.read_bytes() for path in (whole.directory / name).iterdir()}
        assert files == {path.name: path.read_bytes() for path in (resumed.directory / name).iterdir()}
    shutil.rmtree(tmp_path / "whole")


def test_texts_of_several_documents_and_of_none_are_kept_as_such(tmp_path):
    """Every third text is refused, and the others become two documents."""
    why = ("odd", "given", "rule", "change")

    def encode(texts):
        for text in texts:
            count = (0, 2, 2)[len(text) % 3]
            ids = np.array([1, EOS] * count, np.int32)
            yield room.EncodedTexts(ids, [count], [] if count else [why])

    texts, seen = ["a" * size for size in range(1, 60)], []

    def counted():
        for text in texts:
            seen.append(text)
            yield text

    found = list(encode_in_parts(counted(), encode, EOS, tmp_path, 20))
    assert len(found) > 3 and sum(part.num_texts for part in found) == len(texts)
    assert joined(found)[1] == [size for n in range(1, 60) for size in ([], [n, 0], [n, 0])[n % 3]]
    assert sum(len(part.refused) for part in found) == sum(n % 3 == 0 for n in range(1, 60))
    sorted(tmp_path.glob("*.part"))[-1].unlink()
    again = list(encode_in_parts(texts, encode, EOS, tmp_path, 20))
    assert joined(again) == joined(found)
    assert [[*map(tuple, part.refused)] for part in again] == [[*map(tuple, part.refused)] for part in found]


def test_what_was_found_once_is_not_looked_for_again_unless_it_is_damaged(tmp_path):
    calls = []

    def find():
        calls.append(1)
        return {"a": [1, None]}

    path = tmp_path / "deep" / "counts"
    for _ in range(2):
        assert found_once(path, find) == {"a": [1, None]} and len(calls) == 1
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    assert found_once(path, find) == {"a": [1, None]} and len(calls) == 2
