"""The shard format, byte by byte, and every way in which a shard can be wrong."""

import gzip
import itertools
import json
import struct

import numpy as np
import pytest
import xxhash
import zstandard

from windlass.data.shards import mds
from windlass.data.shards.mds import Folder, Reader, Writer
from windlass.errors import BadShard


def write(directory, num_samples=50, num_ids=9, shard_bytes=4096, seed=0):
    ids = np.random.default_rng(seed).integers(0, 1000, (num_samples, num_ids)).astype(np.int32)
    labels = np.where(np.arange(num_ids) % 3 == 0, -100, ids).astype(np.int32)
    writer = Writer(directory, num_ids, shard_bytes)
    for at in range(0, num_samples, 7):
        writer.write(ids[at : at + 7], labels[at : at + 7])
    writer.close()
    return ids, labels


def decode_by_the_specification(path):
    """An independent decoder, written from the format's description with struct alone."""
    data = path.read_bytes()
    (count,) = struct.unpack_from("<I", data)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    config = json.loads(data[4 + 4 * (count + 1) : offsets[0]])
    samples = []
    for start, end in itertools.pairwise(offsets):
        sizes = struct.unpack_from("<2I", data, start)
        assert start + 8 + sum(sizes) == end
        columns, at = [], start + 8
        for size in sizes:
            dims, width = data[at] >> 2, 1 << (data[at] & 3)
            (length,) = struct.unpack_from({1: "<B", 2: "<H", 4: "<I"}[width], data, at + 1)
            assert dims == 1 and size == 1 + width + 4 * length
            columns.append(struct.unpack_from(f"<{length}i", data, at + 1 + width))
            at += size
        samples.append(columns)
    return config, samples


@pytest.mark.parametrize("num_ids", [2, 255, 256, 65535, 65536])
def test_a_shard_is_the_format_byte_by_byte(tmp_path, num_ids):
    ids, labels = write(tmp_path / "x", num_samples=3, num_ids=num_ids, shard_bytes=1 << 24)
    config, samples = decode_by_the_specification(tmp_path / "x" / "shard.00000.mds")
    assert [list(sample[0]) for sample in samples] == ids.tolist()
    assert [list(sample[1]) for sample in samples] == labels.tolist()
    assert config["column_names"] == ["input_ids", "labels"] and config["column_encodings"] == ["ndarray:int32"] * 2
    entry = json.loads((tmp_path / "x" / "index.json").read_text())["shards"][0]
    assert {key: entry[key] for key in config} == config and entry["zip_data"] is None and entry["samples"] == 3
    data = (tmp_path / "x" / "shard.00000.mds").read_bytes()
    assert entry["raw_data"]["bytes"] == len(data)
    assert entry["raw_data"]["hashes"] == {"xxh64": xxhash.xxh64_hexdigest(data)}


def test_a_shard_of_fixed_ids_never_changes(tmp_path):
    """The golden shard. If this changes, prepared.ALGORITHM_VERSION must be raised."""
    writer = Writer(tmp_path / "x", 3, 4096)
    writer.write(np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(6, dtype=np.int32).reshape(2, 3))
    writer.close()
    assert xxhash.xxh64_hexdigest((tmp_path / "x" / "shard.00000.mds").read_bytes()) == "67ff61758c1e8459"


