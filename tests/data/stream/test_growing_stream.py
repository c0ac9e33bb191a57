"""A stream over shards that are still written: the finished stream for every layout, waited for and never cut short."""

import re
import threading
import time

import pytest
import torch

from tests.data.grown import LENGTH, Grown, samples_of
from tests.data.streams import open_bare
from windlass.data.packing import Borders
from windlass.data.shards.growing import open_growing
from windlass.data.shards.mds import Folder, Reader
from windlass.data.stream.growing_stream import LOG_EVERY_S, GrowingStream, WrittenOrder
from windlass.data.stream.ledger import chain
from windlass.errors import Unavailable, UserError

SHARDS, WINDOW, SEED = 11, 3, 5
TOTAL = sum(len(samples_of(shard)) for shard in range(SHARDS))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("windlass.data.shards.growing.POLL_S", 0.01)
    monkeypatch.setattr("windlass.data.shards.journal.BEAT_EVERY_S", 0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A directory where all is written."""
    return Grown(tmp_path_factory.mktemp("finished") / "data").write(SHARDS).end().directory


def loader(source, ranks=1, rank=0, accumulation=1, **more):
    settings = {"sequence_length": LENGTH - 1, "seed": SEED, "shuffle_window": WINDOW, "first_epoch": "written"}
    return open_bare(source, **settings, batch_ranks=ranks, batch_rank=rank, accumulation=accumulation, **more)


def growing(directory, max_silence_s=10.0):
    return open_growing(directory, "train", max_silence_s)


def take(found, num_steps):
    """The first two ids of every sample, step by step, on this rank."""
    return [torch.cat([batch["input_ids"][:, :2] for batch in found.next()]).tolist() for _ in range(num_steps)]


def incidents(found):
    return [event.fields for event in found.drain_events(is_log_step=False) if event.kind == "incident"]


def closed(found, num_steps):
    try:
        return take(found, num_steps)
    finally:
        found.close()


def stream(directory, count):
    """The stream of the finished set, sample by sample."""
    rows = closed(loader(Folder(directory / "train"), micro_batch=1), count)
    return [sample for step in rows for sample in step]


@pytest.mark.parametrize(
    ("ranks", "accumulation"),
    [(1, 2), (2, 1), (4, 1)]
    + [pytest.param(r, a, marks=pytest.mark.long) for r, a in [(1, 1), (2, 2), (3, 1), (3, 2), (4, 2), (8, 1), (8, 2)]],
)
def test_the_stream_is_that_of_the_finished_set_for_every_layout_while_shards_come(
    finished, tmp_path, ranks, accumulation
):
    grown = Grown(tmp_path / "data").write(WINDOW)
    found = [loader(growing(grown.directory), ranks, rank, accumulation) for rank in range(ranks)]

    def write():
        for _ in range(SHARDS - WINDOW):
            time.sleep(0.01)
            grown.write(1)
        grown.end()

    thread = threading.Thread(target=write)
    thread.start()
    num_steps = -(-2 * TOTAL // (2 * ranks * accumulation))  # into the second and third epoch
    per_rank = [closed(each, num_steps) for each in found]
    thread.join()
    joined = [sample for step in range(num_steps) for rank in range(ranks) for sample in per_rank[rank][step]]
    assert joined == stream(finished, len(joined))
    epoch = [tuple(sample) for sample in joined[:TOTAL]]
    assert len(set(epoch)) == TOTAL


def test_what_a_batch_waits_for_is_its_windows_whole_and_the_same_on_all_ranks(tmp_path):
    """Places 0..13 are in the first window (5 + 4 + 5 samples): a global batch of 12 is there with three shards, one of 16
    is not, though the first rank's half of it is."""
    grown = Grown(tmp_path / "data").write(WINDOW)
    small = loader(growing(grown.directory), ranks=2, micro_batch=6)
    large = [loader(growing(grown.directory), ranks=2, rank=rank, micro_batch=8) for rank in range(2)]
    take(small, 1)
    time.sleep(0.2)
    assert not any(each._loader.is_ready(0) for each in large) and not small._loader.is_ready(0)
    grown.write(WINDOW - 1)
    time.sleep(0.2)
    assert not any(each._loader.is_ready(0) for each in large)
    grown.write(1)
    for each in large:
        take(each, 1)
    for each in (small, *large):
        each.close()


def test_an_epoch_is_never_cut_short_where_the_preparation_dies(finished, tmp_path):
    grown = Grown(tmp_path / "data").write(2 * WINDOW)
    found = loader(growing(grown.directory, max_silence_s=0.3), micro_batch=1)
    wanted = stream(finished, TOTAL)
    rows = [take(found, 1)[0][0] for _ in range(27)]  # all of two windows
    assert rows == wanted[:27]
    for _ in range(2):
        with pytest.raises(UserError, match="no sign of life"):
            found.next()
    found.close()


def test_a_wait_is_reported_while_it_lasts_and_counted_when_it_is_over(tmp_path, monkeypatch):
    grown, logged = Grown(tmp_path / "data").write(WINDOW), []

    def log(line):
        logged.append(line)
        if len(logged) == 3:
            grown.write(WINDOW)

    found = loader(growing(grown.directory), micro_batch=13, log=log)
    take(found, 1)
    assert not logged and incidents(found) == []
    monkeypatch.setattr("windlass.data.stream.growing_stream.LOG_EVERY_S", 0.5)
    monkeypatch.setattr("windlass.data.stream.growing_stream.WAITED_FROM_S", 1.0)
    take(found, 1)
    assert 3 <= len(logged) <= found.wait_s / 0.5 + 1
    assert logged[0] == "waiting for data: 3 shards are written, and the next batch needs more"
    (news,) = incidents(found)
    assert news["waited_s"] == found.wait_s >= 1.5
    assert re.fullmatch(r"waited \d+.* for data that was still being prepared", news["what"])
    assert incidents(found) == []
    found.close()


def test_a_resume_knows_the_shards_again_in_a_growing_set_and_a_finished_one(finished, tmp_path):
    grown = Grown(tmp_path / "data").write(2 * WINDOW)
    first = loader(growing(grown.directory), micro_batch=5)
    whole = stream(finished, 100)
    head = [sample for step in take(first, 4) for sample in step]
    state = first.state()["read_from"]
    first.close()
    assert state == {"num_shards": 6, "shards": chain(growing(grown.directory).shards[:6])}
    grown.write(SHARDS - 2 * WINDOW).end()
    for source, ranks in ((growing(grown.directory), 1), (Folder(finished / "train"), 2)):
        rest = [closed(loader(source, ranks, rank, 2, consumed=20, read_from=state), 5) for rank in range(ranks)]
        joined = [sample for step in range(5) for rank in range(ranks) for sample in rest[rank][step]]
        assert head == whole[:20] and joined == whole[20 : 20 + len(joined)]


def test_what_has_been_read_does_not_depend_on_what_was_known_meanwhile(finished, tmp_path):
    grown = Grown(tmp_path / "data").write(WINDOW + 1)
    slow, fast = loader(growing(grown.directory), micro_batch=7), loader(Folder(finished / "train"), micro_batch=7)
    for each in (slow, fast):
        take(each, 1)
    assert slow.state() == fast.state() and slow.state()["read_from"]["num_shards"] == 3
    for each in (slow, fast):
        each.close()


def test_other_shards_than_the_checkpoints_are_refused_at_once_or_when_they_come(finished, tmp_path, monkeypatch):
    past = {"num_shards": 6, "shards": chain(Folder(finished / "train").shards[:6])}
    monkeypatch.setattr("tests.data.grown.samples_of", lambda shard: samples_of(shard) + (shard == 5))
    grown = Grown(tmp_path / "data").write(WINDOW)
    late = loader(growing(grown.directory), consumed=3, read_from=past)
    grown.write(WINDOW)
    with pytest.raises(UserError, match="not those that the run's checkpoint has read"):
        take(late, 1)
    with pytest.raises(UserError, match="not those that the run's checkpoint has read"):
        loader(growing(grown.directory), consumed=3, read_from=past)
    grown.end()
    too_short = {**past, "num_shards": 7}
    with pytest.raises(UserError, match="not those that the run's checkpoint has read"):
        loader(growing(grown.directory), consumed=3, read_from=too_short)
    late.close()


def test_nothing_is_read_before_the_past_is_known_to_be_the_same(finished, tmp_path):
    """A preparation that was deleted and begun again: the next window is there, the shards behind are not yet."""
    past = {"num_shards": 9, "shards": chain(Folder(finished / "train").shards[:9])}
    grown = Grown(tmp_path / "data").write(2 * WINDOW)
    found = loader(growing(grown.directory), consumed=15, micro_batch=1, read_from=past)
    time.sleep(0.2)
    assert not found._loader.is_ready(0)
    grown.write(WINDOW)
    assert take(found, 1)[0][0] == stream(finished, 16)[15]
    found.close()


def test_room_for_documents_is_of_the_place_alone(finished, tmp_path):
    """The most of a sample is 2 from the first shard on."""
    grown = Grown(tmp_path / "data").write(WINDOW)
    for directory in (grown.directory, finished):
        order = WrittenOrder(Reader(growing(directory)), SEED, WINDOW, None, UserError("other", "rule", "change"))
        order.take(0, 10)
        assert order.borders(Borders(0, 99)) == Borders(0, 2)
    whole = WrittenOrder(Reader(Folder(finished / "train")), SEED, WINDOW, None, UserError("other", "rule", "change"))
    assert whole.borders(Borders(0, 99)) == Borders(0, 99)
    rows = {}
    for name, source in (("growing", growing(grown.directory)), ("finished", Folder(finished / "train"))):
        found = loader(source, micro_batch=8, borders=Borders(0, 3))
        rows[name] = found.next()[0]
        found.close()
    wide = rows["finished"]["documents"]
    assert rows["growing"]["documents"].shape == (8, 2) and wide.shape == (8, 3)
    assert (rows["growing"]["documents"] == wide[:, :2]).all() and (wide[:, 2] == LENGTH - 1).all()
    assert (rows["growing"]["targets"] == rows["finished"]["targets"]).all()


def test_new_shards_are_an_event_once_and_on_logging_steps_only(finished, tmp_path):
    grown = Grown(tmp_path / "data").write(WINDOW)
    found = loader(growing(grown.directory), micro_batch=14)
    shards = Folder(finished / "train").shards
    known = {"num_shards": 3, "shards": chain(shards[:3]), "is_complete": False}
    entry = {
        "seed": SEED,
        "shuffle_window": WINDOW,
        "first_epoch": "written",
        "samples_consumed": 0,
        "samples_per_step": 14,
    }
    assert found.entry() == {**entry, **known}
    take(found, 1)
    assert found.drain_events(is_log_step=True) == []
    grown.write(SHARDS - WINDOW).end()
    take(found, 4)
    assert all(event.kind != "data" for event in found.drain_events(is_log_step=False))
    (event,) = found.drain_events(is_log_step=True)
    assert event == ("data", {"num_shards": SHARDS, "shards": chain(shards), "is_complete": True})
    found.close()


def test_while_shards_are_written_a_wait_has_no_limit_and_then_the_loaders():
    """The preparation has a deadline of its own; the last shard may come while a batch is waited for."""
    asked, said, is_complete = [], [], iter([False, False, False, True])

    class Written:
        is_complete = property(lambda self: next(is_complete))
        waited_for = set()

        def read_before(self, consumed):
            return consumed

    class Late:
        consumed, shards = 0, ()

        def is_ready(self, timeout_s):
            asked.append(timeout_s)
            return False

        def next(self):
            raise Unavailable("no batch", "it comes within the limit", "look at the store")

    stream = GrowingStream(Late(), Written(), None, said.append)
    with pytest.raises(Unavailable, match="within the limit"):
        stream.next()
    assert asked == [LOG_EVERY_S] * 3 and len(said) == 3
