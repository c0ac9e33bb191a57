"""A run that may leave out a bad shard: all ranks do the same, whatever the layout, and its checkpoints remember it."""

import shutil

import pytest
import torch

from tests import tiny
from windlass.data.shards.mds import Folder, Reader
from windlass.data.stream.ledger import consumed_samples, lost, spans
from windlass.data.stream.order import Order
from windlass.proof.pool import RankFailed
from windlass.report.events import read_events
from windlass.training.preflight import prepare_only
from windlass.training.start.drift import newest_trainer_state
from windlass.training.start.restore import Start

SMALL = {"shard_bytes": 4096, "shuffle_window": 2}
STEPS = 14


def spoil(folder, *numbers):
    for number in numbers:
        path = folder / "train" / f"shard.{number:05}.mds"
        data = bytearray(path.read_bytes())
        data[-5] ^= 16
        path.write_bytes(data)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Data in `good`, and in `bad` a copy with one spoilt shard, in `worse` one with nothing else."""
    base = tmp_path_factory.mktemp("skips")
    prepare_only(tiny.recipe(base, data={**SMALL, "directory": str(base / "good")}))
    shutil.copytree(base / "good", base / "bad")
    shutil.copytree(base / "good", base / "worse")
    reader = Reader(base / "good" / "train")
    assert len(reader.shards) >= 6
    spoil(base / "bad", bad_shard(base))
    spoil(base / "worse", *range(len(reader.shards)))
    return base


def bad_shard(base):
    """One of the second window of the order: it is met in the middle of the run."""
    shards = Order(Reader(base / "good" / "train").shard_samples, 4, 2).take(0, 8 * STEPS)[:, 0].tolist()
    return list(dict.fromkeys(shards))[2]


def recipe(base, name, directory="bad", limit=1, **sections):
    data = {**SMALL, "directory": str(base / directory), "max_bad_shards": limit, **sections.pop("data", {})}
    run = {"steps": STEPS, **sections.pop("run", {})}
    return tiny.recipe(base, name, data=data, run=run, **sections)


@pytest.fixture(scope="module")
def whole(base, ranks):
    """The run on one rank that nobody killed, on the spoilt data: (config, its rows)."""
    config = recipe(base, "whole")
    return config, ranks.run(1, tiny.train, config)[0]["rows"]


def incidents(directory, kind):
    return [event[kind] for event in read_events(directory / "events.jsonl") if kind in event]


def close(one, two):
    assert one.keys() == two.keys()
    for step in one:
        assert abs(one[step][0] - two[step][0]) <= 1e-5 and abs(one[step][1] - two[step][1]) <= 1e-5, step


def prove(config, rows):
    """The ledger's samples are the rows that the run was given, but for the blank ones."""
    reader = Reader(Folder(config.run.directory.parent / "good" / "train"))
    found = spans(read_events(config.run.directory / "events.jsonl"))
    given = [row for step in rows for row in step if any(row)]
    assert [reader.read(*place)[0][:-1].tolist() for place in consumed_samples(found, reader.shards)] == given
    gone = [shard for shard, _ in lost(found, reader.shards)]
    assert len(gone) == sum(not any(row) for step in rows for row in step) > 0
    assert set(gone) == {bad_shard(config.run.directory.parent)}


def test_the_samples_of_a_bad_shard_are_lost_reported_and_proved(base, whole):
    config, rows = whole
    (left_out,) = incidents(config.run.directory, "left_out")
    assert left_out["shard"] == bad_shard(base) and left_out["from_sample"] % 8 == 0 and left_out["from_sample"] > 24
    prove(config, rows)
    trainer_state = newest_trainer_state(config.run.directory)
    assert trainer_state["skipped"] == [[left_out["shard"], left_out["from_sample"]]]
    said = (config.run.directory / "logs" / "rank-0.log").read_text()
    name = f"{base}/bad/train/shard.{left_out['shard']:05}.mds"
    assert f"incident: {name} is left out from sample {left_out['from_sample']} on" in said and "{'shard'" not in said
    assert "the data was not looked at for faults before training: " + name in said


