"""What is reported of a preparation while it is written: only ever more, and never of another one."""

import json
import os
import threading

import numpy as np
import pytest

from tests.data.grown import Grown, samples_of
from windlass.data.shards import journal as room
from windlass.data.shards.journal import (
    BEAT_NAME,
    JOURNAL_NAME,
    Beat,
    Journal,
    begin_journal,
    log_failure,
    open_journal,
    read_beat,
)
from windlass.data.shards.mds import Reader, read_shard_index
from windlass.errors import BadShard, UserError


def read(directory):
    found = Journal(directory)
    found.read()
    return found


def test_shards_are_reported_as_they_become_whole_and_are_those_of_the_index(tmp_path):
    grown, follower = Grown(tmp_path), Journal(tmp_path)
    for number in range(4):
        grown.write(1)
        follower.read()
        assert len(follower.shards) == number + 1 and follower.end is None
        assert (tmp_path / "train" / follower.shards[-1].stored.name).stat().st_size == follower.shards[-1].num_bytes
    grown.end()
    follower.read()
    assert follower.end == {"kind": "end", "train": {}}
    assert follower.shards == read_shard_index(tmp_path / "train") == read(tmp_path).shards
    for number, (ids, _) in zip(range(5), Reader(tmp_path / "train")):
        assert (ids == samples_of(0)[number]).all()


def test_every_byte_that_changes_is_noticed(tmp_path):
    Grown(tmp_path).write(3)
    path = tmp_path / JOURNAL_NAME
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    for at in draw.integers(0, len(whole) - 1, 40).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(BadShard, match=JOURNAL_NAME) as caught:
            read(tmp_path)
        assert "delete the directory" in caught.value.change


def test_a_journal_without_one_of_its_lines_is_another_one(tmp_path):
    Grown(tmp_path).write(3)
    path = tmp_path / JOURNAL_NAME
    lines = path.read_bytes().splitlines(keepends=True)
    for number in range(3):
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        with pytest.raises(BadShard):
            read(tmp_path)


def test_a_torn_line_is_not_read_and_is_cut_off_by_who_goes_on(tmp_path):
    Grown(tmp_path).write(2)
    path = tmp_path / JOURNAL_NAME
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (last + 1, len(whole) - 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        follower = read(tmp_path)
        assert len(follower.shards) == 1
        again = object.__new__(Grown)
        again.directory = tmp_path
        again.go_on().write(2)
        assert path.read_bytes() == whole
        follower.read()
        assert len(follower.shards) == 2


def test_a_journal_that_is_replaced_while_it_is_read_is_refused(tmp_path):
    grown, follower = Grown(tmp_path).write(2), Journal(tmp_path)
    follower.read()
    begin_journal(tmp_path, {"fingerprint": "other", "sets": {}, "files": {}})
    with pytest.raises(BadShard, match="shorter than it was"):
        follower.read()
    other = object.__new__(Grown)
    other.directory = tmp_path
    other.go_on()
    while (tmp_path / JOURNAL_NAME).stat().st_size <= follower.num_bytes:
        other.write(1)
    with pytest.raises(BadShard):
        follower.read()
    assert grown.num_shards == 2


def test_going_on_writes_nothing_twice_and_refuses_other_shards(tmp_path, monkeypatch):
    grown = Grown(tmp_path).write(3)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "train").iterdir()}
    logged = (tmp_path / JOURNAL_NAME).read_bytes()
    (tmp_path / "train" / "shard.00001.mds").unlink()
    grown.go_on().write(3)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "train").iterdir()}
    changed = [path.name for path in before if before[path] != after[path]]
    assert changed == ["shard.00001.mds"] and (tmp_path / JOURNAL_NAME).read_bytes() == logged
    monkeypatch.setattr("tests.data.grown.samples_of", lambda shard: samples_of(shard + 1))
    with pytest.raises(BadShard, match=r"shard.00000.mds comes out with .* and had"):
        grown.go_on().write(1)


