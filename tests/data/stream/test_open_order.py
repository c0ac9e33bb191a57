"""Where an order begins after a resume: shares that changed, lanes, and both; and what has too few shards for its lanes."""

import json

import pytest

from tests.data.streams import Mixed, open_bare
from windlass.errors import UserError

HALVES = Mixed([4, 4], [1.0, 1.0])


def rows_of(source, batches):
    """The ids of each sample, in order; closes it."""
    found = [row for _ in range(batches) for row in source.next()[0]["input_ids"].tolist()]
    source.close()
    return found


def test_shares_change_at_their_sample_and_on_resume_and_sources_go_on(folder):
    """Two of three samples from the first half, from sample 9 on none, then, after a resume with other weights, half."""
    alone = [rows_of(open_bare(folder, 8, 2, 7, shares=Mixed([4, 4], weights)), 30) for weights in ([1, 0], [0, 1])]
    staged = Mixed([4, 4], [2.0, 1.0], [(9, [0.0, 1.0])])
    first = open_bare(folder, 8, 2, 7, shares=staged)
    found = [row for _ in range(6) for row in first.next()[0]["input_ids"].tolist()]
    state = json.loads(json.dumps(first.state()))
    first.close()
    same = open_bare(folder, 8, 2, 7, shares=staged, consumed=12, kept=state["shares"])
    whole = open_bare(folder, 8, 2, 7, shares=staged)
    assert same.entry()["shares"] == whole.entry()["shares"] and same.state() == {
        **whole.state(),
        "samples_consumed": 12,
    }
    assert found + rows_of(same, 6) == rows_of(whole, 12)
    said = []
    halves = open_bare(folder, 8, 2, 7, shares=HALVES, consumed=12, kept=state["shares"], log=said.append)
    again = open_bare(folder, 8, 2, 7, shares=HALVES, consumed=12, kept=halves.state()["shares"], log=said.append)
    assert halves.entry() == again.entry() and halves.entry()["shares"]["taken"] == [6, 6]
    again.close()
    found += rows_of(halves, 4)
    owners = [[], []]
    for row in found:
        owners[row in alone[1]].append(row)
    assert len(found) == 20 and owners == [alone[0][:10], alone[1][:10]]
    assert said == ["the shares change at sample 12: a continues at its sample 6, b continues at its sample 6"]


def test_a_source_with_other_shards_begins_anew(folder):
    before = open_bare(folder, 8, 2, 7, shares=HALVES)
    before.close()
    kept = before.state()["shares"]
    kept["sources"][1] = "another"
    source = open_bare(folder, 8, 2, 7, shares=HALVES, consumed=12, kept=kept)
    source.close()
    assert source.entry()["shares"] == {"stages": [[12, [1.0, 1.0]]], "taken": [6, 0]}


def test_lanes_give_each_rank_its_part_and_a_resume_keeps_the_block(folder):
    """Two lanes of batches of eight. With a batch of four from place 16 on, the stream is the same."""
    whole = rows_of(open_bare(folder, 8, 2, 7, micro_batch=8, lanes=2), 12)
    ranks = [open_bare(folder, 8, 2, 7, 2, 2, rank, 2, lanes=2) for rank in range(2)]
    state = ranks[0].state()
    assert state == {"samples_consumed": 0, "lanes": [2, 4]} and ranks[0].entry()["lanes"] == [2, 4]
    halves = [[row for batch in rank.next() for row in batch["input_ids"].tolist()] for rank in ranks for _ in range(2)]
    for rank in ranks:
        rank.close()
    assert halves[0] + halves[2] + halves[1] + halves[3] == whole[:16]
    smaller = open_bare(folder, 8, 2, 7, micro_batch=4, lanes=2, consumed=16, kept_lanes=[2, 4])
    assert rows_of(smaller, 20) == whole[16:]
    skipping = open_bare(folder, 8, 2, 7, micro_batch=8, lanes=2, limit=1)
    assert rows_of(skipping, 12) == whole


