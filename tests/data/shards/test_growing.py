"""Whoever needs a shard that is not written yet waits: until it is, or the set is whole, or an error says why not."""

import threading
import time

import pytest

from tests.data.grown import Grown
from windlass.data.shards.growing import open_growing
from windlass.data.shards.journal import JOURNAL_NAME, log_failure
from windlass.data.shards.mds import Reader
from windlass.errors import BadShard, Unavailable, UserError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("windlass.data.shards.growing.POLL_S", 0.01)
    monkeypatch.setattr("windlass.data.shards.journal.BEAT_EVERY_S", 0.05)


def follow(grown, max_silence_s=5.0):
    return open_growing(grown.directory, "train", max_silence_s)


def later(seconds, *calls):
    """Each call after a pause, in another thread."""

    def work():
        for call in calls:
            time.sleep(seconds)
            call()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_it_waits_for_so_many_shards_or_for_the_end(tmp_path):
    grown = Grown(tmp_path).write(1)
    folder = follow(grown)
    folder.wait_for(lambda: len(folder.shards) >= 1)
    thread = later(0.05, *[lambda: grown.write(1)] * 4)
    folder.wait_for(lambda: len(folder.shards) >= 4)
    assert len(folder.shards) >= 4 and not folder.is_complete
    thread.join()
    thread = later(0.05, grown.end)
    folder.wait_for(lambda: False)
    thread.join()
    assert folder.is_complete and len(folder.shards) == 5
    reader = Reader(folder)
    assert sum(1 for _ in reader) == sum(shard.num_samples for shard in folder.shards) == 23


def test_a_reader_sees_new_shards_and_no_damage_passes(tmp_path):
    grown = Grown(tmp_path).write(2)
    folder = follow(grown)
    reader = Reader(folder)
    assert len(reader.shard_samples) == 2
    grown.write(1)
    folder.read()
    reader.grow()
    assert reader.shard_samples == [5, 4, 5] and reader.num_samples == 14
    assert reader.read(2, 0)[0][0] == 1002
    path = tmp_path / "train" / "shard.00001.mds"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadShard, match=r"shard.00001"):
        reader.read(1, 0)


def test_a_preparation_that_is_silent_is_named_within_the_deadline(tmp_path):
    grown = Grown(tmp_path).write(3)
    folder = follow(grown, max_silence_s=0.3)
    with pytest.raises(UserError) as caught:
        folder.wait_for(lambda: False)
    assert f"{tmp_path} holds 3 shards of an unfinished preparation" in caught.value.given
    assert "no sign of life for 0.3" in caught.value.given and "data.order.deadline_s=0.3" in caught.value.rule
    assert "start this run again" in caught.value.change


def test_signs_of_life_put_the_deadline_off(tmp_path):
    """Twelve times half a second of reading, with 4 s of patience: no shard comes, and no error."""
    grown = Grown(tmp_path).write(1)
    folder = follow(grown, max_silence_s=4.0)
    thread = later(0.5, *[grown.beat.tick] * 12, lambda: grown.write(1))
    folder.wait_for(lambda: len(folder.shards) >= 2)
    thread.join()


@pytest.mark.parametrize("kind", [UserError, Unavailable])
def test_a_preparation_that_fails_says_why_at_once(tmp_path, kind):
    grown = Grown(tmp_path).write(2)
    folder = follow(grown, max_silence_s=60.0)
    error = kind("row 7 is no text", "rows are texts", "fix row 7")
    thread = later(0.1, lambda: log_failure(tmp_path, error))
    with pytest.raises(UserError) as caught:
        folder.wait_for(lambda: False)
    thread.join()
    assert caught.value.given == f"the preparation of {tmp_path} failed behind shard 2: row 7 is no text"
    assert caught.value.code == kind.code
    assert caught.value.rule == "rows are texts" and "fix row 7; then start this run again" in caught.value.change


def test_what_is_there_is_given_though_the_preparation_has_failed(tmp_path):
    grown = Grown(tmp_path).write(2)
    log_failure(tmp_path, UserError("given", "rule", "change"))
    folder = follow(grown)
    folder.wait_for(lambda: len(folder.shards) >= 2)


def test_a_preparation_that_is_removed_is_named(tmp_path):
    grown = Grown(tmp_path).write(2)
    folder = follow(grown)
    (tmp_path / JOURNAL_NAME).unlink()
    with pytest.raises(UserError, match=r"jsonl is gone; 2 shards were read"):
        folder.wait_for(lambda: False)


def test_closing_ends_a_wait(tmp_path):
    folder = follow(Grown(tmp_path), max_silence_s=60.0)
    thread = later(0.1, folder.close)
    with pytest.raises(RuntimeError, match="closed"):
        folder.wait_for(lambda: False)
    thread.join()


def test_without_a_journal_there_is_nothing_to_follow(tmp_path):
    assert open_growing(tmp_path, "train", 1.0) is None
