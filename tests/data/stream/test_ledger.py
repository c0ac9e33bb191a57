"""From the events of a run to the very samples it consumed."""

import json

import pytest

from tests.data.shards.test_mds import write
from tests.data.streams import Mixed, open_bare
from windlass.data.shards.mds import Folder, Reader
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.ledger import (
    Span,
    chain,
    consumed_samples,
    samples_before,
    shards_fingerprint,
    span_before,
    spans,
    waited_s,
)
from windlass.data.stream.order import Order
from windlass.errors import UserError


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "x", num_samples=100, num_ids=9, shard_bytes=1500)
    return Folder(tmp_path / "x")


def opening(folder, kind, step, consumed, per_step, shares=None, written=False, **changes):
    counts = [shard.num_samples for shard in folder.shards]
    order = Order(counts, 7, 2, written=written)
    if shares is not None:
        order = shares.order(counts, 7, 2)
    position = {"samples_consumed": consumed, "samples_per_step": per_step}
    return {
        "kind": kind,
        "step": step,
        "data": {"shards": shards_fingerprint(folder.shards), **order.facts(), **position, **changes},
    }


def read(folder, consumed, num_batches, global_batch, **more):
    """What a stream gives, as rows of ids."""
    loader = open_bare(folder, 8, 2, 7, micro_batch=global_batch, consumed=consumed, **more)
    rows = [row for _ in range(num_batches) for row in loader.next()[0]["input_ids"].tolist()]
    loader.close()
    return rows


def test_a_run_with_a_resume_and_another_batch_expands_to_what_the_loader_gave(folder):
    events = [opening(folder, "start", 0, 0, 6), {"kind": "step", "step": 8}, {"kind": "checkpoint", "step": 5}]
    events += [opening(folder, "resume", 5, 30, 9), {"kind": "step", "step": 9}, {"kind": "end", "step": 15}]
    found = spans([event for event in events if event["step"] != 8])  # read_events leaves out what is void
    shards = shards_fingerprint(folder.shards)
    assert found == [Span(0, 30, shards, 7, 2), Span(30, 120, shards, 7, 2)]
    wanted = read(folder, 0, 5, 6) + read(folder, 30, 10, 9)
    proved = list(consumed_samples(found, folder.shards))
    reader = Reader(folder)
    rows = [reader.read(shard, row)[0][:-1].tolist() for shard, row in proved]
    assert rows == wanted and len(proved) == 120
    assert len(set(proved[:100])) == 100, "an epoch holds every sample once"


def test_a_mixture_expands_to_what_the_loader_gave(folder):
    shares = Mixed([3, len(folder.shards) - 3], [3.0, 1.0])
    events = [opening(folder, "start", 0, 0, 6, shares=shares), {"kind": "end", "step": 20}]
    events = json.loads(json.dumps(events))
    reader = Reader(folder)
    rows = [reader.read(shard, row)[0][:-1].tolist() for shard, row in consumed_samples(spans(events), folder.shards)]
    assert rows == read(folder, 0, 20, 6, shares=shares)


def test_the_batch_before_a_place_is_what_the_loader_gave_last(folder):
    events = [opening(folder, "start", 0, 0, 6), {"kind": "step", "step": 5}, opening(folder, "resume", 5, 30, 9)]
    reader = Reader(folder)
    places = consumed_samples([span_before(events, 48, 9)], folder.shards)
    rows = [reader.read(shard, row)[0][:-1].tolist() for shard, row in places]
    assert rows == read(folder, 30, 2, 9)[9:]
    without = opening(folder, "resume", 8, 57, 9, left_out=[[0, 0]])  # shard 0, from its beginning on
    assert all(shard for shard, _ in consumed_samples([span_before([*events, without], 66, 9)], folder.shards))
    with pytest.raises(UserError, match="no start in its events"):
        span_before([], 48, 9)


def test_the_samples_before_a_place_are_those_that_the_loader_gave(folder):
    entry, reader = opening(folder, "resume", 5, 30, 9)["data"], Reader(folder)
    ids = samples_before(entry, 48, 9, folder.shards)
    assert [reader.read(*map(int, name.split("/")))[0][:-1].tolist() for name in ids] == read(folder, 30, 2, 9)[9:]
    without = opening(folder, "resume", 8, 57, 9, left_out=[[0, 0]])["data"]
    assert 0 < len(found := samples_before(without, 66, 9, folder.shards)) <= 9
    assert not any(name.startswith("0/") for name in found)
    assert samples_before(entry, 48, 9, folder.shards[1:]) == [], "these are not the shards of the entry"
    assert samples_before({}, 48, 9, folder.shards) == [], "a source of one's own"


def test_a_restart_that_did_nothing_is_no_span_and_a_killed_run_ends_at_its_last_line(folder):
    events = [opening(folder, "start", 0, 0, 6), opening(folder, "resume", 0, 0, 6), {"kind": "step", "step": 4}]
    assert [(span.start, span.end) for span in spans(events)] == [(0, 24)]


