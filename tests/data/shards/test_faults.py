"""Every fault of a disk, a cache or a store: an error with the name of what is wrong, or a clean recovery, never a short epoch.

One row per fault. Rows that need more are elsewhere: kills of readers that share a cache (test_cache), what else an index may ask
for (test_mds, test_shards), a body that breaks off and credentials of every operation (test_commit), Ceph (test_ceph).
"""

import errno
import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import xxhash

from tests.data.shards.test_cache import KB, SHARDS
from tests.data.shards.test_remote import change_files, loader_of, remote_config, silent
from tests.data.streams import num_samples_of
from windlass.data.prepare.manifest import open_prepared
from windlass.data.shards.cache import Cache
from windlass.data.shards.mds import Reader
from windlass.data.shards.remote import claim, publish
from windlass.errors import BadShard, UserError
from windlass.object_store import Store


@pytest.fixture
def published(small, tmp_path):
    """(config, the folder of its objects): the small preparation in a store, read through a cache."""
    store = Store(f"file://{tmp_path}/objects", 60)
    publish(small[1].directory, store, claim(store), silent)
    return remote_config(small[0], store.url, tmp_path / "cache"), tmp_path / "objects"


def one_epoch(loader):
    """Reads one epoch -> the rows. What it raises comes out; it never ends early."""
    rows = [batch["input_ids"] for _ in range(num_samples_of(loader)) for batch in loader.next()]
    assert len(rows) == num_samples_of(loader)
    return np.concatenate(rows)


class Broken(io.FileIO):
    """A file with a bad block in its second half."""

    def readinto(self, buffer):
        if self.tell() >= os.fstat(self.fileno()).st_size // 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().readinto(memoryview(buffer)[:512])


def broken(name, how_often=10**9):
    """`open`, with a bad block in files of this name that many times."""
    left = [how_often]

    def opened(path, mode="r", *rest, **settings):
        if name in str(path) and mode == "rb" and left[0] > 0:
            left[0] -= 1
            return Broken(path)
        return open(path, mode, *rest, **settings)

    return opened


# ---- a local disk


def spoil_file(path, what):
    data = bytearray(path.read_bytes())
    if what == "missing":
        path.unlink()
    elif what == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(data[: {"truncated": -7, "emptied": 0}[what]])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("flipped", "has the hash xxh64"),
        ("truncated", "bytes (truncated"),
        ("emptied", "has 0 bytes"),
        ("missing", "is missing"),
        ("bad block", "cannot be read: Input/output error"),
    ],
)
@pytest.mark.parametrize("when", ["before", "while it is open"])
def test_a_shard_on_a_local_disk(small, tmp_path, monkeypatch, what, says, when):
    config, prepared, _ = small
    folder = shutil.copytree(prepared.directory, tmp_path / "data")
    config = config.model_copy(update={"directory": str(folder)})
    name = "shard.00002.mds"

    def damage():
        if what == "bad block":
            monkeypatch.setattr("windlass.data.shards.mds.open", broken(name), raising=False)
        else:
            spoil_file(folder / "train" / name, what)

    if when == "before":
        damage()
    with pytest.raises(BadShard) as caught:
        loader = loader_of(open_prepared(config, {}), config, micro_batch=1, shuffle_window=1)
        if when != "before":
            damage()
        try:
            one_epoch(loader)
        finally:
            loader.close()
    assert f"{folder}/train/{name}" in caught.value.given and says in caught.value.given
    promised = Reader(prepared.shards("train")).shards[2].raw
    assert promised.digest in caught.value.rule or str(promised.num_bytes) in caught.value.rule


# ---- the cache


@pytest.mark.parametrize("what", ["flipped", "truncated", "emptied", "half-written", "bad block"])
def test_a_copy_in_the_cache(published, small, tmp_path, monkeypatch, what):
    """Each is fetched again, once."""
    config, _ = published
    wanted = one_epoch(loader := loader_of(small[1], small[0], micro_batch=1))
    loader.close()
    list(Reader(open_prepared(config, {}).shards("train")))
    cached = sorted((tmp_path / "cache" / "shards").iterdir())
    if what == "bad block":
        monkeypatch.setattr("windlass.data.shards.cache.open", broken(cached[0].name, 1), raising=False)
    elif what == "half-written":
        cached[0].rename(cached[0].with_name(f".{cached[0].name}.part"))
        os.truncate(cached[0].with_name(f".{cached[0].name}.part"), 700)
    else:
        spoil_file(cached[0], what)
    prepared = open_prepared(config, {})
    read, fetched = prepared.remote.store.read, []
    monkeypatch.setattr(prepared.remote.store, "read", lambda name: fetched.append(name) or read(name))
    loader = loader_of(prepared, config, micro_batch=1)
    assert (one_epoch(loader) == wanted).all()
    loader.close()
    assert len(fetched) == 1 and not list((tmp_path / "cache" / "shards").glob(".*.part"))


