"""Every token of the stream is a target exactly once, however it arrives and whatever does not divide."""

import numpy as np
import pytest

from windlass.data.packing import pack, unpack

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
    assert unpack(zip(ids, labels)).tolist() == [EOS, *stream.tolist()]
