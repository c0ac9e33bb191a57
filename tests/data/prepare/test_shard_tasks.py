"""Where a stream is cut into shards, and a shard written of its parts alone."""

import io
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from windlass.data import packing
from windlass.data.prepare.shard_tasks import (
    Fitted,
    Joined,
    PartSlice,
    WriteShard,
    fitted_shards,
    joined_shards,
    slices_of_shards,
)
from windlass.data.shards.mds import Reader, Writer

EOS = 1


def write_part(directory: Path, number: int, ids: list[int]) -> Path:
    stream = io.BytesIO()
    np.save(stream, np.array(ids, np.int32))
    np.save(stream, np.array([len(ids)]))
    path = directory / f"{number:06}-{xxhash.xxh3_64_hexdigest(stream.getvalue())}.part"
    path.write_bytes(stream.getvalue())
    return path


def test_a_stream_is_cut_by_hand():
    a, b, c = map(Path, "abc")
    assert list(slices_of_shards([(a, 3), (b, 4), (c, 2)], 4)) == [  # EOS a0 a1 a2 b0 | b0 b1 b2 b3 c0 | c0 c1
        ([PartSlice(a, 0, 3), PartSlice(b, 0, 1)], [a]),
        ([PartSlice(b, 0, 4), PartSlice(c, 0, 1)], [b]),
        ([PartSlice(c, 0, 2)], [c]),
    ]
    # all is in the first, but a second might begin with the last id
    assert list(slices_of_shards([(a, 4)], 4)) == [([PartSlice(a, 0, 4)], [])]
    assert list(slices_of_shards([], 4)) == []


@pytest.mark.parametrize("seed", range(8))
def test_shards_are_those_of_one_writer(tmp_path, seed):
    """Parts and shards of random sizes: the same files as `pack` into a Writer."""
    draw = random.Random(seed)
    T, samples = draw.choice([2, 5, 16]), draw.choice([1, 2, 7])
    parts = [
        [draw.choice([EOS, *range(2, 200)]) for _ in range(draw.choice([0, 1, 3, 40, 200]))]
        for _ in range(draw.randrange(9))
    ]
    whole = Writer(tmp_path / "whole", T + 1, 250 + samples * (8 * T + 40), vocab_size=200)
    for ids, labels in packing.pack((np.array(part, np.int32) for part in parts), EOS, T):
        whole.write(ids, labels)
    whole.close()
    paths = [(write_part(tmp_path, number, part), len(part)) for number, part in enumerate(parts)]
    joined = Writer(tmp_path / "joined", T + 1, 250 + samples * (8 * T + 40), vocab_size=200)
    num_samples, most = 0, 0
    for number, (made_of, _) in enumerate(joined_shards(paths, joined.samples_per_shard * T)):
        task = WriteShard(made_of, number, tmp_path / "made", EOS, joined.format)
        written = task(None)
        joined.adopt(written.entry, task.path)
        num_samples, most = num_samples + written.num_samples, max(most, written.most_documents)
    joined.close()
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "joined")]
    assert files[0] == files[1]
    if sum(map(len, parts)) > 0:
        rows = list(Reader(tmp_path / "whole"))
        assert num_samples == len(rows) and most == max(
            packing.most_documents(ids[None] == EOS, labels[None]) for ids, labels in rows
        )


