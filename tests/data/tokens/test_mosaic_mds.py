"""MDS as others write it: any column, with or without hashes; what cannot be read is refused by name."""

import json

import numpy as np
import pytest

from tests.data.tokens import writers
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.shards.mds import Writer
from windlass.data.tokens.mosaic_mds import mosaic_rows, read_mosaic_index, verify_shard
from windlass.errors import UserError

ROWS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def rows_of(directory, column=None, id_type=None):
    shards = read_mosaic_index(directory / "index.json")
    return [row for shard in shards for row in mosaic_rows(directory / shard.file, shard, column, id_type)]


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7"])
@pytest.mark.parametrize(("encoding", "dtype"), [("bytes", "<i8"), ("ndarray:uint16", "<u2"), ("ndarray:int64", "<i8")])
def test_rows_of_any_length(tmp_path, encoding, dtype, compression):
    writers.mds(tmp_path, ROWS, encoding, dtype, ["sha1"], compression, rows_per_shard=3, extra=True)
    found = rows_of(tmp_path)
    assert [row.ids.tolist() for row in found] == ROWS and found[0].ids.dtype == dtype
    assert found[3].where.endswith(f"shard.00001.mds{'.zstd' if compression else ''}, row 0,")


def test_rows_of_a_fixed_shape(tmp_path):
    rows = [[1, 2, 3], [4, 5, 6]]
    writers.mds(tmp_path, rows, "ndarray:uint32:3", "<u4")
    assert [row.ids.tolist() for row in rows_of(tmp_path)] == rows


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"column": "ids"}, "shard.00000.mds has the columns id, tokens"),
        ({"column": "id"}, "has the column id as str"),
        ({"encoding": "ndarray:float32", "dtype": "<f4"}, "has the column tokens as ndarray:float32"),
        ({"encoding": "ndarray:uint16", "dtype": "<u2", "id_type": "int64"}, "which is ndarray:uint16"),
        ({"id_type": "int64", "dtype": "<u2"}, "has row 0 of 6 bytes"),
    ],
)
def test_a_column_that_holds_no_ids_is_refused(tmp_path, given, says):
    column, id_type = given.pop("column", None), given.pop("id_type", None)
    writers.mds(tmp_path, ROWS, extra=True, **given)
    with pytest.raises(UserError) as caught:
        rows_of(tmp_path, column, id_type)
    assert says in caught.value.given


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "xsv"}, "cannot be read as an index of MDS"),
        ({"samples": None}, "cannot be read as an index of MDS"),
        ({"column_sizes": []}, "cannot be read as an index of MDS"),
        ({"raw_data": {"basename": "../x", "bytes": 1}}, "names the file '../x'"),
        ({"compression": "br", "zip_data": {"basename": "x", "bytes": 1}}, "has shards compressed with br"),
    ],
)
def test_an_index_that_says_nonsense_is_refused(tmp_path, change, says):
    writers.mds(tmp_path, ROWS)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0] |= change
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError) as caught:
        read_mosaic_index(tmp_path / "index.json")
    assert says in caught.value.given


@pytest.mark.parametrize("at", [0, 5, 9, -8, -1])
def test_one_wrong_byte_is_an_error_or_another_id_and_never_a_crash(tmp_path, at):
    writers.mds(tmp_path, ROWS, "ndarray:uint16", "<u2", ["md5"])
    path, (shard,) = tmp_path / "shard.00000.mds", read_mosaic_index(tmp_path / "index.json")
    verify_shard(path, shard)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(UserError, match="has the hash md5"):
        verify_shard(path, shard)
    try:
        assert len(rows_of(tmp_path)) == 4
    except UserError as error:
        assert str(path) in error.given


def test_a_short_file_is_refused(tmp_path):
    writers.mds(tmp_path, ROWS)
    path, (shard,) = tmp_path / "shard.00000.mds", read_mosaic_index(tmp_path / "index.json")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"has [0-9]+ bytes"):
        verify_shard(path, shard)
    with pytest.raises(UserError, match="bytes, unpacked"):
        rows_of(tmp_path)


def test_shards_that_say_what_is_learned_are_not_read_as_ids_alone(tmp_path):
    """As windlass writes conversations."""
    ids = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    labels = np.where(ids % 3 == 0, ids, NOT_COUNTED).astype(np.int32)
    writer = Writer(tmp_path / "chats", 4, 1 << 12, has_ends=True, vocab_size=300)
    writer.write(ids, labels, (ids == 4).astype(np.uint8))
    writer.close()
    with pytest.raises(UserError) as caught:
        rows_of(tmp_path / "chats")
    assert "has `loss_mask` and `document_ends` beside its ids" in caught.value.given
    assert [row.ids.tolist() for row in rows_of(tmp_path / "chats", "input_ids")] == ids.tolist()