FULL = """
import pathlib, subprocess, sys
import numpy as np
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[2]}k", "none", sys.argv[1]], check=True)
from tests.data.shards.test_cache import KB, SHARDS
from windlass.data.shards.cache import Cache
from windlass.errors import UserError
cache, held = Cache(pathlib.Path(sys.argv[1]), 4096 * KB), []
folder, lock = cache.folder("small")
try:
    for number in range(12):
        data = cache.load(SHARDS[number][0], lambda: SHARDS[number][1], "u")
        assert data.tobytes() == SHARDS[number][1]
        held = (held + [data])[-1:]
    print("read all,", len(list(cache.directory.glob("shards/*"))), "stay")
    cache.put(folder / "big", bytes(600 * KB))
except UserError as error:
    print(error.given)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="a small disk needs root and unshare")
@pytest.mark.parametrize(("size_kib", "says"), [(360, "read all, "), (60, "100.0 KiB are needed")])
def test_a_disk_that_is_really_full(tmp_path, size_kib, says):
    """A tmpfs in a namespace of its own. What is cached goes first; where that is not enough the disk is named."""
    command = ["unshare", "-m", sys.executable, "-c", FULL, str(tmp_path), str(size_kib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout, done.stdout
    assert f"the disk of data.cache.directory {tmp_path} is full" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_a_file_is_written(tmp_path, monkeypatch, number):
    """A file system without fallocate takes the room only when bytes come; nothing half-written stays."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no")

    class Small(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > 30 * KB:
                raise OSError(number, os.strerror(number))
            return super().write(data)

    monkeypatch.setattr("windlass.data.shards.cache.os.posix_fallocate", refuse)
    real = open
    monkeypatch.setattr(
        "windlass.data.shards.cache.open",
        lambda file, mode, **rest: Small(file, mode) if isinstance(file, int) else real(file, mode, **rest),
        raising=False,
    )
    with pytest.raises(UserError, match=f"the disk of data.cache.directory {tmp_path} is full"):
        Cache(tmp_path, 1024 * KB).load(SHARDS[0][0], lambda: SHARDS[0][1], "u")
    assert not list((tmp_path / "shards").iterdir())


@pytest.mark.parametrize("operation", ["folder", "put"])
def test_a_disk_with_no_room_for_a_small_file(tmp_path, monkeypatch, operation):
    cache = Cache(tmp_path, 1 << 20)
    folder, held = cache.folder("x")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space")

    monkeypatch.setattr("pathlib.Path.mkdir", full)
    with pytest.raises(UserError, match=f"the disk of data.cache.directory {tmp_path} is full"):
        cache.folder("y") if operation == "folder" else cache.put(folder / "tokenizer" / "t", b"x")
    os.close(held)


# ---- the store


def rewritten(config, change):
    """The index of the training set changed, with every hash above it made to fit."""
    store = Store(config.directory, 60)
    index = json.loads(store.read("train/index.json"))
    change(index["shards"][0])
    data = json.dumps(index).encode()
    store.write("train/index.json", data)
    change_files(config, {"train/index.json": xxhash.xxh3_128_hexdigest(data)})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda entry: entry["raw_data"].update(basename="../../etc/passwd"), "names the file '../../etc/passwd'"),
        (lambda entry: entry.update(column_encodings=["pkl", "pkl"]), "['pkl', 'pkl']"),
        (lambda entry: entry["raw_data"].update(bytes=1 << 40), f"{1 << 40} bytes"),
    ],
    ids=["climbs", "pickle", "huge"],
)
def test_an_index_that_asks_for_more(published, change, says):
    config, _ = published
    rewritten(config, change)
    with pytest.raises(BadShard) as caught:
        open_prepared(config, {})
    assert says in caught.value.given and f"{config.directory}/train/index.json" in caught.value.given


def test_wrong_credentials_while_a_run_opens_its_data(small, s3_place, tmp_path, monkeypatch):
    config = remote_config(small[0], s3_place[0], tmp_path / "cache")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng")
    with pytest.raises(UserError) as caught:
        open_prepared(config, {})
    assert f"{config.directory}/prepared.json" in caught.value.given and "wr0ng" not in str(caught.value)


def test_credentials_that_end_while_a_run_reads(published, monkeypatch):
    """The store refuses from the fourth file on, as it does when a token has expired."""
    config, _ = published
    prepared = open_prepared(config, {})
    read, times = prepared.remote.store._fs.cat_file, []

    def refused(path):
        times.append(path)
        if len(times) > 3:
            raise PermissionError("The provided token has expired")
        return read(path)

    monkeypatch.setattr(prepared.remote.store._fs, "cat_file", refused)
    loader = loader_of(prepared, config, micro_batch=1)
    with pytest.raises(UserError) as caught:
        one_epoch(loader)
    loader.close()
    assert f"{config.directory}/train/shard.000" in caught.value.given and "token has expired" in caught.value.given
    assert "credentials come from the environment" in caught.value.rule, "at once, not when the deadline has passed"


def test_a_shard_that_was_deleted_while_a_run_reads(published):
    config, folder = published
    prepared = open_prepared(config, {})
    loader = loader_of(prepared, config, micro_batch=1)
    for path in (folder / "train").glob("shard.*"):
        path.unlink()
    with pytest.raises(BadShard, match=r"/train/shard\.000\d\d\.mds is missing"):
        one_epoch(loader)
    loader.close()