@pytest.mark.parametrize("num_ids", [3, 300])
def test_ends_of_documents_are_a_third_column_where_they_are_stored(tmp_path, num_ids):
    draw = np.random.default_rng(0)
    ids, labels = draw.integers(0, 99, (2, 50, num_ids)).astype(np.int32)
    ends = draw.random((50, num_ids)) < 0.2
    writer = Writer(tmp_path / "x", num_ids, 4096, has_ends=True)
    writer.write(ids[:20], labels[:20], ends[:20])
    writer.write(ids[20:], labels[20:], ends[20:])
    writer.close()
    entry = json.loads((tmp_path / "x" / "index.json").read_text())["shards"][0]
    assert entry["column_names"] == ["input_ids", "labels", "document_ends"]
    assert entry["column_encodings"] == ["ndarray:int32", "ndarray:int32", "ndarray:uint8"]
    reader = Reader(tmp_path / "x")
    places = [(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)]
    for at, place in enumerate(places):
        found_ids, found_labels = reader.read(*place)
        assert (found_ids == ids[at]).all() and (found_labels == labels[at]).all()
        found = reader.ends(*place)
        assert found.dtype == bool and (found == ends[at]).all()
    write(tmp_path / "plain")
    assert Reader(tmp_path / "plain").ends(0, 0) is None


def test_ends_of_another_length_than_the_ids_are_refused(tmp_path):
    writer = Writer(tmp_path / "x", 3, 4096, has_ends=True)
    three = np.arange(6, dtype=np.int32).reshape(2, 3)
    writer.write(three, three, three > 2)
    writer.close()
    path, index = tmp_path / "x" / "shard.00000.mds", tmp_path / "x" / "index.json"
    data = bytearray(path.read_bytes())
    at = int(data[4:8][0]) + 256 * data[5]  # the first sample
    data[at + 8] += 1  # the size of its ends
    path.write_bytes(data)
    promised = json.loads(index.read_text())
    promised["shards"][0]["raw_data"]["hashes"] = {"xxh64": xxhash.xxh64_hexdigest(bytes(data))}
    index.write_text(json.dumps(promised))
    with pytest.raises(BadShard, match="has samples with labels of another length"):
        Reader(tmp_path / "x").read(0, 0)


def test_the_reader_gives_back_what_was_written_across_shards(tmp_path):
    ids, labels = write(tmp_path / "x")
    reader = Reader(tmp_path / "x", max_mapped=1)
    assert len(reader.shards) > 1 and reader.num_samples == 50 and sum(reader.shard_samples) == 50
    for (found_ids, found_labels), wanted_ids, wanted_labels in zip(reader, ids, labels, strict=True):
        assert (found_ids == wanted_ids).all() and (found_labels == wanted_labels).all()
    places = [(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)]
    for at in np.random.default_rng(1).permutation(50)[:20]:  # random access, with shards mapped anew
        assert (reader.read(*places[at])[0] == ids[at]).all()


def test_shards_stay_below_their_size_and_a_large_sample_still_fits_alone(tmp_path):
    write(tmp_path / "x", shard_bytes=4096)
    sizes = [shard.num_bytes for shard in Reader(tmp_path / "x").shards]
    assert len(sizes) > 1 and max(sizes) <= 4096
    write(tmp_path / "y", num_samples=2, num_ids=5000, shard_bytes=4096)
    assert Reader(tmp_path / "y").shard_samples == [1, 1]


def spoil(directory, what):
    """Damages a dataset in one way; returns the path that the error must name."""
    shard = directory / "shard.00001.mds"
    data = bytearray(shard.read_bytes())
    if what == "missing":
        shard.unlink()
    elif what == "truncated":
        shard.write_bytes(data[:-1])
    elif what == "longer":
        shard.write_bytes(data + b"\0")
    elif what == "zeroed":
        shard.write_bytes(bytes(len(data)))
    elif what == "stale":  # the same shard of another preparation: equal size, other content
        write(directory.with_name("other"), num_samples=120, seed=1)
        shard.write_bytes((directory.with_name("other") / shard.name).read_bytes())
    elif what == "swapped":
        shard.write_bytes((directory / "shard.00000.mds").read_bytes())
    return shard


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("missing", "is missing"),
        ("truncated", "truncated, or of another preparation"),
        ("longer", "truncated, or of another preparation"),
        ("zeroed", "has the hash xxh64"),
        ("stale", "has the hash xxh64"),
        ("swapped", "has the hash xxh64"),
    ],
)
def test_a_damaged_shard_is_named_with_both_values(tmp_path, what, says):
    write(tmp_path / "x", num_samples=120)
    promised = json.loads((tmp_path / "x" / "index.json").read_text())["shards"][1]["raw_data"]
    path = spoil(tmp_path / "x", what)
    with pytest.raises(BadShard) as caught:
        list(Reader(tmp_path / "x"))
    assert str(path) in caught.value.given and says in caught.value.given
    assert (promised["hashes"]["xxh64"] if "hash" in says else f"{promised['bytes']} bytes") in caught.value.rule


