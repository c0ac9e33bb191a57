"""What a shard stores of ids, targets and ends: the fewest bytes, and the same samples in the same order as before."""

import json

import numpy as np
import pytest

from windlass.data.shards.columns import ShardColumns, narrowest, shard_columns
from windlass.data.shards.index import parse_shard_index
from windlass.data.shards.mds import Reader, Writer
from windlass.errors import BadShard

DRAW = np.random.default_rng(3)
IDS = DRAW.integers(0, 65_536, (50, 33)).astype(np.int32)
MASKED = np.where(DRAW.random(IDS.shape) < 0.3, -100, IDS).astype(np.int32)
HEAD = {"raw_data": {}, "format": "mds", "version": 2}
OTHER = np.roll(IDS, 1, 1)


def read(directory):
    reader = Reader(directory)
    places = [(number, row) for number, count in enumerate(reader.shard_samples) for row in range(count)]
    return [(*reader.read(*place), reader.ends(*place)) for place in places], reader


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("has_ends", [False, True])
@pytest.mark.parametrize("vocab_size", [65_536, 65_537, None])
@pytest.mark.parametrize(("labels", "target"), [(IDS, ""), (MASKED, "loss_mask"), (OTHER, "labels")])
def test_samples_come_back_whatever_is_stored(tmp_path, labels, target, vocab_size, has_ends, compression):
    ends = IDS % 7 == 0
    writer = Writer(tmp_path, 33, 4096, True, has_ends, vocab_size, compression)
    writer.write(IDS, labels, ends if has_ends else None)
    writer.close()
    found, reader = read(tmp_path)
    assert [ids.tolist() for ids, _, _ in found] == IDS.tolist()
    assert [row.tolist() for _, row, _ in found] == labels.tolist()
    assert all(ids.dtype == row.dtype == np.int32 for ids, row, _ in found)
    assert [end if end is None else end.tolist() for _, _, end in found] == (ends.tolist() if has_ends else [None] * 50)
    narrow = vocab_size == 65_536
    wanted = ShardColumns("<u2" if narrow else "<i4", "labels" if vocab_size is None else target, has_ends)
    assert {shard.columns for shard in reader.shards} == {wanted}
    plain = Writer(tmp_path / "plain", 33, 4096, has_ends=has_ends)
    assert reader.shard_samples[:-1] == [plain.samples_per_shard] * (len(reader.shards) - 1), "the order depends on it"
    names = {path.name for path in tmp_path.glob("shard.*")}
    assert names == {shard.stored.name for shard in reader.shards} and all(
        ("zstd" in n) == bool(compression) for n in names
    )


def test_each_shard_stores_what_it_needs(tmp_path):
    labels = IDS.copy()
    labels[-1, 20:] = -100
    writer = Writer(tmp_path, 33, 4096, True, vocab_size=1 << 16)
    writer.write(IDS, labels)
    writer.close()
    found, reader = read(tmp_path)
    assert [shard.columns.target for shard in reader.shards] == [""] * (len(reader.shards) - 1) + ["loss_mask"]
    assert [row.tolist() for _, row, _ in found] == labels.tolist()


def test_bytes_of_a_token():
    rows = [np.zeros((1, 2049), np.int32)] * 3
    taken = {
        columns: columns.records(rows[: len(columns.types)]).shape[1] / 2049
        for columns in (
            ShardColumns(),
            ShardColumns("<u2", ""),
            ShardColumns("<u2", "loss_mask"),
            ShardColumns("<u2", "loss_mask", True),
        )
    }
    assert [round(each, 1) for each in taken.values()] == [8.0, 2.0, 3.0, 4.0]


def test_other_columns_are_refused_and_names_alone_do_not_decide():
    for columns in (ShardColumns("<u2", "", True), ShardColumns("<i4", "loss_mask")):
        names, encodings = list(columns.encodings), list(columns.encodings.values())
        entry = {"column_names": names, "column_encodings": encodings}
        assert shard_columns(entry) == columns
        data = json.dumps(
            {"version": 2, "shards": [{**HEAD, **entry, "column_encodings": ["ndarray:int64", *encodings[1:]]}]}
        )
        with pytest.raises(BadShard, match="ndarray:int64"):
            parse_shard_index(data.encode(), "here")
    assert narrowest(IDS, IDS, False, 300) == ShardColumns("<u2", "")


def test_a_shard_of_before_is_read(tmp_path):
    writer = Writer(tmp_path, 33, 4096, True)
    writer.write(IDS, MASKED)
    writer.close()
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["shards"][0]["column_encodings"] == ["ndarray:int32", "ndarray:int32"]
    assert parse_shard_index(json.dumps(index).encode(), "here")[0].columns == ShardColumns()
    assert [row.tolist() for _, row, _ in read(tmp_path)[0]] == MASKED.tolist()


@pytest.mark.parametrize("has_ends", [False, True])
def test_weights_are_stored_in_the_shards_that_have_some(tmp_path, has_ends):
    percent = np.full(IDS.shape, 100, np.uint8)
    percent[30, 4:9] = [0, 1, 50, 99, 100]
    writer = Writer(tmp_path, 33, 4096, True, has_ends, 1 << 16)
    for start in range(0, 50, 7):
        rows = slice(start, start + 7)
        writer.write(IDS[rows], MASKED[rows], IDS[rows] % 7 == 0 if has_ends else None, percent[rows])
    writer.close()
    found, reader = read(tmp_path)
    assert [(ids.tolist(), row.tolist()) for ids, row, _ in found] == [*zip(IDS.tolist(), MASKED.tolist())]
    at = 30 // reader.shard_samples[0]
    stored = [shard.columns for shard in reader.shards]
    assert [one.has_percent for one in stored] == [number == at for number in range(len(stored))] and reader.has_percent
    assert {one._replace(has_percent=False) for one in stored} == {ShardColumns("<u2", "loss_mask", has_ends)}
    places = [(number, row) for number, count in enumerate(reader.shard_samples) for row in range(count)]
    for (number, row), wanted in zip(places, percent.tolist(), strict=True):
        held = reader.percent(number, row)
        assert (held is None) == (number != at) and (held is None or held.tolist() == wanted)
        if has_ends:
            assert reader.ends(number, row).tolist() == (IDS[places.index((number, row))] % 7 == 0).tolist()
    plain = Writer(tmp_path / "plain", 33, 4096, has_ends=has_ends)
    assert reader.shard_samples[0] == plain.samples_per_shard, "the order depends on it"


def test_samples_of_several_lengths_in_a_shard_are_refused():
    columns = ShardColumns("<u2", "")
    short, long = (columns.records([np.zeros((1, length), np.int32)])[0] for length in (33, 34))
    head = 4 + 4 * 3
    for records, message in (((short, short), None), ((short, long), "samples of several lengths")):
        offsets = head + np.cumsum([0, *map(len, records)])
        data = np.concatenate([np.zeros(head, np.uint8), *records])
        if message is None:
            assert columns.table(data, offsets, "here", "repair").ids.shape == (2, 33)
            continue
        with pytest.raises(BadShard, match=message):
            columns.table(data, offsets, "here", "repair")
