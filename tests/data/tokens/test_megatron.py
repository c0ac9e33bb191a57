"""Megatron-LM's two files: what each byte of the head means, and every contradiction refused by name."""

import struct

import numpy as np
import pytest

from tests.data.tokens import writers
from windlass.data.tokens.megatron import megatron_rows, read_megatron_index
from windlass.errors import UserError


@pytest.mark.parametrize(
    ("code", "letter", "dtype"), [(4, "i", "<i4"), (5, "q", "<i8"), (8, "H", "<u2"), (1, "B", "u1")]
)
def test_documents_are_their_sequences_joined(tmp_path, code, letter, dtype):
    documents = [*writers.some_documents(0, 20, below=200), []]
    writers.megatron(tmp_path / "x.bin", documents, code, letter, sequences_each=3)
    index = read_megatron_index(tmp_path / "x.idx")
    assert index.dtype == np.dtype(dtype) and index.lengths.sum() == sum(map(len, documents))
    rows = list(megatron_rows(tmp_path / "x.bin", index))
    assert [row.ids.tolist() for row in rows] == documents and rows[2].where == f"{tmp_path}/x.bin, document 2,"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data[:20], "is no index of Megatron-LM"),
        (lambda data: b"PARQUET!!" + data[9:], "is no index of Megatron-LM"),
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "has version 2 and ids of type 8"),
        (lambda data: data[:17] + b"\x07" + data[18:], "has version 1 and ids of type 7"),
        (lambda data: data[:-9], "is too short for"),
        (lambda data: data[:34] + struct.pack("<i", -1) + data[38:], "contradicts itself"),
        (lambda data: data[:-8] + struct.pack("<q", 10**9), "contradicts itself"),
    ],
)
def test_a_spoilt_index_is_refused(tmp_path, spoil, says):
    writers.megatron(tmp_path / "x.bin", writers.some_documents(0, 5))
    (tmp_path / "x.idx").write_bytes(spoil((tmp_path / "x.idx").read_bytes()))
    with pytest.raises(UserError) as caught:
        read_megatron_index(tmp_path / "x.idx")
    assert caught.value.given.startswith(f"{tmp_path}/x.idx {says}")


def test_a_bin_that_is_too_short_is_refused(tmp_path):
    writers.megatron(tmp_path / "x.bin", [[1, 2, 3], [4, 5]])
    (tmp_path / "x.bin").write_bytes((tmp_path / "x.bin").read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        list(megatron_rows(tmp_path / "x.bin", read_megatron_index(tmp_path / "x.idx")))
    assert (caught.value.given, caught.value.rule) == (f"{tmp_path}/x.bin has 9 bytes", "its .idx promises 10")