def test_every_flipped_bit_of_a_shard_is_found(tmp_path):
    write(tmp_path / "x", num_samples=20)
    path = tmp_path / "x" / "shard.00000.mds"
    data = path.read_bytes()
    for bit in np.random.default_rng(0).integers(0, 8 * len(data), 200).tolist():
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        with pytest.raises(BadShard, match=r"shard\.00000\.mds has the hash xxh64"):
            list(Reader(tmp_path / "x"))


def test_a_flipped_bit_of_the_index_gives_the_same_samples_or_a_named_error(tmp_path):
    ids, _ = write(tmp_path / "x", num_samples=20)
    path = tmp_path / "x" / "index.json"
    data = path.read_bytes()
    refused = 0
    for bit in np.random.default_rng(0).integers(0, 8 * len(data), 300).tolist():
        spoiled = bytearray(data)
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        try:
            found = np.stack([sample for sample, _ in Reader(tmp_path / "x")])
            assert (found == ids).all()
        except BadShard:
            refused += 1
    assert refused > 150


def change_entry(directory, **changes):
    path = directory / "index.json"
    index = json.loads(path.read_text())
    index["shards"][0] |= changes
    path.write_text(json.dumps(index))


RAW = {"basename": "shard.00000.mds", "bytes": 10, "hashes": {"xxh64": "0"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"raw_data": {**RAW, "basename": "../../secret"}}, "names the file '../../secret'"),
        ({"raw_data": {**RAW, "basename": "/etc/passwd"}}, "names the file '/etc/passwd'"),
        ({"raw_data": {**RAW, "basename": ".."}}, "names the file '..'"),
        ({"raw_data": {**RAW, "hashes": {}}}, "has no hash of shard.00000.mds"),
        ({"raw_data": {**RAW, "bytes": True}}, "of True bytes"),
        ({"raw_data": None}, "is not an entry of an MDS index"),
        ({"samples": 0}, "has 0 samples"),
        ({"column_encodings": ["pkl", "pkl"]}, "has column_encodings ['pkl', 'pkl']"),
        ({"column_names": ["labels", "input_ids"]}, "has column_names ['labels', 'input_ids']"),
        ({"column_sizes": [36, 36]}, "has column_sizes [36, 36]"),
        ({"compression": "zstd"}, "has compression 'zstd' and zip_data None"),
        ({"format": "jsonl"}, "has format 'jsonl'"),
        ({"version": 3}, "has version 3"),
    ],
)
def test_an_index_that_asks_for_more_than_ids_and_labels_is_refused(tmp_path, changes, says):
    write(tmp_path / "x")
    change_entry(tmp_path / "x", **changes)
    with pytest.raises(BadShard) as caught:
        Reader(tmp_path / "x")
    assert says in caught.value.given and "shard 0" in caught.value.given


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        ("{", "is not JSON"),
        ("[]", "is not an MDS index"),
        ('{"version": 2, "shards": []}', "lists 0 shards"),
    ],
)
def test_a_bad_index_is_named(tmp_path, content, says):
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(BadShard) as caught:
        Reader(tmp_path)
    assert f"{tmp_path}/index.json" in caught.value.given and says in caught.value.given


def resealed(directory, change):
    """Shard 0 changed by `change(bytearray)`, with the index's hash made to fit: what a foreign writer could leave."""
    path = directory / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)
    raw = {"basename": path.name, "bytes": len(data), "hashes": {"xxh64": xxhash.xxh64_hexdigest(bytes(data))}}
    change_entry(directory, raw_data=raw)