def test_a_joint_that_does_not_fit_and_a_missing_entry_are_named(folder):
    events = [opening(folder, "start", 0, 0, 6), opening(folder, "resume", 5, 31, 6)]
    with pytest.raises(UserError, match="the resume at step 5 begins at sample 31, the part before ends at 30"):
        spans(events)
    with pytest.raises(UserError, match="the start at step 0 has no `data`"):
        spans([{"kind": "start", "step": 0}])


def test_other_shards_prove_nothing(folder, tmp_path):
    write(tmp_path / "y", num_samples=100, num_ids=9, shard_bytes=1500, seed=1)
    found = spans([opening(folder, "start", 0, 0, 6), {"kind": "end", "step": 2}])
    with pytest.raises(UserError, match="consumed samples 0 to 12 from shards"):
        list(consumed_samples(found, Folder(tmp_path / "y").shards))


def in_written_order(folder, kind, step, consumed, num_shards, is_complete=False, per_step=6):
    return opening(
        folder,
        kind,
        step,
        consumed,
        per_step,
        written=True,
        num_shards=num_shards,
        shards=chain(folder.shards[:num_shards]),
        is_complete=is_complete,
    )


def more(folder, step, num_shards, is_complete=False):
    known = {"num_shards": num_shards, "shards": chain(folder.shards[:num_shards]), "is_complete": is_complete}
    return {"kind": "data", "step": step, **known}


def test_a_run_on_shards_that_came_meanwhile_expands_to_what_the_loader_gave(folder):
    """Seven shards of 14 samples and one of 2."""
    assert [shard.num_samples for shard in folder.shards] == [14] * 7 + [2]
    events = [in_written_order(folder, "start", 0, 0, 2), {"kind": "step", "step": 1}, more(folder, 6, 4)]
    events += [{"kind": "step", "step": 6}, in_written_order(folder, "resume", 5, 30, 5), more(folder, 8, 6)]
    events += [{"kind": "step", "step": 8}, more(folder, 20, 8, True), {"kind": "end", "step": 40}]
    events = [event for event in json.loads(json.dumps(events)) if event != {"kind": "step", "step": 6}]
    reader, found = Reader(folder), spans(events)
    assert [(span.start, span.end, span.num_shards) for span in found] == [(0, 30, 4), (30, 240, 8)]
    rows = [reader.read(shard, row)[0][:-1].tolist() for shard, row in consumed_samples(found, folder.shards)]
    assert rows == read(folder, 0, 40, 6, first_epoch="written")


def test_what_was_read_without_saying_of_which_shards_is_not_proved(folder):
    events = [in_written_order(folder, "start", 0, 0, 5), {"kind": "end", "step": 10}]
    with pytest.raises(UserError, match="consumed samples up to 60, and says which shards there were up to 56"):
        list(consumed_samples(spans(events), folder.shards))
    enough = [in_written_order(folder, "start", 0, 0, 6), {"kind": "end", "step": 10}]
    assert len(list(consumed_samples(spans(enough), folder.shards))) == 60


def test_of_shards_that_came_meanwhile_each_is_proved(folder, tmp_path):
    write(tmp_path / "y", num_samples=100, num_ids=9, shard_bytes=1500, seed=1)
    other = Folder(tmp_path / "y")
    mixed = [*folder.shards[:3], *other.shards[3:]]
    found = spans([in_written_order(folder, "start", 0, 0, 4), {"kind": "end", "step": 2}])
    with pytest.raises(UserError, match="consumed samples 0 to 12 from shards"):
        list(consumed_samples(found, mixed))
    assert list(
        consumed_samples(spans([in_written_order(folder, "start", 0, 0, 2), {"kind": "end", "step": 2}]), mixed)
    )


def test_seconds_of_waiting_add_up():
    events = [{"kind": "incident", "waited_s": 2.5}, {"kind": "step"}, {"kind": "incident", "waited_s": 0.5}]
    assert waited_s(events) == 3.0 and waited_s([]) == 0.0


def test_lanes_expand_to_what_the_loader_gave(folder):
    facts = LaneOrder([1] * 9, 7, 2, 3, 2).facts()
    events = json.loads(json.dumps([opening(folder, "start", 0, 0, 6, **facts), {"kind": "end", "step": 20}]))
    reader = Reader(folder)
    rows = [reader.read(shard, row)[0][:-1].tolist() for shard, row in consumed_samples(spans(events), folder.shards)]
    assert rows == read(folder, 0, 20, 6, lanes=3)


def test_lanes_of_a_mixture_expand_to_what_the_loader_gave(folder):
    shares = Mixed([4, 4], [2.0, 1.0], [(9, [0.0, 1.0]), (30, [1.0, 1.0])])
    source = open_bare(folder, 8, 2, 7, micro_batch=6, lanes=3, shares=shares)
    source.close()
    events = json.loads(json.dumps([{"kind": "start", "step": 0, "data": source.entry()}, {"kind": "end", "step": 20}]))
    reader = Reader(folder)
    rows = [reader.read(shard, row)[0][:-1].tolist() for shard, row in consumed_samples(spans(events), folder.shards)]
    assert rows == read(folder, 0, 20, 6, lanes=3, shares=shares)
