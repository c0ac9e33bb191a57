"""What an index may ask for, and that compressed shards are unpacked only into what was promised."""

import gzip
import hashlib
import json

import pytest
import xxhash
import zstandard

from windlass.data.shards.index import MAX_BYTES, parse_shard_index, unpack_shard
from windlass.errors import BadShard

RAW = bytes(range(256)) * 40


def promise(name, data, algorithm="xxh64"):
    digest = {"sha1": lambda d: hashlib.sha1(d).hexdigest()}.get(algorithm, xxhash.xxh64_hexdigest)
    return {"basename": name, "bytes": len(data), "hashes": {algorithm: digest(data)}}


def entry(**changes):
    columns = {"column_names": ["input_ids", "labels"], "column_encodings": ["ndarray:int32"] * 2}
    facts = {
        "format": "mds",
        "version": 2,
        "compression": None,
        "zip_data": None,
        "samples": 3,
        "column_sizes": [None] * 2,
    }
    return {**columns, **facts, "raw_data": promise("s.mds", RAW), **changes}


def parsed(**changes):
    return parse_shard_index(json.dumps({"version": 2, "shards": [entry(**changes)]}).encode(), "there/index.json")[0]


def refused(call, *arguments, **changes):
    with pytest.raises(BadShard) as caught:
        call(*arguments, **changes)
    return caught.value


def packed(compression, data, raw=RAW):
    name = f"s.mds.{compression.partition(':')[0]}"
    return parsed(compression=compression, zip_data=promise(name, data), raw_data=promise("s.mds", raw))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"raw_data": {**promise("s.mds", RAW), "bytes": -5}}, "s.mds of -5 bytes"),
        ({"raw_data": {**promise("s.mds", RAW), "bytes": MAX_BYTES + 1}}, f"of {MAX_BYTES + 1} bytes"),
        ({"raw_data": {**promise("s.mds", RAW), "bytes": 10.0}}, "of 10.0 bytes"),
        ({"raw_data": promise("index.json", RAW)}, "names the file 'index.json'"),
        ({"raw_data": promise("a/b.mds", RAW)}, "names the file 'a/b.mds'"),
        ({"raw_data": {**promise("s.mds", RAW), "hashes": None}}, "has no hash of s.mds"),
        ({"raw_data": {**promise("s.mds", RAW), "hashes": {"crc32": "0"}}}, "has no hash of s.mds"),
        ({"samples": len(RAW)}, f"has {len(RAW)} samples in {len(RAW)} bytes"),
        ({"samples": -1}, "has -1 samples"),
        ({"compression": "snappy", "zip_data": promise("s.mds.snappy", b"x")}, "compression 'snappy'"),
        ({"compression": "br:11", "zip_data": promise("s.mds.br", b"x")}, "compression 'br:11'"),
        ({"compression": 7}, "compression 7"),
        ({"compression": None, "zip_data": promise("s.mds.zstd", b"x")}, "compression None and zip_data {"),
        ({"compression": "gz", "zip_data": promise("../../x", b"x")}, "names the file '../../x'"),
        ({"compression": "gz", "zip_data": [1]}, "has list for a file"),
        ({"column_encodings": ["pkl", "ndarray:int32"]}, "column_encodings ['pkl', 'ndarray:int32']"),
    ],
)
def test_what_an_index_may_not_ask_for_is_refused_by_name(changes, says):
    error = refused(parsed, **changes)
    assert says in error.given and "shard 0 in there/index.json" in error.given
    if "compression" in says and "zip_data" not in says:
        assert "zstd or gz" in error.rule


def test_an_absent_hash_says_how_to_write_one():
    assert "hashes=['xxh64']" in refused(parsed, raw_data={**promise("s.mds", RAW), "hashes": {}}).change


@pytest.mark.parametrize("algorithm", ["xxh64", "sha1"])
def test_a_plain_shard_is_what_the_index_promises(algorithm):
    shard = parsed(raw_data=promise("s.mds", RAW, algorithm))
    assert unpack_shard(shard, RAW, "s3://b/s.mds") == RAW
    error = refused(unpack_shard, shard, RAW[:-1] + b"?", "s3://b/s.mds")
    assert f"s3://b/s.mds has the hash {algorithm}" in error.given and shard.raw.digest in error.rule
    assert f"has {len(RAW) - 1} bytes (truncated" in refused(unpack_shard, shard, RAW[:-1], "s3://b/s.mds").given


@pytest.mark.parametrize(("compression", "compress"), [("zstd:3", zstandard.compress), ("gz", gzip.compress)])
def test_a_compressed_shard_is_unpacked_and_both_forms_verified(compression, compress):
    data = compress(RAW)
    shard = packed(compression, data)
    assert shard.compression == compression.partition(":")[0] and unpack_shard(shard, data, "u") == RAW
    spoilt = bytearray(data)
    spoilt[len(data) // 2] ^= 1
    assert "u has the hash xxh64" in refused(unpack_shard, shard, bytes(spoilt), "u").given
    other = packed(compression, data, raw=RAW[::-1])  # the packed bytes are right, what they hold is not
    assert "u, unpacked, has the hash xxh64" in refused(unpack_shard, other, data, "u").given
    broken = packed(compression, bytes(spoilt))  # a right hash of bytes that are no such stream
    assert "unpacked" in refused(unpack_shard, broken, bytes(spoilt), "u").given


@pytest.mark.parametrize(("compression", "compress"), [("zstd", zstandard.compress), ("gz", gzip.compress)])
def test_unpacking_stops_at_the_promised_size(compression, compress):
    bomb = compress(bytes(30 << 20))
    error = refused(unpack_shard, packed(compression, bomb), bomb, "u")
    assert f"u, unpacked, has {len(RAW) + 1} bytes" in error.given