def test_a_header_that_contradicts_the_index_is_refused_even_with_a_right_hash(tmp_path):
    write(tmp_path / "x")
    resealed(tmp_path / "x", lambda data: data.__setitem__(0, data[0] + 1))
    with pytest.raises(BadShard, match="samples up to byte"):
        list(Reader(tmp_path / "x"))


def test_labels_of_another_length_are_refused_even_with_a_right_hash(tmp_path):
    write(tmp_path / "x")

    def lengthen(data):
        first = struct.unpack_from("<I", data, 4)[0]
        struct.pack_into(
            "<2I", data, first, *(size + step for size, step in zip(struct.unpack_from("<2I", data, first), (4, -4)))
        )

    resealed(tmp_path / "x", lengthen)
    with pytest.raises(BadShard, match="labels of another length"):
        list(Reader(tmp_path / "x"))


def test_a_dataset_without_its_end_is_no_dataset(tmp_path):
    writer = Writer(tmp_path / "x", 3, 4096)
    writer.write(np.zeros((2000, 3), np.int32), np.zeros((2000, 3), np.int32))
    assert (tmp_path / "x" / "shard.00000.mds").exists()
    with pytest.raises(BadShard, match=r"index\.json does not exist"):
        Reader(tmp_path / "x")


def compressed(directory, compression):
    """The dataset as MosaicML's writer leaves it with `compression`: packed shards only, both forms in the index."""
    pack = {"zstd": zstandard.compress, "gz": gzip.compress}[compression]
    index = json.loads((directory / "index.json").read_text())
    for entry in index["shards"]:
        path = directory / entry["raw_data"]["basename"]
        data = pack(path.read_bytes())
        path.unlink()
        (directory / f"{path.name}.{compression}").write_bytes(data)
        hashes = {"xxh64": xxhash.xxh64_hexdigest(data)}
        entry["zip_data"] = {"basename": f"{path.name}.{compression}", "bytes": len(data), "hashes": hashes}
        entry["compression"] = f"{compression}:5"
    (directory / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("compression", ["zstd", "gz"])
def test_compressed_shards_are_read_and_a_flipped_bit_is_named(tmp_path, compression):
    ids, _ = write(tmp_path / "x", num_samples=120)
    compressed(tmp_path / "x", compression)
    assert (np.stack([sample for sample, _ in Reader(tmp_path / "x", max_mapped=1)]) == ids).all()
    path = tmp_path / "x" / f"shard.00001.mds.{compression}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(BadShard) as caught:
        list(Reader(tmp_path / "x"))
    assert f"{path} has the hash xxh64" in caught.value.given


@pytest.mark.parametrize(("at", "value"), [(1, 1 << 31), (2, 4), (0, 0)])
def test_offsets_out_of_place_are_refused_even_with_a_right_hash(tmp_path, at, value):
    write(tmp_path / "x")
    resealed(tmp_path / "x", lambda data: struct.pack_into("<I", data, 4 + 4 * at, value))
    with pytest.raises(BadShard, match="samples that overlap or are empty"):
        list(Reader(tmp_path / "x"))


def test_a_folder_is_opened_by_its_index_alone_and_checked_where_that_is_asked(tmp_path, monkeypatch):
    directory = tmp_path / "train"
    write(directory, num_samples=100, num_ids=9, shard_bytes=1500)
    looked = []
    monkeypatch.setattr(mds, "_check_file", lambda file, *_: looked.append(file.name))
    folder = Folder(directory)
    assert looked == []
    folder.load(1)
    assert looked == [folder.shards[1].stored.name]
    folder.check()
    assert looked[1:] == [shard.stored.name for shard in folder.shards]
    monkeypatch.undo()
    (directory / folder.shards[0].stored.name).unlink()
    folder.check(max_missing=1)
    with pytest.raises(BadShard, match="is missing"):
        folder.check()
