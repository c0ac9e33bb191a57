"""A shard that is left out costs its own samples and nothing else, on all ranks alike, for the rest of the run."""

import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data.stream.test_loader import T, directory, make, wanted_stream  # noqa: F401
from windlass.data.packing import Borders
from windlass.data.shards.mds import Folder, Reader, Writer
from windlass.data.stream.ledger import consumed_samples, lost, spans
from windlass.data.stream.order import Order
from windlass.data.stream.skipping_stream import blank
from windlass.errors import BadShard, UserError


class Ranks:
    """Joins what `world` threads found, as the ranks of a run do."""

    def __init__(self, world):
        self._barrier, self._found = threading.Barrier(world, timeout=20), [{} for _ in range(world)]
        self.calls = 0

    def of(self, rank):
        def gathered(value):
            self._found[rank] = value
            self.calls += rank == 0
            self._barrier.wait()
            values = list(self._found)
            self._barrier.wait()
            return values

        return SimpleNamespace(max_over_ranks=lambda value: max(gathered(value)), gathered=gathered)


def left_out(loader):
    """[shard, position], of every shard that the run has left out."""
    return loader.state()["skipped"]


def incidents(loader):
    return [event.fields for event in loader.drain_events(is_log_step=False)]


@pytest.fixture
def copy(directory, tmp_path):  # noqa: F811
    return shutil.copytree(directory, tmp_path / "copy")


def spoil(directory, *shards):  # noqa: F811
    for shard in shards:
        path = directory / f"shard.{shard:05}.mds"
        data = bytearray(path.read_bytes())
        data[-5] ^= 16
        path.write_bytes(data)


