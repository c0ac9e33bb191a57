"""Every token of the stream is in a sample, however it arrives and whatever does not divide; documents keep their borders."""

import numpy as np
import pytest

from windlass.data import packing
from windlass.data.packing import isolate, pack, pack_best_fit, unpack_samples

EOS = 7


def samples_of(stream, cuts, length):
    parts = np.split(stream, cuts)
    packed = list(pack(iter(parts), EOS, length))
    return np.concatenate([ids for ids, _ in packed]), np.concatenate([labels for _, labels in packed])


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 9, 10, 11, 500, 501])
@pytest.mark.parametrize("length", [2, 5])
def test_every_token_is_a_target_once_and_sees_its_predecessor(num_tokens, length):
    draw = np.random.default_rng(num_tokens)
    stream = np.arange(1000, 1000 + num_tokens, dtype=np.int32)
    ids, labels = samples_of(stream, np.sort(draw.integers(0, num_tokens + 1, 6)), length)
    assert ids.shape == labels.shape == (-(-num_tokens // length), length + 1) and ids.dtype == np.int32
    targets, contexts = labels[:, 1:].ravel(), ids[:, :-1].ravel()
    counted = targets != -100
    assert targets[counted].tolist() == stream.tolist()
    assert contexts[counted].tolist() == [EOS, *stream[:-1].tolist()]
    assert counted.sum() == num_tokens and (~counted).sum() < length


def test_labels_are_the_ids_unshifted_and_only_the_last_sample_is_filled():
    ids, labels = samples_of(np.arange(100, 111, dtype=np.int32), [3], 4)
    assert (labels[:-1] == ids[:-1]).all() and (ids[1:, 0] == ids[:-1, -1]).all()
    assert ids[-1].tolist() == [107, 108, 109, 110, EOS] and labels[-1].tolist() == [107, 108, 109, 110, -100]


def test_no_tokens_make_no_sample():
    assert list(pack(iter([]), EOS, 4)) == [] and list(pack(iter([np.empty(0, np.int32)]), EOS, 4)) == []


def test_unpack_is_the_inverse():
    stream = np.arange(50, 113, dtype=np.int32)
    ids, labels = samples_of(stream, [20, 21, 40], 10)
    assert unpack_samples(zip(ids, labels)).tolist() == [EOS, *stream.tolist()]


def corpus(lengths):
    """Documents of these lengths (EOS included) with ids that give where they come from, as one stream."""
    ids = np.arange(100, 100 + sum(lengths), dtype=np.int32)
    ids[np.cumsum(lengths) - 1] = EOS
    return ids


def best_fit(stream, length, cuts=()):
    packed = list(pack_best_fit(iter(np.split(stream, cuts)), EOS, length))
    return np.concatenate([ids for ids, _ in packed]), np.concatenate([labels for _, labels in packed])


def lengths_of_text(seed, count):
    """Log-normal, as documents of the web are; some are one token, some are longer than a sample."""
    return np.maximum(1, np.random.default_rng(seed).lognormal(4.0, 1.3, count).astype(int)).tolist()


def test_best_fit_keeps_documents_whole_and_loses_none():
    lengths = lengths_of_text(1, 3000)
    stream = corpus(lengths)
    ids, labels = best_fit(stream, 200)
    kept = ids[:, 1:][labels[:, 1:] != -100]
    starts = np.cumsum([0, *lengths[:-1]])
    cuts = [(at, cut - (cut == n - 1)) for at, n in zip(starts, lengths) for cut in range(200, n, 200)]
    is_rest = {int(stream[at + cut]) for at, cut in cuts}
    seen = set(kept[kept != EOS].tolist())
    assert seen | (is_rest - {EOS}) >= set(stream[stream != EOS].tolist()), (
        "every token is in a sample and, but for rests' first, a target"
    )
    assert len(kept) == len(set(kept[kept != EOS].tolist())) + (kept == EOS).sum(), "and once"
    rows = {int(token): row for row in range(len(ids)) for token in ids[row, 1:] if token != EOS}
    for at, length in zip(starts, lengths):
        inside = {rows[int(token)] for token in stream[at : at + length - 1]}
        assert len(inside) <= max(1, -(-length // 200)), "a document that fits a sample is in one"
        if length <= 200 and length > 1:
            row = inside.pop()
            place = int(np.flatnonzero(ids[row] == stream[at])[0])
            assert ids[row, place : place + length].tolist() == stream[at : at + length].tolist()
            assert ids[row, place - 1] == EOS, "its context is the end of another, or the sample's first EOS"


def test_best_fit_fills_samples_of_documents_as_the_web_has_them():
    lengths = lengths_of_text(2, 20000)
    labels = best_fit(corpus(lengths), 512)[1]
    rests = sum(-(-length // 512) - 1 for length in lengths)
    fill = ((labels[:, 1:] != -100).sum() + rests) / labels[:, 1:].size
    assert fill >= 0.998, f"{fill:.4%}"
    naive = sum(lengths) / (512 * sum(-(-length // 512) for length in lengths))
    assert naive < 0.6, "the case would be no case if a sample per document filled as well"


def test_best_fit_does_not_depend_on_how_the_stream_arrives():
    stream = corpus(lengths_of_text(3, 400))
    whole = best_fit(stream, 64)
    for seed in range(4):
        cuts = np.sort(np.random.default_rng(seed).integers(0, len(stream), 50))
        for one, other in zip(whole, best_fit(stream, 64, cuts)):
            assert (one == other).all()


def test_samples_that_stay_empty_go_into_the_next_buffer(monkeypatch):
    monkeypatch.setattr(packing, "BUFFER_SAMPLES", 3)
    stream = corpus([7, 3, 7, 7, 7, 3, 3, 3])  # in the first buffer of three tens, three sevens find no three
    ids, labels = best_fit(stream, 10)
    assert (labels[:, 1:] != -100).all() and len(ids) == 4
    stream = corpus([6] * 9)  # nothing ever fits together: a buffer is not carried along for ever
    packed = list(pack_best_fit(iter([stream]), EOS, 10))
    assert [len(ids) for ids, _ in packed] == [5, 4]


def test_the_rest_of_a_cut_document_is_not_predicted_from_an_end_of_text():
    ids, labels = best_fit(corpus([13, 2]), 5)
    rests = {int(corpus([13, 2])[at]) for at in (5, 10)}
    assert not rests & set(labels.ravel().tolist()) and rests < set(ids.ravel().tolist())


@pytest.mark.parametrize("length", [5, 6, 7, 10, 11, 12, 16])
def test_the_end_of_a_cut_document_is_always_learned(length):
    stream = corpus([length, 3, length])
    for cuts in ((), (3,), (5, 6), tuple(range(1, len(stream)))):
        labels = best_fit(stream, 5, cuts)[1]
        assert (labels[:, 1:] == EOS).sum() == 3, cuts


def test_isolation_says_where_documents_begin_and_takes_targets_across_borders_away():
    ids = np.array([[EOS, 1, 2, EOS, 3, EOS, EOS, 4], [9, 1, 2, 3, 4, 5, 6, EOS]], np.int32)
    assert packing.most_documents(ids == EOS, ids) == 4
    documents, targets = isolate(ids == EOS, ids[:, 1:], 5)
    assert documents.tolist() == [[0, 1, 4, 6, 7], [0, 7, 7, 7, 7]]
    assert targets.tolist() == [[-100, 2, EOS, -100, EOS, -100, -100], [1, 2, 3, 4, 5, 6, EOS]]
    assert isolate(ids == EOS, ids[:, 1:], 9)[0].tolist() == [[0, 1, 4, 6, 7, 7, 7, 7, 7], [0, *[7] * 8]]
    labels = ids.copy()
    labels[:, 2] = -100
    assert isolate(ids == EOS, labels[:, 1:], 5)[1][:, 1].tolist() == [-100, -100], (
        "what did not count before does not count now"
    )


def test_what_fills_a_sample_up_is_no_document():
    ids, labels = samples_of(corpus([3, 4, 2]), [], 20)
    assert packing.most_documents(ids == EOS, labels) == 4  # the first EOS, and three
    documents, targets = isolate(ids == EOS, labels[:, 1:], 4)
    assert documents.tolist() == [[0, 1, 4, 8]] and (targets[0] != -100).sum() == 9 - 3