def test_a_shard_is_reported_only_when_its_file_is_whole(tmp_path, monkeypatch):
    grown = Grown(tmp_path).write(1)

    def dies(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("windlass.data.shards.mds.write_durably", dies)
    with pytest.raises(KeyboardInterrupt):
        grown.write(1)
    assert len(read(tmp_path).shards) == 1


def test_the_most_documents_of_a_sample_are_reported_with_every_shard(tmp_path):
    grown = Grown(tmp_path)
    ids = np.full((3, 5), 7, np.int32)
    for row in ([7, 7, 7, 7, 7], [7, 0, 7, 7, 7], [0, 0, 0, 7, 7], [7, 7, 0, 7, 7]):
        ids[1] = row
        grown.writer.write(ids, ids)
        grown.writer.end_shard()
    assert read(tmp_path).most_documents == [1, 2, 4, 4]


def test_no_journal_is_none_and_a_begun_one_is_found(tmp_path):
    assert open_journal(tmp_path / "nothing") is None and open_journal(tmp_path) is None
    Grown(tmp_path / "data")
    assert open_journal(tmp_path / "data").begin["fingerprint"] == "mine"
    (tmp_path / "data" / JOURNAL_NAME).write_bytes(b'{"kind": "beg')
    assert open_journal(tmp_path / "data") is None


def test_the_beat_changes_once_a_second_and_says_why_it_stops(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    beat = Beat()
    beat.tick()
    assert read_beat(tmp_path) == ("", None) and not os.listdir(tmp_path)
    beat.begin(tmp_path)
    seen = []
    for _ in range(40):
        now[0] += 0.1
        assert list(beat.through([1, 2])) == [1, 2]
        seen.append(read_beat(tmp_path)[0])
    assert 4 <= len(set(seen)) <= 5 and f"process {os.getpid()} on" in seen[0]
    (tmp_path / BEAT_NAME).unlink()
    error = UserError("given", "rule", "change")
    log_failure(tmp_path, error)
    assert read_beat(tmp_path) == ("", None)  # nobody waits
    grown = Grown(tmp_path / "data", beats=False)
    log_failure(grown.directory, error)
    assert str(read_beat(grown.directory)[1]) == str(error)
    grown.beat.begin(grown.directory)
    assert read_beat(grown.directory)[1] is None  # another preparation works
    grown.end()
    log_failure(grown.directory, error)
    assert read_beat(grown.directory)[1] is None  # all is there
    (tmp_path / BEAT_NAME).write_text('{"wh')
    assert read_beat(tmp_path) == ("", None)


def test_while_sources_are_looked_at_the_beat_goes_on_where_somebody_may_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "BEAT_EVERY_S", 0.01)
    with room.beating(tmp_path):
        assert not os.listdir(tmp_path)
    Grown(tmp_path / "data", beats=False)
    with room.beating(tmp_path / "data"):
        seen = set()
        for _ in range(6000):  # a busy machine may beat late; a beat that has ended never comes
            seen.add(read_beat(tmp_path / "data")[0])
            if len(seen) == 6:
                break
            room.time.sleep(0.01)
    assert len(seen) == 6
    last = read_beat(tmp_path / "data")
    room.time.sleep(0.05)
    assert read_beat(tmp_path / "data") == last


def test_two_who_take_over_at_once_disturb_each_other_in_no_beat(tmp_path):
    """The file is of one of them, or not whole, which counts as none; the next one is whole."""
    path, failed = tmp_path / BEAT_NAME, []

    def beat(who):
        try:
            for count in range(300):
                room._replace(path, {"who": who, "count": count})
                read_beat(tmp_path)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=beat, args=("x" * size,)) for size in (3, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    room._replace(path, {"who": "next", "count": 1})
    assert json.loads(path.read_text()) == {"who": "next", "count": 1}
