import os
import random

import pytest
import xxhash

from windlass.checkpoint.hashed_file import PIECE_BYTES, FileEntry, PieceReader, PieceWriter
from windlass.errors import BadCheckpoint, UserError

SIZES = [64, 3, PIECE_BYTES, 2 * PIECE_BYTES + 17, 1, 1, PIECE_BYTES - 1]


def write(path, sizes):
    parts = [random.Random(size).randbytes(size) for size in sizes]
    with PieceWriter(path) as writer:
        starts = [writer.write(memoryview(part)) for part in parts]
        entry = writer.close()
    return b"".join(parts), starts, entry


def test_what_is_written_is_the_concatenation_and_the_pieces_tile_it(tmp_path):
    data, starts, entry = write(tmp_path / "f", SIZES)
    assert (tmp_path / "f").read_bytes() == data
    assert starts == [sum(SIZES[:n]) for n in range(len(SIZES))]
    assert entry.size == sum(entry.lengths) == len(data)
    at = 0
    for length, hash in zip(entry.lengths, entry.pieces):
        assert hash == xxhash.xxh3_128_hexdigest(data[at : at + length])
        at += length
    assert {0, *starts} <= {sum(entry.lengths[:n]) for n in range(len(entry.lengths) + 1)}  # no piece spans two writes
    entry.check("f")


def test_a_small_file_has_the_hash_that_any_tool_prints(tmp_path):
    data, _, entry = write(tmp_path / "f", [1000])
    assert (entry.size, entry.hash, entry.pieces) == (1000, xxhash.xxh3_128_hexdigest(data), [])


def test_many_small_writes_are_all_there(tmp_path):
    data, _, entry = write(tmp_path / "f", [n % 7 + 1 for n in range(3000)])
    assert (tmp_path / "f").read_bytes() == data and len(entry.pieces) == 3000


def test_a_system_that_writes_less_than_asked_loses_nothing(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, views: real(fd, [views[0][: max(1, len(views[0]) // 3)]]))
    data, _, _ = write(tmp_path / "f", [1000, 1, 50_000, 7])
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("seed", range(20))
def test_any_range_reads_back(tmp_path, seed):
    data, _, entry = write(tmp_path / "f", SIZES)
    draw = random.Random(seed)
    at = draw.randrange(len(data))
    length = draw.randrange(1, len(data) - at + 1)
    with PieceReader(tmp_path / "f", entry) as reader:
        assert reader.read(at, length) == data[at : at + length]


def test_a_flipped_bit_is_found_by_ranges_that_touch_its_piece_and_by_no_other(tmp_path):
    data, starts, entry = write(tmp_path / "f", SIZES)
    flipped = bytearray(data)
    flipped[starts[3] + PIECE_BYTES + 5] ^= 4
    (tmp_path / "f").write_bytes(flipped)
    with PieceReader(tmp_path / "f", entry) as reader:
        assert reader.read(0, starts[3] + PIECE_BYTES) == data[: starts[3] + PIECE_BYTES]
        first = starts[3] + PIECE_BYTES
        with pytest.raises(
            BadCheckpoint,
            match=f"f: hash differs in bytes {first} to {first + PIECE_BYTES}: written [0-9a-f]{{32}}, found",
        ):
            reader.read(first + PIECE_BYTES - 1, 1)  # the range need not hold the flipped byte itself


def test_a_file_cut_off_while_it_is_read_is_found(tmp_path):
    data, _, entry = write(tmp_path / "f", SIZES)
    with PieceReader(tmp_path / "f", entry) as reader:
        os.truncate(tmp_path / "f", len(data) - 1)
        with pytest.raises(BadCheckpoint, match="hash differs"):
            reader.read(len(data) - 2, 2)
        with pytest.raises(BadCheckpoint, match=f"size: {len(data) - 1} bytes, not {len(data)}"):
            reader.verify()


def test_a_file_that_a_rank_cannot_see_is_the_users_storage_and_no_bad_checkpoint(tmp_path):
    entry = FileEntry.of([3], ["0" * 32])
    with pytest.raises(UserError, match=r"cannot be opened on .*No such file") as caught:
        PieceReader(tmp_path / "nothing", entry)
    assert not isinstance(caught.value, BadCheckpoint) and "share" in caught.value.change


def test_links_are_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"abc")
    (tmp_path / "f").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="cannot be opened"):
        PieceReader(tmp_path / "f", FileEntry.of([3], [xxhash.xxh3_128_hexdigest(b"abc")]))


@pytest.mark.parametrize(
    "change, why",
    [
        ({"size": 9}, "do not add up"),
        ({"lengths": [5]}, "do not add up"),
        ({"pieces": ["0" * 32, "1" * 32]}, "do not have its hash"),
        ({"pieces": [], "lengths": [], "size": PIECE_BYTES + 1}, "do not add up"),
    ],
)
def test_an_entry_whose_pieces_do_not_make_up_the_file_is_refused(change, why):
    entry = FileEntry.of([5, 3], ["a" * 32, "b" * 32])
    entry.check("f")
    with pytest.raises(BadCheckpoint, match=f"the pieces of f {why}"):
        entry.model_copy(update=change).check("f")
