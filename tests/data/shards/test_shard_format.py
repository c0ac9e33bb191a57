"""A shard's bytes are those that a Writer writes, whoever makes them."""

import json

import numpy as np
import pytest

from windlass.data.shards.mds import Reader, Writer
from windlass.data.shards.shard_format import ShardFormat, stored_name

IDS = np.random.default_rng(0).integers(0, 500, (9, 12)).astype(np.int32)
LABELS = np.where(IDS % 3 == 0, -100, IDS).astype(np.int32)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("has_ends", [False, True])
def test_bytes_and_entry_are_those_of_a_writer(tmp_path, has_ends, compression):
    writer = Writer(tmp_path / "set", 12, 1200, has_ends=has_ends, vocab_size=500, compression=compression)
    ends = [IDS == 7] * has_ends
    writer.write(IDS, LABELS, *ends)
    writer.close()
    entries = json.loads((tmp_path / "set" / "index.json").read_text())["shards"]
    made = ShardFormat(12, 1200, has_ends, 500, compression)
    size = made.samples_per_shard
    assert size == writer.samples_per_shard and len(entries) == -(-9 // size) > 1
    for number, entry in enumerate(entries):
        rows = slice(number * size, (number + 1) * size)
        found, stored = made.encoded(number, [IDS[rows], LABELS[rows], *(one[rows] for one in ends)])
        assert found == entry
        assert b"".join(map(bytes, stored)) == (tmp_path / "set" / stored_name(entry)).read_bytes()


def test_a_shard_made_elsewhere_is_adopted_and_stays_where_it_was(tmp_path):
    writer = Writer(tmp_path / "set", 12, 1 << 20, vocab_size=500)
    entry, stored = writer.format.encoded(0, [IDS, LABELS])
    (tmp_path / "made").write_bytes(b"".join(map(bytes, stored)))
    writer.adopt(entry, tmp_path / "made")
    writer.write(LABELS.clip(0), LABELS)
    writer.close()
    assert writer.num_shards == 2 and (tmp_path / "made").exists()
    found = [ids.tolist() for ids, _ in Reader(tmp_path / "set")]
    assert found == IDS.tolist() + LABELS.clip(0).tolist()