def test_a_mixture_too_goes_on_without_a_shard_that_is_missing(base, ranks):
    tiny.write_corpus(base / "more", 20)
    sources = [{"path": str(base / name), "weight": weight} for name, weight in (("corpus", 3), ("more", 1))]
    config = recipe(base, "mixed", "mixture", data={"sources": sources})
    prepare_only(config)
    (base / "mixture" / "train" / "shard.00002.mds").unlink()
    assert ranks.run(1, tiny.train, config)[0]["step"] == STEPS
    said = (config.run.directory / "logs" / "rank-0.log").read_text()
    assert "source 2" in said and "shard.00002.mds" in said


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_killed_and_resumed_on_another_world_it_stays_out_though_it_was_mended(base, ranks, whole, world, tmp_path):
    config, rows = whole
    shutil.copytree(base / "bad", tmp_path / "data")
    moved = recipe(base, f"moved-{world}", tmp_path / "data", checkpoint={"every_steps": 3, "async": False})
    with pytest.raises(RankFailed):
        ranks.run(world, tiny.train, moved, (world - 1, 11))
    shutil.rmtree(tmp_path / "data")
    shutil.copytree(base / "good", tmp_path / "data")
    results = ranks.run(3 - min(world, 2), tiny.train, moved)
    close(tiny.losses(moved.run.directory), tiny.losses(config.run.directory))
    assert ("resume", 9) in tiny.kinds(moved.run.directory) and len(results[0]["rows"]) == STEPS - 9
    prove(moved, rows)


@pytest.mark.parametrize(
    "layout", [pytest.param({"pp": 2}, id="pp"), pytest.param({"tp": 2, "shard": 1}, id="tp", marks=pytest.mark.long)]
)
def test_ranks_that_read_the_same_batches_agree_too(base, ranks, whole, layout):
    config, _ = whole
    # heads and widths that two ranks share: the model of `whole` has three heads
    model = {"num_attention_heads": 4, "num_key_value_heads": 2} if "tp" in layout else {}
    if model:
        config = recipe(base, "whole-tp", model=model)
        ranks.run(1, tiny.train, config)
    other = recipe(base, f"layout-{'-'.join(layout)}", parallel=layout, model=model)
    ranks.run(2, the_last_rank_can_read, other)
    close(tiny.losses(other.run.directory), tiny.losses(config.run.directory))


def the_last_rank_can_read(config):
    """The last rank, which has the loss of a pipeline, reads a good copy of the spoilt shard, as a host with it in its cache."""
    from windlass.data.shards import mds

    load = mds.Folder.load

    def good(self, number):
        self.directory = type(self.directory)(str(self.directory).replace("/bad/", "/good/"))
        return load(self, number)

    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        mds.Folder.load = good
    try:
        return tiny.train(config)
    finally:
        mds.Folder.load = load


def test_beyond_the_limit_the_run_ends_by_name_on_all_ranks(base, ranks):
    config = recipe(base, "beyond", "worse", limit=2)
    failures = ranks.run(2, tiny.refusal, config)
    assert failures[0] == failures[1] and "cannot be read; now" in failures[0]
    assert "data.max_bad_shards=2 at most" in failures[0] and "has the hash xxh64" in failures[0]


def test_the_limit_may_change_on_resume_but_not_to_less_than_was_left_out(base, ranks, whole, tmp_path):
    config, _ = whole
    directory = shutil.copytree(config.run.directory, tmp_path / "run")
    longer = {"run": {"directory": str(directory), "steps": STEPS + 1}}
    (said,) = ranks.run(1, tiny.refusal, recipe(base, "none", "good", limit=0, **longer))
    assert "data.max_bad_shards=0, and the checkpoint has left out 1" in said
    ranks.run(1, tiny.train, recipe(base, "more", "good", limit=3, **longer))
    assert max(tiny.losses(directory)) == STEPS + 1
    entry = tiny.lines(directory)[-6]
    resumed = [event for event in read_events(directory / "events.jsonl") if event["kind"] == "resume"]
    assert resumed[-1]["data"]["left_out"] == newest_trainer_state(directory)["skipped"], entry


def test_shards_left_out_of_another_stream_are_not_left_out_of_this_one(base):
    config = tiny.recipe(base, "plain")
    trainer_state = {"data": {"stream": "s"}, "samples_consumed": 24, "skipped": [[2, 8]]}
    assert Start(3, "", trainer_state).stream_state(config, "s") == {"samples_consumed": 24, "skipped": [[2, 8]]}
    assert Start(3, "", trainer_state).stream_state(config, "another") == {"samples_consumed": 24}
