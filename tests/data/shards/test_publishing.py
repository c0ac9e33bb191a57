"""Publishing to a store, ended by SIGKILL at calls of sockets all along: what is there is whole, old or new, or nothing; and the
next publication needs nothing of it."""

import contextlib
import os

import pytest

from tests.data.conftest import data_config
from tests.data.killing import killing
from tests.data.prepare.test_prepare import quietly
from tests.data.shards.test_remote import remote_config, silent
from windlass.data.prepare.manifest import find_prepared
from windlass.data.shards.mds import Reader
from windlass.data.shards.remote import claim, publish
from windlass.object_store import Store

pytestmark = pytest.mark.long
KILLS = 40
KILLED = """
import socket
from pathlib import Path
import s3fs
from windlass.data.shards.remote import claim, publish
from windlass.object_store import Store
def run(directory, url):
    for name in ("send", "sendall", "sendmsg", "connect"):
        call = getattr(socket.socket, name)
        setattr(socket.socket, name, lambda self, *given, call=call: (count(), call(self, *given))[1])
    store = Store(url, 20)
    publish(Path(directory), store, claim(store), lambda line: None)
"""


@pytest.fixture
def killed_at(s3_place):
    """(directory, URL, call) -> publishes in a process that dies at that call. Returns how many calls were left, or None."""
    with killing(KILLED, os.environ) as ask:
        yield ask


def content(folder):
    """By name, the bytes of what is an object; a server's own files begin with a dot."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def settled(folder, config):
    """(objects, what is prepared there), once the server has done what the dead process had asked last."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            before, found = content(folder), find_prepared(config)
            if before == content(folder):
                return before, found


def test_a_publication_that_is_killed_leaves_the_old_one_or_the_new_one_or_nothing(
    small, s3_place, killed_at, tmp_path
):
    url, folder = s3_place
    config = remote_config(small[0], url, tmp_path / "cache")
    sources = [{"path": small[0].sources[0].path}]
    older = quietly(data_config(tmp_path, sources=sources, sequence_length=40, shard_bytes=4 << 10))
    store = Store(url, 20)

    def published(directory):
        publish(directory, store, claim(store), silent)
        return content(folder)

    def kill_at(call, begins):
        """`begins`: at what is published there, else at an empty store."""
        store.remove(store.sizes())
        if begins == "old":
            published(older.directory)
        return killed_at(small[1].directory, url, call)

    new, old = published(small[1].directory), published(older.directory)
    calls, seen = {begins: -kill_at(0, begins) for begins in ("nothing", "old")}, set()
    assert content(folder) == new
    num_killed = 0
    for kill in range(KILLS):
        begins = ("nothing", "old")[kill % 2]
        call = calls[begins] - kill * calls[begins] // KILLS
        num_killed += kill_at(call, begins) is None
        there, found = settled(folder, config)
        if "prepared.json" in there:
            assert there in (old, new)
            seen.add("old" if there == old else "new")
            assert sum(1 for _ in Reader(found.shards("train"))) == found.sets["train"].samples
        else:
            assert found is None
            seen.add("nothing")
        assert published(small[1].directory) == new, call
        assert store.sizes().keys() == new.keys()
    assert seen == {"old", "new", "nothing"} and num_killed >= 0.9 * KILLS, "a call more or less is the network's"