def test_lanes_of_a_mixture_give_each_rank_its_part_and_go_on_with_other_batches_and_shares(folder):
    """Two lanes of batches of eight, two of three samples from the first half; from place 24 on batches of four, then halves."""
    shares = Mixed([4, 4], [2.0, 1.0])
    whole = rows_of(open_bare(folder, 8, 2, 7, micro_batch=8, lanes=2, shares=shares), 12)
    ranks = [open_bare(folder, 8, 2, 7, 2, 2, rank, 2, lanes=2, shares=shares) for rank in range(2)]
    assert ranks[0].entry() == ranks[1].entry() and ranks[0].entry()["lanes"] == [2, 4]
    parts = [[row for batch in rank.next() for row in batch["input_ids"].tolist()] for _ in range(3) for rank in ranks]
    state = json.loads(json.dumps(ranks[1].state()))
    for rank in ranks:
        rank.close()
    assert sum(parts, []) == whole[:24] and state["samples_consumed"] == 24
    kept = {"consumed": 24, "kept": state["shares"], "kept_lanes": state["lanes"], "lanes": 2}
    assert rows_of(open_bare(folder, 8, 2, 7, micro_batch=4, shares=shares, **kept), 18) == whole[24:]
    skipping = open_bare(folder, 8, 2, 7, micro_batch=8, shares=shares, limit=1, **kept)
    assert rows_of(skipping, 9) == whole[24:]

    halves = open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **kept, log=lambda _: None)
    state = json.loads(json.dumps(halves.state()))
    assert state["shares"]["stages"] == [[24, [1.0, 1.0]]] and state["shares"]["taken"] == [16, 8]
    changed = rows_of(halves, 9)
    again = {**kept, "kept": state["shares"]}
    assert rows_of(open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **again), 9) == changed

    uneven = {**state["shares"], "of_lanes": [[9, 3], [7, 5]]}
    source = open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **{**kept, "kept": uneven})
    source.close()
    assert source.state()["shares"]["of_lanes"] == [[9, 3], [7, 5]], "of each lane, and not the half of the sum"
    source = open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **{**kept, "kept": uneven, "lanes": 4})
    source.close()
    assert source.state()["shares"]["of_lanes"] == [[4, 2]] * 4 and source.state()["lanes"] == [4, 2]

    def of_lane(rows, lane, source):
        return [row for at, row in enumerate(rows) if at // 4 % 2 == lane and (row in first_half) == (source == 0)]

    first_half = rows_of(open_bare(folder, 8, 2, 7, shares=Mixed([4, 4], [1, 0])), 28)
    for lane, source in ((0, 0), (0, 1), (1, 0), (1, 1)):
        given, longer = of_lane(whole[:24] + changed, lane, source), of_lane(whole, lane, source)
        common = min(len(given), len(longer))
        assert common > 12 and given[:common] == longer[:common], "each lane goes on in each source"


def test_after_other_shares_the_lanes_go_on_whatever_the_batch(folder):
    """A reviewer's mutant took the block of the new batch: the stream then was another for each."""
    first = open_bare(folder, 8, 2, 7, micro_batch=8, lanes=2, shares=Mixed([4, 4], [2.0, 1.0]))
    for _ in range(3):
        first.next()
    state = json.loads(json.dumps(first.state()))
    first.close()
    kept = {"consumed": 24, "kept": state["shares"], "kept_lanes": state["lanes"], "lanes": 2, "log": lambda _: None}
    whole, halves = (open_bare(folder, 8, 2, 7, micro_batch=size, shares=HALVES, **kept) for size in (8, 4))
    assert rows_of(whole, 9) == rows_of(halves, 18)


def test_a_source_of_fewer_samples_than_lanes_is_refused(folder):
    with pytest.raises(UserError) as caught:
        open_bare(folder, 8, 2, 7, micro_batch=16, lanes=16, shares=Mixed([7, 1], [1.0, 1.0]))
    assert caught.value.given == "data.order.lanes=16, and source b has 2 samples"
    assert caught.value.change == "set data.order.lanes=2 or fewer, or leave the source out"


def test_more_lanes_than_shards_are_refused(folder):
    with pytest.raises(UserError) as caught:
        open_bare(folder, 8, 2, 7, micro_batch=16, lanes=16)
    assert caught.value.given == "data.order.lanes=16, and here/train has 8 shards"
