"""Baselines against a slow, plain computation, and against each other."""

import bz2
import gzip
import itertools
import lzma
import math
from collections import Counter

import numpy as np
import pytest

from tests.data.conftest import make_text
from windlass.data.packing import pack
from windlass.data.prepare import baselines as room
from windlass.data.shards.mds import Writer

V = 11


def plainly(train, validation):
    """The formulas of the docstring, token by token with Counters."""
    singles, pairs, contexts = Counter(train[1:]), Counter(itertools.pairwise(train)), Counter(train[:-1])
    unigram = {b: (singles[b] + 1) / (len(train) - 1 + V) for b in range(V)}
    first = [-math.log(unigram[b]) for b in validation[1:]]
    second = [-math.log((pairs[a, b] + 8 * unigram[b]) / (contexts[a] + 8)) for a, b in itertools.pairwise(validation)]
    return sum(first) / len(first), sum(second) / len(second)


def streams():
    draw = np.random.default_rng(0)
    train = np.cumsum(draw.integers(0, 3, 4000)) % (V - 1)  # a token depends on the one before; id 10 is never seen
    return train, np.append(np.cumsum(draw.integers(0, 3, 500)) % (V - 1), 10)


def test_unigram_and_bigram_are_the_formulas():
    train, validation = streams()
    found = room.predictor_losses([train], validation, V).mean(1)
    assert found.tolist() == pytest.approx(plainly(train.tolist(), validation.tolist()), abs=1e-12)
    assert math.log(3) < found[1] < found[0] < math.log(V)


@pytest.mark.parametrize("size", [1, 7, 64, 65])
def test_however_the_training_stream_is_cut_each_pair_counts_once(monkeypatch, size):
    train, validation = streams()
    whole = room.predictor_losses([train], validation, V)
    monkeypatch.setattr(room, "PART_TOKENS", 64)
    pieces = [train[start : start + size].astype(np.int32) for start in range(0, len(train), size)]
    assert room.predictor_losses(pieces, validation, V).tolist() == whole.tolist()


def test_each_predictor_is_a_distribution():
    """Over all continuations of one context, probabilities sum to one: nothing is promised twice."""
    train, _ = streams()
    for context in (0, 3, 10):
        losses = [room.predictor_losses([train], np.array([context, token]), V)[:, 0] for token in range(V)]
        assert sum(math.exp(-unigram) for unigram, _ in losses) == pytest.approx(1, abs=1e-12)
        assert sum(math.exp(-bigram) for _, bigram in losses) == pytest.approx(1, abs=1e-12)


def test_they_are_scored_on_every_target_of_the_prepared_set(tmp_path):
    train, validation = (stream.astype(np.int32) for stream in streams())
    for name, stream in (("train", train), ("validation", validation)):
        writer = Writer(tmp_path / name, 17 + 1, 4096)
        for ids, labels in pack(iter([stream]), 0, 17):
            writer.write(ids, labels)
        writer.close()
    places, bytes_V = (tmp_path / "train", tmp_path / "validation"), np.arange(V)
    found, _ = room.fit_and_score(*places, 0, bytes_V, validation_bytes=70_000)
    wanted = plainly([0, *train.tolist()], [0, *validation.tolist()])
    for name, nats in zip(("unigram", "bigram"), wanted):
        bits = nats * len(validation) / math.log(2) / 70_000
        assert found[name] == pytest.approx({"loss": nats, "bits_per_byte": bits}, abs=1e-12)


def test_isolated_documents_are_scored_without_their_first_tokens(tmp_path):
    test_they_are_scored_on_every_target_of_the_prepared_set(tmp_path)
    train, validation = (np.append(0, stream) for stream in streams())
    _, isolated = room.fit_and_score(tmp_path / "train", tmp_path / "validation", 0, np.arange(V), 70_000)
    nats_2M, inside = room.predictor_losses([train], validation, V), validation[:-1] != 0
    num_bytes = 70_000 - sum(after for before, after in itertools.pairwise(validation.tolist()) if before == 0)
    for name, nats in zip(("unigram", "bigram"), nats_2M):
        assert 0 < (~inside).sum() < 100 and isolated[name]["loss"] == pytest.approx(nats[inside].mean(), abs=1e-12)
        assert isolated[name]["bits_per_byte"] == pytest.approx(nats[inside].sum() / math.log(2) / num_bytes, abs=1e-12)


def test_a_validation_set_of_first_tokens_alone_has_none_inside(tmp_path):
    for name, stream in (("train", streams()[0]), ("validation", np.array([3, 0]))):
        writer = Writer(tmp_path / name, 17 + 1, 4096)
        for ids, labels in pack(iter([stream.astype(np.int32)]), 0, 17):
            writer.write(ids, labels)
        writer.close()
    bytes_V = np.array([0] + [1] * (V - 1))
    found, isolated = room.fit_and_score(tmp_path / "train", tmp_path / "validation", 0, bytes_V, 1)
    assert found["bigram"]["loss"] > 0 and isolated == {}


def test_compressors_are_counted_in_bits_per_byte_and_priming_helps():
    train, validation = make_text(4000, 0).encode(), make_text(800, 1).encode()
    found = {name: entry["bits_per_byte"] for name, entry in room.compress(train, validation).items()}
    assert found["gzip"] == 8 * len(gzip.compress(validation, 9)) / len(validation)
    assert found["bz2"] == 8 * len(bz2.compress(validation, 9)) / len(validation)
    assert found["xz"] == 8 * len(lzma.compress(validation, preset=6)) / len(validation)
    primed = found["xz primed with the training text"]
    assert 0 < primed < found["xz"]
    copied = room.compress(train, train[-5000:])["xz primed with the training text"]["bits_per_byte"]
    assert copied < 0.1  # text it has seen costs next to nothing, so the dictionary spans both
    assert set(room.compress(b"", validation)) == {"gzip", "bz2", "xz"}


def test_large_corpora_have_none():
    assert room.are_affordable(20_000_000, 16 << 20)
    assert not room.are_affordable(20_000_001, 1) and not room.are_affordable(1, (16 << 20) + 1)
