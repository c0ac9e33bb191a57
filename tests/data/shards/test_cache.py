"""The cache stays under its limit, trusts nothing, and survives death at any moment and any number of users."""

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import xxhash

from windlass.data.shards.cache import Cache
from windlass.data.shards.index import File
from windlass.errors import BadShard, UserError

KB = 1 << 10


def shard(number, num_bytes=100 * KB):
    """(its facts, its bytes)"""
    data = np.random.default_rng(number).bytes(num_bytes)
    return File(f"shard.{number:05}.mds", num_bytes, "xxh64", xxhash.xxh64_hexdigest(data)), data


SHARDS = [shard(number) for number in range(12)]


class Counted:
    """A cache whose fetches are counted."""

    def __init__(self, directory, limit_bytes=350 * KB):
        self.cache, self.fetched = Cache(directory, limit_bytes), []

    def load(self, number):
        file, data = SHARDS[number]

        def fetch():
            assert self.cache.used_bytes() <= self.cache.limit_bytes
            self.fetched.append(number)
            return data

        found = self.cache.load(file, fetch, f"s3://b/{file.name}")
        assert found.tobytes() == data and self.cache.used_bytes() <= self.cache.limit_bytes
        return found


def cached(directory, number):
    (path,) = directory.glob(f"shards/xxh64-{SHARDS[number][0].digest}-*")
    return path


def test_a_shard_is_fetched_once_and_then_local(tmp_path):
    one = Counted(tmp_path)
    for number in (0, 1, 0, 1, 0):
        one.load(number)
    assert one.fetched == [0, 1]
    other = Counted(tmp_path)
    other.load(0)
    assert other.fetched == []


def test_the_limit_holds_and_what_was_opened_longest_ago_goes_first(tmp_path):
    one = Counted(tmp_path)
    for number in (0, 1, 2, 0, 3):
        one.load(number)
        time.sleep(0.01)
    assert one.fetched == [0, 1, 2, 3]
    one.load(0)
    one.load(2)
    assert one.fetched == [0, 1, 2, 3], "1 went, not 0 or 2"
    draw = random.Random(0)
    for _ in range(60):
        one.load(draw.randrange(12))


def test_what_is_mapped_goes_last_and_stays_readable(tmp_path):
    one = Counted(tmp_path)
    held = one.load(0)
    for number in (1, 2, 3, 4):
        one.load(number)
        assert cached(tmp_path, 0).exists(), "opened first, but mapped"
    others = [one.load(number) for number in (0, 5, 6)]
    one.load(7)  # all are mapped: the oldest loses its name, not its bytes
    assert not any(tmp_path.glob(f"shards/*{SHARDS[0][0].digest}*"))
    assert held.tobytes() == SHARDS[0][1] and others[1].tobytes() == SHARDS[5][1]


