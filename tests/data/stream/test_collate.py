"""Samples become tensors: documents isolated, keys that follow from the position, and samples of a wrong length named."""

import json

import numpy as np
import pytest
import torch

from tests.data.stream.test_loader import T, directory, make  # noqa: F401
from windlass.data.packing import Borders
from windlass.data.shards.mds import Reader, Writer
from windlass.data.stream.collate import add_keys, add_percent, add_sources, batches_of, collate, sample_keys
from windlass.data.stream.skipping_stream import SkippingReader
from windlass.errors import BadShard, UserError


def test_keys_depend_on_seed_and_place_and_on_every_bit_of_them():
    keys = torch.cat([sample_keys(seed, start, 1000) for seed in (0, 1, 2**63) for start in (0, 1000, 2**40)])
    assert keys.dtype == torch.int64 and keys.unique().numel() == 9000
    ones = torch.stack([(keys >> bit & 1).double().mean() for bit in range(64)])
    assert (ones - 0.5).abs().max() < 5 * 0.5 / 9000**0.5
    first = [int(key) % 2**64 for key in sample_keys(17, 5, 2)]
    assert first == [python_key(17, 5), python_key(17, 6)]


def python_key(seed, place):
    """By Python's integers: a changed formula changes every run."""

    def splitmix(x):
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    return splitmix((splitmix(seed) + place * 0x9E3779B97F4A7C15) % 2**64)


def test_another_sequence_length_is_refused_with_both(directory):  # noqa: F811
    with pytest.raises(UserError) as caught:
        make(directory, sequence_length=T + 1)
    assert f"sequence_length {T + 1}, but the samples in {directory} hold {T} targets" in caught.value.given
    assert f"prepare again with sequence_length {T + 1}, or train with {T}" in caught.value.change


def test_a_sample_of_another_length_is_named(tmp_path):
    first, second = (Writer(tmp_path / name, length + 1, 4096) for name, length in (("x", T), ("y", T + 1)))
    for writer, length in ((first, T), (second, T + 1)):
        writer.write(np.zeros((9, length + 1), np.int32), np.zeros((9, length + 1), np.int32))
        writer.close()
    index = json.loads((tmp_path / "x" / "index.json").read_text())
    foreign = json.loads((tmp_path / "y" / "index.json").read_text())["shards"][0]
    (tmp_path / "y" / "shard.00000.mds").rename(tmp_path / "x" / "shard.00001.mds")
    foreign["raw_data"]["basename"] = "shard.00001.mds"
    index["shards"].append(foreign)
    (tmp_path / "x" / "index.json").write_text(json.dumps(index))
    loader = make(tmp_path / "x", micro_batch=18)
    with pytest.raises(BadShard, match=rf"shard\.00001\.mds holds {T + 2} ids"):
        loader.next()
    loader.close()


def test_isolated_documents_are_named_and_no_target_crosses_a_border(tmp_path):
    ids = np.array([[0, 5, 6, 0, 7, 0, 0], [0, 5, 0, 6, 0, 7, 0]], np.int32)
    writer = Writer(tmp_path / "train", T + 1, 4096)
    writer.write(ids, ids)
    writer.close()
    loader = make(tmp_path / "train", micro_batch=2, borders=Borders(0, 5))
    (batch,) = loader.next()
    loader.close()
    rows = {tuple(row): at for at, row in enumerate(batch["input_ids"].tolist())}
    order = [rows[0, 5, 6, 0, 7, 0], rows[0, 5, 0, 6, 0, 7]]
    assert batch["documents"][order].tolist() == [[0, 1, 4, 6, 6], [0, 1, 3, 5, 6]]
    assert batch["targets"][order].tolist() == [[-100, 6, 0, -100, 0, -100], [-100, 0, -100, 0, -100, 0]]


def test_a_row_without_a_sample_is_one_document(directory):  # noqa: F811
    reader = Reader(directory)
    batch = collate(reader, np.array([[0, 0]]), 2, T, Borders(999_999, 3))
    assert batch["documents"].tolist() == [[0, T, T], [0, T, T]] and (batch["targets"][1] == -100).all()


@pytest.mark.parametrize("sequences", [1, 2])
def test_keys_of_dropout_are_those_of_the_position_however_the_batch_is_cut(sequences):
    """A sample of two sequences, as a pair is, has two keys."""
    make = add_keys(lambda rows, _position: {"rows": torch.from_numpy(rows)}, 17, sequences)
    rows_N2 = np.zeros((12, 2), np.int64)
    whole = make(rows_N2, 40)["keys"]
    assert len(whole) == len(set(whole.tolist())) == 12 * sequences
    for size in (1, 3, 4):
        cut = [make(rows_N2[at : at + size], 40 + at)["keys"] for at in range(0, 12, size)]
        assert torch.equal(torch.cat(cut), whole)


def test_rows_say_which_source_they_are_of():
    """Sources of 2, 1 and 3 shards: shards 0 and 1, 2, 3 to 5."""
    made = add_sources(lambda places, position: {"at": torch.tensor(position)}, [2, 1, 3])
    places = np.array([[1, 9], [2, 0], [0, 3], [5, 1], [3, 0]])
    batch = made(places, 7)
    assert batch["at"] == 7 and batch["sources"].dtype == torch.bool
    assert batch["sources"].int().argmax(1).tolist() == [0, 1, 0, 2, 2] and (batch["sources"].sum(1) == 1).all()


@pytest.mark.parametrize("skips", [False, True])
def test_targets_have_the_weights_of_their_labels(tmp_path, skips):
    """Each label's weight goes with it, shifted as it is; in a set with weights, all batches have some."""
    draw = np.random.default_rng(5)
    ids, percent = (
        draw.integers(0, 90, (20, T + 1)).astype(np.int32),
        draw.integers(1, 101, (20, T + 1)).astype(np.uint8),
    )
    percent[12:] = 100
    writer = Writer(tmp_path / "train", T + 1, 400, vocab_size=90)
    writer.write(ids, ids, percent_NL=percent)
    writer.close()
    reader = Reader(tmp_path / "train")
    assert len({shard.columns for shard in reader.shards}) == 2
    places = np.array([(number, row) for number, count in enumerate(reader.shard_samples) for row in range(count)])
    order = draw.permutation(20)
    source = SkippingReader(None, reader, T + 1, {}) if skips else reader
    made = add_percent(batches_of(source, T), source)
    for start in range(0, 20, 4):
        batch = made(places[order[start : start + 4]], start)
        assert batch["percent"].dtype == torch.int64
        assert batch["percent"].tolist() == percent[order[start : start + 4], 1:].tolist()
        assert batch["targets"].tolist() == ids[order[start : start + 4], 1:].tolist()
