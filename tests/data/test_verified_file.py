"""Whatever part of a file is read: the bytes that were hashed, or an error."""

import io

import pytest
import xxhash

from windlass.data import verified_file as room
from windlass.data.verified_file import OtherBytes, VerifiedFile, hash_blocks, line_ends_before


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(room, "BLOCK_BYTES", 10)


DATA = b"one\ntwo\n\nthree\nfour\nfive\n and no end"


def test_hash_size_and_line_ends():
    digest, num_bytes, blocks = hash_blocks(io.BytesIO(DATA))
    assert (digest, num_bytes) == (xxhash.xxh3_128_hexdigest(DATA), len(DATA))
    assert line_ends_before(blocks).tolist() == [DATA[:at].count(b"\n") for at in range(0, len(DATA), 10)]
    assert hash_blocks(io.BytesIO(b""))[1:] == (0, b"") and len(line_ends_before(b"")) == 0


def test_any_part_is_what_was_hashed():
    _, num_bytes, blocks = hash_blocks(io.BytesIO(DATA))
    file = io.BufferedReader(VerifiedFile(io.BytesIO(DATA), num_bytes, blocks), 7)
    for begin in range(len(DATA) + 1):
        assert file.seek(begin) == begin and file.read(13) == DATA[begin : begin + 13]
    assert file.seek(-4, io.SEEK_END) == file.tell() == len(DATA) - 4 and file.read() == DATA[-4:]


def test_blocks_from_a_later_one_on_are_enough_for_what_is_behind():
    _, num_bytes, blocks = hash_blocks(io.BytesIO(DATA))
    file = VerifiedFile(io.BytesIO(DATA), num_bytes, blocks[2 * 12 :], first_block=2)
    file.seek(20)
    assert io.BufferedReader(file).read() == DATA[20:]


@pytest.mark.parametrize("at", [0, 9, 10, 25, len(DATA) - 1])
def test_a_changed_byte_is_found_by_whoever_reads_its_block(at):
    _, num_bytes, blocks = hash_blocks(io.BytesIO(DATA))
    changed = DATA[:at] + b"X" + DATA[at + 1 :]
    for begin in range(0, len(DATA), 10):
        file = VerifiedFile(io.BytesIO(changed), num_bytes, blocks)
        file.seek(begin)
        if begin <= at < begin + 10:
            with pytest.raises(OtherBytes):
                file.read(3)
        else:
            assert file.read(3) == DATA[begin : begin + 3]


def test_a_file_of_another_size_is_not_opened():
    _, num_bytes, blocks = hash_blocks(io.BytesIO(DATA))
    for other in (DATA[:-1], DATA + b"\n"):
        with pytest.raises(OtherBytes):
            VerifiedFile(io.BytesIO(other), num_bytes, blocks)