def test_an_unmapped_shard_is_no_longer_held(tmp_path):
    one = Counted(tmp_path)
    held = one.load(0)
    del held
    with open(cached(tmp_path, 0), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("what", ["flipped", "truncated", "empty", "longer", "other"])
def test_a_spoilt_file_is_fetched_again(tmp_path, what):
    Counted(tmp_path).load(0)
    path, data = cached(tmp_path, 0), bytearray(SHARDS[0][1])
    data[5000] ^= 1
    changed = {
        "flipped": bytes(data),
        "truncated": data[:-1],
        "empty": b"",
        "longer": data + b"x",
        "other": SHARDS[1][1],
    }
    path.write_bytes(changed[what])
    one = Counted(tmp_path)
    one.load(0)
    one.load(0)
    assert one.fetched == [0]


def test_a_disk_that_spoils_what_is_written_is_named(tmp_path, monkeypatch):
    rename = os.rename

    def spoil(source, target):
        with open(source, "r+b") as file:
            file.write(b"spoilt")
        rename(source, target)

    monkeypatch.setattr("windlass.data.shards.cache.os.rename", spoil)
    with pytest.raises(BadShard) as caught:
        Counted(tmp_path).load(0)
    assert "the cached copy of s3://b/shard.00000.mds, has the hash xxh64" in caught.value.given
    assert SHARDS[0][0].digest in caught.value.rule and "the disk of data.cache.directory" in caught.value.change


def test_a_failed_fetch_leaves_nothing_and_the_next_one_works(tmp_path):
    cache = Cache(tmp_path, 350 * KB)
    with pytest.raises(ZeroDivisionError):
        cache.load(SHARDS[0][0], lambda: bytes(1 // 0), "u")
    assert cache.used_bytes() == 0
    Counted(tmp_path).load(0)


def test_a_limit_that_is_too_small_says_by_how_much(tmp_path):
    with pytest.raises(UserError) as caught:
        Counted(tmp_path, 50 * KB).load(0)
    assert "data.cache.limit_mib: 0.0488281" in caught.value.given and "100.0 KiB more" in caught.value.given
    assert "by 1 or more" in caught.value.change and not list((tmp_path / "shards").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_first_gives_up_cached_shards_and_then_is_named(tmp_path, monkeypatch, number):
    one, fallocate = Counted(tmp_path), os.posix_fallocate
    for at in (0, 1, 2):
        one.load(at)

    def full(descriptor, offset, length, room=2):
        if number == errno.EDQUOT or len(list((tmp_path / "shards").glob("[!.]*"))) > room:
            raise OSError(number, "No space")
        fallocate(descriptor, offset, length)

    monkeypatch.setattr("windlass.data.shards.cache.os.posix_fallocate", full)
    if number == errno.ENOSPC:
        one.load(3)
        monkeypatch.setattr("windlass.data.shards.cache.os.posix_fallocate", lambda *given: full(*given, room=-1))
    with pytest.raises(UserError) as caught:
        one.load(4)
    assert f"the disk of data.cache.directory {tmp_path} is full: 100.0 KiB are needed" in caught.value.given
    assert not list((tmp_path / "shards").glob(".*"))


def test_a_disk_without_fallocate_is_used_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr("windlass.data.shards.cache.os.posix_fallocate", refuse)
    Counted(tmp_path).load(0)


def test_a_place_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be used") as caught:
            Cache(place, KB)
        assert str(place) in caught.value.given


def test_files_of_other_preparations_go_before_shards_but_not_while_in_use(tmp_path):
    one = Counted(tmp_path)
    (used, held), (unused, other) = one.cache.folder("used"), one.cache.folder("unused")
    one.cache.put(used / "tokenizer" / "t", bytes(100 * KB))
    one.cache.put(unused / "t", bytes(100 * KB))
    one.load(0)
    os.close(other)
    one.load(1)
    assert not unused.exists() and (used / "tokenizer" / "t").stat().st_size == 100 * KB
    one.load(2)
    assert one.fetched == [0, 1, 2] and used.exists() and not list(tmp_path.glob(f"shards/*{SHARDS[0][0].digest}*"))
    os.close(held)


def test_who_waits_for_another_fetch_sleeps(tmp_path, monkeypatch):
    """Also when, as soon as it is there, a third has it mapped and keeps it."""
    begun, held, looks, bring = threading.Event(), [], [], Cache._bring
    monkeypatch.setattr(Cache, "_bring", lambda self, *given: looks.append(1) or bring(self, *given))

    def slow():
        begun.set()
        time.sleep(0.3)
        return SHARDS[0][1]

    first = threading.Thread(target=lambda: held.append(Cache(tmp_path, 350 * KB).load(SHARDS[0][0], slow, "u")))
    first.start()
    assert begun.wait(5)
    others = [threading.Thread(target=lambda: held.append(Counted(tmp_path).load(0))) for _ in range(3)]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(10)
    assert len(held) == 4 and len(looks) <= 8


def test_what_a_killed_fetcher_left_is_swept(tmp_path):
    one = Counted(tmp_path)
    (tmp_path / "shards" / ".xxh64-0-300000.part").write_bytes(bytes(300 * KB))
    one.load(0)
    assert [path.name for path in (tmp_path / "shards").iterdir()] == [cached(tmp_path, 0).name]


def test_a_spoilt_file_that_another_process_has_replaced_stays(tmp_path):
    one = Counted(tmp_path)
    one.load(0)
    path = cached(tmp_path, 0)
    one.cache._remove(path, path.stat().st_ino + 1)
    assert path.exists()
    one.cache._remove(path, path.stat().st_ino)
    assert not path.exists()


# ---- several processes; numpy and xxhash are all they import

READER = """
import pathlib, random, sys, time
import numpy as np
from tests.data.shards.test_cache import SHARDS
from windlass.data.shards.cache import Cache
directory, seed, rounds, limit, log = sys.argv[1:]
cache, draw, held = Cache(pathlib.Path(directory), int(limit)), random.Random(int(seed)), []
def fetch(number):
    with open(log, "a") as file:
        file.write(f"{number}\\n")
    time.sleep(0.003)
    return SHARDS[number][1]
print("ready", flush=True)
for _ in range(int(rounds)):
    number = draw.randrange(len(SHARDS))
    data = cache.load(SHARDS[number][0], lambda: fetch(number), "u")
    assert data.tobytes() == SHARDS[number][1]
    held = (held + [data])[-2:]
print("done", flush=True)
"""


def start_reader(directory, seed, rounds, limit_bytes, log):
    arguments = [str(directory), str(seed), str(rounds), str(limit_bytes), str(log)]
    command = [sys.executable, "-c", READER, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_readers_that_share_a_cache_fetch_each_shard_once(tmp_path):
    readers = [start_reader(tmp_path / "cache", seed, 60, 4096 * KB, tmp_path / "log") for seed in range(3)]
    outputs = [reader.communicate(timeout=60)[0] for reader in readers]
    assert [output.split()[-1] for output in outputs] == ["done"] * 3
    assert sorted(map(int, (tmp_path / "log").read_text().split())) == list(range(12))


def test_twelve_kills_of_readers_leave_a_cache_that_every_reader_can_use(tmp_path):
    """Two live readers all the while, so each kill also meets waiting and evicting neighbours."""
    directory, log, limit_bytes = tmp_path / "cache", tmp_path / "log", 450 * KB

    survivors = [start_reader(directory, seed, 250, limit_bytes, log) for seed in (100, 101)]
    draw = random.Random(1)
    for number in range(12):
        victim = start_reader(directory, number, 100_000, limit_bytes, log)
        assert victim.stdout.readline() == "ready\n"
        time.sleep(draw.random() * 0.15)
        victim.send_signal(signal.SIGKILL)
        assert victim.wait() == -signal.SIGKILL
        victim.stdout.close()

    outputs = [reader.communicate(timeout=120)[0] for reader in survivors]
    assert [output.split()[-1] for output in outputs] == ["done"] * 2
    after = Counted(directory, limit_bytes)
    for number in range(12):
        after.load(number)
    assert not list((directory / "shards").glob(".*.part")), "what a killed fetcher left is swept"