@pytest.mark.parametrize("seed", range(12))
def test_fitted_shards_are_those_of_one_writer(tmp_path, seed, monkeypatch):
    """Documents of random lengths, some longer than a sequence, some of an EOS alone, in parts of random sizes; small buffers, so
    that samples are dissolved into the next: the same files as `pack_best_fit` into a Writer, and no part is given back early."""
    draw = random.Random(seed)
    T, samples = draw.choice([3, 8, 16]), draw.choice([1, 2, 7])
    monkeypatch.setattr(packing, "BUFFER_SAMPLES", draw.choice([2, 5, 2048]))
    monkeypatch.setattr(packing, "SAMPLES_AT_ONCE", 3)
    parts = [
        [
            id
            for _ in range(draw.randint(1, 12))
            for id in [*draw.choices(range(2, 200), k=draw.choice([0, 1, 3, T, 3 * T])), EOS]
        ]
        for _ in range(draw.randrange(1, 9))
    ]
    settings = (T + 1, 250 + samples * (8 * T + 40))
    whole = Writer(tmp_path / "whole", *settings, vocab_size=200)
    for ids, labels in packing.pack_best_fit((np.array(part, np.int32) for part in parts), EOS, T):
        whole.write(ids, labels)
    whole.close()
    paths = [write_part(tmp_path, number, part) for number, part in enumerate(parts)]
    ends = {path: packing.document_ends(np.array(part), EOS) for path, part in zip(paths, parts)}
    fitted, given_back, used = Writer(tmp_path / "fitted", *settings, vocab_size=200), [], []
    shards = fitted_shards(paths, ends.__getitem__, T, fitted.samples_per_shard)
    for number, (made_of, consumed) in enumerate(shards):
        task = WriteShard(made_of, number, tmp_path / "made", EOS, fitted.format)
        fitted.adopt(task(None).entry, task.path)
        assert not set(made_of.parts) & set(given_back)
        used.append(set(made_of.parts))
        given_back += consumed
    fitted.close()
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "fitted")]
    assert files[0] == files[1] and sorted(given_back) == sorted(paths)


def test_a_damaged_part_makes_no_shard(tmp_path):
    path = write_part(tmp_path, 0, [2, 3, EOS])
    form = Writer(tmp_path / "set", 3, 300).format
    task = WriteShard(Joined([PartSlice(path, 0, 3)], True), 0, tmp_path / "made", EOS, form)
    data = path.read_bytes()
    path.write_bytes(data[:-9] + b"\1" + data[-8:])
    assert task(None) is None and not (tmp_path / "made").exists()
    path.unlink()
    assert task(None) is None
    path.write_bytes(data)
    assert task(None).num_samples == 2


def test_a_shard_is_made_once_and_of_its_own_parts(tmp_path):
    path = write_part(tmp_path, 0, [2, 3, EOS])
    form = Writer(tmp_path / "set", 3, 300).format
    task = WriteShard(Joined([PartSlice(path, 0, 3)], True), 0, tmp_path / "made", EOS, form)
    written, data = task(None), task.path.read_bytes()
    kept = path.read_bytes()
    path.unlink()
    assert task(None) == written, "its parts are no longer needed"
    task.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert task(None) is None, "a damaged one does not count"
    path.write_bytes(kept)
    assert task(None) == written and task.path.read_bytes() == data
    others = [
        task._replace(made=Joined([PartSlice(path, 0, 2)], True)),
        task._replace(made=Joined([PartSlice(write_part(tmp_path, 0, [2, 4, EOS]), 0, 3)], True)),
        task._replace(made=Fitted([path], np.array([[0, 0, 0, 3, 0]], np.int32))),
        task._replace(made=Fitted([path], np.array([[0, 0, 0, 3, 1]], np.int32))),
        task._replace(number=1),
        task._replace(made=Joined([PartSlice(path, 0, 3)], False)),
        task._replace(eos_id=2),
        task._replace(format=form._replace(compression="zstd")),
    ]
    assert len({one.path for one in [task, *others]}) == 9


def test_a_worker_that_outlived_its_parent_disturbs_none(tmp_path):
    """Both write the same shard, its record and nothing else at once."""
    path = write_part(tmp_path, 0, list(range(2, 400)) + [EOS])
    form = Writer(tmp_path / "set", 3, 8000, vocab_size=500).format
    failed, found = [], []

    def work():
        try:
            for number in range(60):
                task = WriteShard(Joined([PartSlice(path, 0, 399)], True), number, tmp_path / "made", EOS, form)
                found.append(task(None))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 120 and not list((tmp_path / "made").glob("*.tmp"))
    assert len({repr(one) for one in found}) == 60, "both say the same of each"