def rows_of(batches):
    """Sample numbers, None for a row that counts nothing and holds nothing."""
    found = []
    for batch in batches:
        for ids, targets in zip(batch["input_ids"], batch["targets"]):
            is_blank = not ids.any() and (targets == -100).all()
            found.append(None if is_blank else int(ids[0]) // 1000)
    return found


def shard_of(directory):  # noqa: F811
    """Sample number -> its shard."""
    return np.repeat(np.arange(len(Reader(directory).shards)), Reader(directory).shard_samples).tolist()


def early(directory):  # noqa: F811
    """A shard that comes in the first window, and not in the first batch."""
    of = shard_of(directory)
    met = [of[number] for number in wanted_stream(directory, 18)]
    return next(shard for shard in met if shard not in met[:1])


def without(directory, stream, bad, since=0):  # noqa: F811
    of = shard_of(directory)
    return [None if of[number] in bad and place >= since else number for place, number in enumerate(stream)]


def test_only_the_samples_of_the_shard_are_lost_and_the_order_stays(copy):
    stream, bad = wanted_stream(copy, 120), early(copy)
    spoil(copy, bad)
    loader = make(copy, micro_batch=6, limit=1)
    found = [row for _ in range(20) for row in rows_of(loader.next())]
    loader.close()
    assert found == without(copy, stream, [bad]) and found.count(None) > Reader(copy).shard_samples[bad]
    assert loader.consumed == 120 and [shard for shard, _ in left_out(loader)] == [bad]
    ((_, since),) = left_out(loader)
    assert since % 6 == 0 and None not in found[:since] and None in found[since : since + 6]


def test_without_the_setting_nothing_is_left_out(copy):
    spoil(copy, 1)
    loader = make(copy, micro_batch=6)
    with pytest.raises(BadShard, match=r"shard\.00001\.mds has the hash"):
        for _ in range(20):
            loader.next()
    loader.close()
    assert set(loader.state()) == {"samples_consumed"} and incidents(loader) == []


def test_the_incident_names_file_hashes_and_what_is_lost(copy):
    bad = early(copy)
    promised, count = Reader(copy).shards[bad].raw, Reader(copy).shard_samples[bad]
    spoil(copy, bad)
    loader = make(copy, micro_batch=6, limit=2)
    for _ in range(4):
        loader.next()
    ((shard, since),) = left_out(loader)
    (news,) = incidents(loader)
    assert shard == bad
    assert news["left_out"] == {"shard": shard, "from_sample": since, "samples": count}
    for word in (f"{copy}/shard.{bad:05}.mds is left out from sample {since} on", "1 of data.max_bad_shards=2"):
        assert word in news["what"]
    assert f"its {count} samples per epoch" in news["what"]
    assert "has the hash xxh64" in news["what"] and f"promises xxh64 {promised.digest}" in news["what"]
    assert incidents(loader) == [], "each is logged once"
    loader.close()


def test_what_is_left_out_stays_out_though_it_can_be_read_again(copy, directory):  # noqa: F811
    stream, bad = wanted_stream(copy, 120), early(copy)
    spoil(copy, bad)
    first = make(copy, micro_batch=6, limit=1)
    found = [row for _ in range(4) for row in rows_of(first.next())]
    first.close()
    assert left_out(first), "it was met"
    shutil.copyfile(directory / f"shard.{bad:05}.mds", copy / f"shard.{bad:05}.mds")
    for ranks, accumulation in ((1, 1), (2, 1), (3, 2)):
        parts = [
            make(
                copy, micro_batch=12 // ranks // accumulation, accumulation=accumulation, batch_rank=rank,
                batch_ranks=ranks, consumed=24, limit=1, skipped=left_out(first),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        rest = [row for _ in range(8) for part in parts for row in rows_of(part.next())]
        assert [incidents(part) for part in parts] == [[]] * ranks and all(
            left_out(part) == left_out(first) for part in parts
        )
        for part in parts:
            part.close()
        assert found + rest == without(copy, stream, [bad])


def run_ranks(places, limit, num_batches, micro_batch=3):
    """A loader per place, in threads: [rank] -> (rows of each batch, its loader, what it raised)."""
    world = len(places)
    ranks, results = Ranks(world), [None] * world

    def work(rank):
        of_run = ranks.of(rank)
        shape = {"batch_rank": rank % world, "batch_ranks": world}
        loader, rows, error = make(places[rank], micro_batch=micro_batch, limit=limit, ranks=of_run, **shape), [], None
        try:
            for _ in range(num_batches):
                rows.append(rows_of(loader.next()))
        except UserError as raised:
            error = raised
        loader.close()
        results[rank] = rows, loader, error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_a_shard_that_is_bad_for_one_rank_is_out_for_all_from_the_same_batch(copy, directory):  # noqa: F811
    """Rank 1 reads a spoilt copy, ranks 0 and 2 whole ones: what they have read of it is taken out too."""
    stream = wanted_stream(copy, 90)
    spoil(copy, 2)
    results = run_ranks([directory, copy, directory], 1, 10)
    assert [error for _, _, error in results] == [None] * 3
    assert {tuple(map(tuple, left_out(loader))) for _, loader, _ in results} == {
        tuple(map(tuple, left_out(results[0][1])))
    }
    ((shard, since),) = left_out(results[0][1])
    joined = [row for step in zip(*(rows for rows, _, _ in results)) for rank in step for row in rank]
    assert shard == 2 and joined == without(copy, stream, [2], since)
    met = [place for place, number in enumerate(stream) if shard_of(copy)[number] == 2 and place // 3 % 3 == 1]
    assert since == met[0] // 9 * 9, "from the first batch in which rank 1 had to read it"
    assert all(incidents(loader) for _, loader, _ in results)


def test_beyond_the_limit_all_ranks_raise_the_same(copy, directory):  # noqa: F811
    spoil(copy, 0, 1, 2)
    results = run_ranks([directory, copy, directory], 1, 18)
    error = results[0][2]
    assert {str(error).replace(str(directory), str(copy)) for _, _, error in results} == {str(results[1][2])}
    assert isinstance(error, BadShard)
    assert "2 of " in error.given or "3 of " in error.given
    assert "has the hash xxh64" in error.given and "index.json promises xxh64" in error.given
    assert "data.max_bad_shards=1 at most" in error.rule and "data.max_bad_shards to" in error.change
    assert len({len(rows) for rows, _, _ in results}) == 1, "after the same batch"


@pytest.mark.parametrize("how", ["missing", "truncated", "emptied"])
def test_a_file_that_goes_while_it_is_open_is_left_out_too(copy, how):
    stream = wanted_stream(copy, 60)
    path = copy / "shard.00002.mds"
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -7 if how == "truncated" else 0])
    strict = make(copy)
    with pytest.raises(BadShard, match=r"shard\.00002\.mds"):
        for _ in range(60):
            strict.next()
    strict.close()
    loader = make(Folder(copy), micro_batch=6, limit=1)
    assert [row for _ in range(10) for row in rows_of(loader.next())] == without_of(copy, stream, 2)
    loader.close()


def without_of(directory, stream, shard):  # noqa: F811
    counts = [one.num_samples for one in Folder(directory).shards]
    of = np.repeat(np.arange(len(counts)), counts).tolist()
    return [None if of[number] == shard else number for number in stream]


def test_a_batch_that_is_lost_whole_is_passed_over_by_all_ranks(copy, directory):  # noqa: F811
    """Windows of one shard, batches smaller than a shard: some batches are in the bad one as a whole."""
    reader = Reader(copy)
    starts = np.concatenate([[0], np.cumsum(reader.shard_samples)])
    order = Order(reader.shard_samples, 17, 1).take(0, 106).tolist()
    stream = [int(starts[shard]) + row for shard, row in order]
    spoil(copy, 1)
    loader = make(copy, micro_batch=2, shuffle_window=1, limit=1)
    found = []
    while loader.consumed < 106:
        found.append(rows_of(loader.next()))
    loader.close()
    batches = [without(copy, stream, [1])[at : at + 2] for at in range(0, 106, 2)]
    kept = [batch for batch in batches if batch != [None, None]]
    assert found[: len(kept)] == kept and len(kept) < len(batches)
    passed = [news["passed"] for news in incidents(loader) if "passed" in news]
    assert sum(one["samples"] for one in passed) >= 106 - 2 * len(kept) > 0
    assert [batches[one["from_sample"] // 2] for one in passed if one["from_sample"] < 106] == [[None, None]] * (
        len(batches) - len(kept)
    )


def test_never_all_shards(copy):
    spoil(copy, *range(len(Reader(copy).shards)))
    with pytest.raises(BadShard):
        loader = make(copy, micro_batch=6, limit=100)
        try:
            for _ in range(100):
                loader.next()
        finally:
            loader.close()


def test_less_than_was_left_out_is_refused_with_the_number(directory):  # noqa: F811
    with pytest.raises(UserError) as caught:
        make(directory, skipped=[[2, 24]])
    assert "data.max_bad_shards=0, and the checkpoint has left out 1" in caught.value.given
    assert "shard.00002.mds" in caught.value.given and "to 1 or more" in caught.value.change


@pytest.mark.parametrize("has_ends", [False, True])
def test_a_lost_row_is_one_document_and_keeps_its_key(tmp_path, has_ends):
    ids = np.array([[0, 5, 6, 0, 7, 0, 0], [0, 5, 0, 6, 0, 7, 0]], np.int32)
    writer = Writer(tmp_path / "train", T + 1, 64, has_ends=has_ends)
    writer.write(ids, ids, ids == 7 if has_ends else None)
    writer.close()
    good = make(tmp_path / "train", micro_batch=2, borders=Borders(0, 5), with_keys=True)
    (wanted,) = good.next()
    good.close()
    if has_ends:
        assert sorted(wanted["documents"].tolist()) == [[0, 5, T, T, T], [0, T, T, T, T]], (
            "7 ends documents, 0 does not"
        )
    row = wanted["input_ids"].tolist().index(ids[1, :-1].tolist())
    spoil(tmp_path / "train", 1)
    loader = make(tmp_path / "train", micro_batch=2, borders=Borders(0, 5), with_keys=True, limit=1)
    (found,) = loader.next()
    loader.close()
    blanked = {name: tensor.clone() for name, tensor in wanted.items()}
    blank(blanked, np.arange(2) == row)
    assert all(torch.equal(found[name], blanked[name]) for name in found) and set(found) == set(blanked)
    assert found["documents"][row].tolist() == [0, T, T, T, T] and torch.equal(found["keys"], wanted["keys"])
    assert torch.equal(found["documents"][1 - row], wanted["documents"][1 - row])


def test_the_first_shard_may_be_the_bad_one_and_the_length_is_still_checked(copy):
    spoil(copy, 0)
    with pytest.raises(UserError, match=f"sequence_length {T + 1}"):
        make(copy, sequence_length=T + 1, limit=1)
    with pytest.raises(BadShard):
        make(copy)


def test_the_ledger_proves_what_was_consumed_and_what_was_lost(copy):
    """Two parts with a resume on another batch; the second shard goes bad in the second part; some batches are passed over."""
    folder = Folder(copy)
    spoil(copy, 1)
    events, got = [], []

    def opening(kind, step, loader):
        events.append({"kind": kind, "step": step, "data": loader.entry()})

    def steps(loader, step, count):
        for _ in range(count):
            got.extend(row for row in rows_of(loader.next()) if row is not None)
            step += 1
            events.extend({"kind": "incident", "step": step, **news} for news in incidents(loader))
        events.append({"kind": "step", "step": step})
        loader.close()

    loader = make(copy, micro_batch=2, shuffle_window=1, limit=2)
    opening("start", 0, loader)
    steps(loader, 0, 20)
    spoil(copy, 3)
    loader = make(copy, micro_batch=3, shuffle_window=1, consumed=loader.consumed, limit=2, skipped=left_out(loader))
    opening("resume", 20, loader)
    steps(loader, 20, 25)

    assert {news for event in events for news in ("left_out", "passed") if news in event} == {"left_out", "passed"}
    found = spans(events)
    starts = np.concatenate([[0], np.cumsum([shard.num_samples for shard in folder.shards])])
    assert [int(starts[shard]) + row for shard, row in consumed_samples(found, folder.shards)] == got
    gone = [shard for shard, _ in lost(found, folder.shards)]
    assert set(gone) == {1, 3} and len(gone) + len(got) == loader.consumed == found[-1].end
