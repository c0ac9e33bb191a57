"""The same against Ceph's S3 gateway, which is stricter than the light server (multipart, signatures, paging)."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.data.shards.test_remote import loader_of, remote_config, silent, stream_hash
from tests.data.stream.test_stream import empty, few, folder, in_store, run_cells  # noqa: F401
from tests.data.streams import num_samples_of
from tests.test_map import ROOT
from windlass.data.prepare.manifest import open_prepared
from windlass.data.prepare.prepare import prepare
from windlass.errors import UserError
from windlass.object_store import Store

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("radosgw") is None, reason="Ceph is not installed (scripts/ceph_server.sh says how)"
    ),
]


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    """(environment, the directory of the daemons)"""
    pytest.importorskip("s3fs", reason="needs s3fs (the s3 extra)")
    directory = tmp_path_factory.mktemp("ceph")
    script = ["sh", str(ROOT / "scripts" / "ceph_server.sh"), str(directory)]
    try:
        done = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        yield dict(re.findall(r"^export (\w+)=(.*)$", done.stdout, re.MULTILINE)), directory
    finally:
        for file in directory.glob("*.pid"):
            kill(file)


def kill(file: Path):
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.fixture
def reached(ceph, monkeypatch):
    for name, value in ceph[0].items():
        monkeypatch.setenv(name, value)
    import fsspec

    fsspec.filesystem("s3", skip_instance_cache=True).makedirs("windlass", exist_ok=True)
    return "s3://windlass"


def test_prepared_there_and_read_through_the_cache_the_stream_is_the_local_one(reached, small, tmp_path):
    config = remote_config(small[0], f"{reached}/stream", tmp_path / "cache")
    prepare(config, {}, silent)
    length = small[1].sets["train"].samples * 3 // 2 // 12 * 12
    wanted = stream_hash(small[1], small[0], 1, 1, length)
    assert stream_hash(open_prepared(config, {}), config, 3, 2, length, cuts=[120]) == wanted
    said = []
    prepare(config, {}, said.append)
    assert "is prepared already and unchanged: skipped" in said[0]


def test_killed_and_resumed_on_another_world_the_stream_is_the_same(reached, folder, tmp_path):  # noqa: F811
    for path in folder.iterdir():
        Store(f"{reached}/matrix", 60).write(f"train/{path.name}", path)
    run_cells(in_store(folder, f"{reached}/matrix", tmp_path / "cache"), few(), empty(tmp_path / "cache"))


def test_a_large_file_goes_up_in_parts(reached, tmp_path):
    data = os.urandom(120 << 20)
    (tmp_path / "large").write_bytes(data)
    store = Store(f"{reached}/large", 120)
    store.write("a", tmp_path / "large")
    assert store.read("a") == data and store.sizes() == {"a": len(data)}


def test_listing_goes_beyond_one_page(reached):
    store = Store(f"{reached}/many", 120)
    for number in range(1010):
        store.write(f"train/{number}", b"x")
    assert len(store.sizes()) == 1010


def test_what_is_wrong_is_named(reached, monkeypatch):
    with pytest.raises(UserError, match=r"no-such-bucket/x/a cannot be written"):
        Store("s3://no-such-bucket/x", 20).write("a", b"x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng")
    for call in (
        Store(reached, 20).sizes,
        lambda: Store(reached, 20).read("a"),
        lambda: Store(reached, 20).write("a", b""),
    ):
        with pytest.raises(UserError, match="credentials come from the environment"):
            call()


def test_a_gateway_killed_mid_stream_raises_within_the_deadline(reached, ceph, small, tmp_path):
    config = remote_config(small[0], f"{reached}/killed", tmp_path / "cache")
    prepare(config, {}, silent)
    config = config.model_copy(update={"cache": config.cache.model_copy(update={"deadline_s": 2.0})})
    shutil.rmtree(tmp_path / "cache")
    prepared = open_prepared(config, {})
    loader = loader_of(prepared, config, micro_batch=1)
    for _ in range(3):
        loader.next()
    kill(ceph[1] / "client.rgw.pid")
    with pytest.raises(UserError) as caught:
        for _ in range(num_samples_of(loader)):
            loader.next()
    loader.close()
    assert f"{config.directory}/train/shard.000" in caught.value.given
