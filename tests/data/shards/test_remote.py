"""A preparation at a URL is the local one: the same stream, through a bounded cache, and no fault of the store is silent."""

import fcntl
import hashlib
import itertools
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from scripts.s3_server import s3_server
from tests.data.streams import num_samples_of, open_bare
from tests.stores import BUCKET, NEEDS
from windlass.data.prepare.manifest import find_prepared, open_prepared
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.cache import Cache
from windlass.data.shards.mds import Reader, Writer
from windlass.data.shards.remote import Remote, claim, publish
from windlass.errors import BadShard, UserError
from windlass.object_store import Store

MIB = 1 << 20
SMALL = ("tokenizer/tokenizer.json", "train/index.json")
HOSTILE = ["../../etc/passwd", "/etc/passwd", "tokenizer/../../x", "tokenizer/a/../../x", "train/index.json/../../x"]
HOSTILE += ["train/shard.00000.mds", ".x/index.json"]


def silent(_line):
    pass


def remote_config(config, url, cache, limit_mib=1, **changes):
    """`config` with its shards at `url`."""
    place = {"directory": url, "cache": {"directory": str(cache), "limit_mib": limit_mib, "deadline_s": 20}}
    return type(config).model_validate({**config.model_dump(by_alias=True), **place, **changes})


@pytest.fixture(
    params=["s3", pytest.param("file", marks=pytest.mark.long), pytest.param("memory", marks=pytest.mark.long)]
)
def place(request, tmp_path):
    """(URL, the folder whose files are its objects; None in memory)"""
    if request.param == "s3":
        return request.getfixturevalue("s3_place")
    folder = tmp_path / "objects"
    return (f"file://{folder}", folder) if request.param == "file" else (f"memory://{tmp_path}", None)


@pytest.fixture
def published(small, s3_place, tmp_path):
    """(config, the folder of its objects): the small preparation in the S3 server."""
    store = Store(s3_place[0], 20)
    publish(small[1].directory, store, claim(store), silent)
    return remote_config(small[0], s3_place[0], tmp_path / "cache"), s3_place[1]


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.long)])
def in_store(request, small, tmp_path):
    """The same for what is above the transport: a request of the S3 server takes 60 ms of its CPU."""
    if request.param == "s3":
        return request.getfixturevalue("published")
    folder = tmp_path / "objects"
    store = Store(f"file://{folder}", 20)
    publish(small[1].directory, store, claim(store), silent)
    return remote_config(small[0], f"file://{folder}", tmp_path / "cache"), folder


def loader_of(prepared, config, **changes):
    settings = {"micro_batch": 2, "accumulation": 1, "batch_rank": 0, "batch_ranks": 1, "seed": 17, "consumed": 0}
    given = {**settings, "sequence_length": config.sequence_length, "shuffle_window": config.shuffle_window, **changes}
    return open_bare(prepared.shards("train"), **given)


def stream_hash(prepared, config, world, accumulation, num_samples, cuts=()):
    """The hash of the first `num_samples` samples of the stream as `world` ranks read them, restarted at `cuts`."""
    digest, consumed = hashlib.sha256(), 0
    for end in (*cuts, num_samples):
        loaders = [
            loader_of(
                prepared, config, accumulation=accumulation, batch_rank=rank, batch_ranks=world, consumed=consumed,
                micro_batch=12 // world // accumulation,
            )
            for rank in range(world)
        ]  # fmt: skip
        while consumed < end:
            for loader in loaders:
                for batch in loader.next():
                    digest.update(np.stack([batch["input_ids"], batch["targets"]], 1).tobytes())
            consumed = loaders[0].consumed
        for loader in loaders:
            loader.close()
    return digest.hexdigest(), consumed


def test_the_stream_of_a_store_is_the_local_one_for_ranks_accumulation_and_resume(small, published, tmp_path):
    local_config, local, _ = small
    config, _ = published
    length = local.sets["train"].samples * 2 // 12 * 12  # nearly two epochs
    wanted, consumed = stream_hash(local, local_config, 1, 1, length)
    assert consumed == length
    draw = random.Random(0)
    for world, accumulation in itertools.product((1, 2, 3), (1, 2)):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        cut = draw.randrange(1, length // 12) * 12
        found = stream_hash(open_prepared(config, {}), config, world, accumulation, length, cuts=[cut])
        assert found == (wanted, length), (world, accumulation, cut)


def test_prepare_writes_to_a_store_and_skips_what_is_there(place, small, tmp_path):
    url, _ = place
    config, said = remote_config(small[0], url, tmp_path / "cache"), []
    prepared = prepare(config, {}, said.append)
    assert prepared.fingerprint == small[1].fingerprint and prepared.where == url.rstrip("/")
    for name in ("train", "validation"):
        pairs = zip(Reader(prepared.shards(name)), Reader(small[1].shards(name)), strict=True)
        assert all((one[0] == two[0]).all() and (one[1] == two[1]).all() for one, two in pairs)
    names = set(Store(url, 20).sizes())
    assert "prepared.json" in names and ".publishing" not in names
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("cache")) == ["cache"]
    assert any(f"preparing {url}: nothing is there yet" in line for line in said)
    said.clear()
    prepare(config, {}, said.append)
    assert len(said) == 1 and f"{url} is prepared already and unchanged: skipped" in said[0]
    changed = remote_config(small[0], url, tmp_path / "cache", sequence_length=20)
    assert prepare(changed, {}, silent).sets["train"].samples != prepared.sets["train"].samples
    with pytest.raises(UserError, match="was prepared with sequence_length 20, the recipe has 33"):
        open_prepared(config, {})


def large_remote(tmp_path, limit_mib, shard_bytes):
    """A store with 12,000 random samples of 34 ids, 3.4 MB, and nothing else of a preparation."""
    ids = np.random.default_rng(0).integers(0, 1000, (12_000, 34)).astype(np.int32)
    writer = Writer(tmp_path / "objects" / "train", 34, shard_bytes)
    writer.write(ids, ids)
    writer.close()
    return reopened(tmp_path, limit_mib)


def reopened(tmp_path, limit_mib):
    digest = xxhash.xxh3_128_hexdigest((tmp_path / "objects" / "train" / "index.json").read_bytes())
    store, cache = Store(f"file://{tmp_path}/objects", 20), Cache(tmp_path / "cache", limit_mib * MIB)
    return Remote(store, cache, b"", {"train/index.json": digest})


def test_the_cache_never_holds_more_than_its_limit(tmp_path):
    """54 shards of 64 KiB through 1 MiB, in two epochs, by three ranks in turn: every sample twice, none short."""
    remote = large_remote(tmp_path, 1, 64 << 10)
    assert len(remote.shards("train").shards) > 50
    settings = {"sequence_length": 33, "micro_batch": 100, "accumulation": 1, "seed": 3, "shuffle_window": 6}
    ranks = [open_bare(remote.shards("train"), **settings, batch_rank=rank, batch_ranks=3) for rank in range(3)]
    largest = rows = 0
    while ranks[0].consumed < 2 * num_samples_of(ranks[0]):
        rows += sum(len(batch["input_ids"]) for rank in ranks for batch in rank.next())
        # loaders fetch ahead in threads: nothing moves while the lock is held
        with open(tmp_path / "cache" / ".lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
            largest = max(largest, sum(path.stat().st_blocks * 512 for path in files))
    for rank in ranks:
        rank.close()
    assert remote.shards("train").max_mapped == 15 == Reader(remote.shards("train")).max_mapped, "one is on its way"
    assert rows == 24_000 and MIB // 2 < largest <= MIB, "used, and kept"


def test_a_limit_under_a_window_and_a_shard_is_refused_with_the_number_that_works(tmp_path):
    remote = large_remote(tmp_path, 1, 400 << 10)
    with pytest.raises(UserError) as caught:
        remote.check_window("train", 5)
    assert "data.cache.limit_mib: 1 with data.shuffle_window: 5 and shards of 399.9 KiB" in caught.value.given
    assert "one shuffle window, one shard more" in caught.value.rule
    enough = int(caught.value.change.split("limit_mib to ")[1].split()[0])
    assert enough == 3
    remote = reopened(tmp_path, enough)
    remote.check_window("train", 5)
    settings = {"sequence_length": 33, "micro_batch": 100, "accumulation": 1, "seed": 3, "shuffle_window": 5}
    loader = open_bare(remote.shards("train"), **settings, batch_rank=0, batch_ranks=1)
    for _ in range(120):
        loader.next()
    loader.close()
    with pytest.raises(UserError, match="limit_mib to 4"):
        remote.check_window("train", 8)
    with pytest.raises(UserError, match="one shuffle window for each of 4 sources, one shard more"):
        remote.check_window("train", 2, 4)


def test_the_window_is_checked_when_a_run_opens_its_data(published, monkeypatch):
    config, _ = published
    monkeypatch.setattr("windlass.data.prepare.manifest.MIB", 1 << 10)  # 1 KiB for one MiB
    with pytest.raises(UserError, match="limit_mib"):
        open_prepared(config, {})


# ---- faults of the store


def objects(folder):
    return sorted((folder / "train").glob("shard.*.mds"))


def spoil(config, name, what):
    """Damages a file of the store."""
    store = Store(config.directory, 20)
    if what == "missing":
        store.remove([name])
    elif what == "truncated":
        store.write(name, store.read(name)[:-7])
    else:
        store.write(name, flipped(store.read(name)))


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("what", "says"), [("flipped", "has the hash xxh64"), ("truncated", "bytes (truncated"), ("missing", "is missing")]
)
def test_a_bad_shard_is_named_with_its_url_and_both_values_and_no_epoch_is_short(published, what, says):
    config, _ = published
    prepared = open_prepared(config, {})
    promised = prepared.shards("train").shards[1].raw
    spoil(config, "train/shard.00001.mds", what)
    loader = loader_of(prepared, config, micro_batch=1)
    good = 0
    with pytest.raises(BadShard) as caught:
        for good in range(10**6):  # noqa: B007
            loader.next()
    loader.close()
    assert good < num_samples_of(loader)
    assert f"{config.directory}/train/shard.00001.mds" in caught.value.given and says in caught.value.given
    assert (promised.digest if what == "flipped" else f"{promised.num_bytes} bytes") in caught.value.rule
    assert what == "missing" or "fetched twice" in caught.value.given
    with pytest.raises(BadShard):  # and every later call
        loader.next()


def test_what_was_spoilt_on_its_way_is_fetched_again(published, monkeypatch):
    config, _ = published
    prepared = open_prepared(config, {})
    read, spoilt = prepared.remote.store.read, []

    def once(name):
        data = read(name)
        if name not in spoilt:
            spoilt.append(name)
            return data[:-1] + bytes([data[-1] ^ 8])
        return data

    monkeypatch.setattr(prepared.remote.store, "read", once)
    assert sum(1 for _ in Reader(prepared.shards("train"))) == prepared.sets["train"].samples
    assert len(spoilt) == len(prepared.shards("train").shards)


def test_a_flipped_bit_in_the_cache_is_mended_from_the_store(published, small, tmp_path):
    config, _ = published
    list(Reader(open_prepared(config, {}).shards("train")))
    for path in (tmp_path / "cache" / "shards").iterdir():
        path.write_bytes(flipped(path.read_bytes()))
    pairs = zip(Reader(open_prepared(config, {}).shards("train")), Reader(small[1].shards("train")), strict=True)
    assert all((one[0] == two[0]).all() for one, two in pairs)


def test_a_bad_small_file_is_named(in_store, tmp_path):
    for number, (name, what) in enumerate(itertools.product(SMALL, ("flipped", "missing"))):
        config = remote_config(in_store[0], in_store[0].directory, tmp_path / f"cache {number}")
        store = Store(config.directory, 20)
        good = store.read(name)
        spoil(config, name, what)
        with pytest.raises(BadShard) as caught:
            open_prepared(config, {})
        assert f"{config.directory}/{name}" in caught.value.given, (name, what)
        assert what == "missing" or "xxh3-128" in caught.value.rule, name
        store.write(name, good)
    open_prepared(config, {})


def test_what_is_spoilt_at_the_store_is_prepared_again(in_store, small, tmp_path):
    config, _ = in_store
    spoil(config, "train/shard.00000.mds", "missing")
    said = []
    prepared = prepare(config, {}, said.append)
    assert "shard.00000.mds is missing" in said[0]
    assert sum(1 for _ in Reader(prepared.shards("train"))) == small[1].sets["train"].samples


def test_what_is_beside_a_preparation_is_not_published(small, s3_place, tmp_path):
    """sources.json is there where the sources have been at rest for two seconds, however fast this machine is."""
    copy = shutil.copytree(small[1].directory, tmp_path / "copy")
    (copy / "sources.json").write_text("{}")
    store = Store(s3_place[0], 20)
    publish(copy, store, claim(store), silent)
    assert "prepared.json" in store.sizes() and "sources.json" not in store.sizes()
    claim(store)


def test_a_hostile_name_in_prepared_json_is_refused(in_store):
    config, _ = in_store
    good = Store(config.directory, 20).read("prepared.json")
    for name in HOSTILE:
        change_files(config, {name: "0"})
        with pytest.raises(BadShard) as caught:
            open_prepared(config, {})
        assert f"names the file {name!r}" in caught.value.given
        Store(config.directory, 20).write("prepared.json", good)
    open_prepared(config, {})


def change_files(config, changes):
    store = Store(config.directory, 20)
    content = json.loads(store.read("prepared.json"))
    content["files"] |= changes
    store.write("prepared.json", json.dumps(content).encode())


def test_a_hostile_index_with_a_right_hash_is_refused(in_store):
    config, _ = in_store
    store = Store(config.directory, 20)
    index = json.loads(store.read("train/index.json"))
    index["shards"][0]["column_encodings"] = ["pkl", "pkl"]
    data = json.dumps(index).encode()
    store.write("train/index.json", data)
    change_files(config, {"train/index.json": xxhash.xxh3_128_hexdigest(data)})
    with pytest.raises(BadShard, match="pkl"):
        open_prepared(config, {})


def test_a_server_that_dies_mid_stream_raises_within_the_deadline_and_names_the_shard(small, tmp_path, monkeypatch):
    for package in ("s3fs", "nanio"):
        pytest.importorskip(package, reason=NEEDS)
    with s3_server(tmp_path / "objects", bucket=BUCKET) as (environment, process):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/x"
        store = Store(url, 20)
        publish(small[1].directory, store, claim(store), silent)
        config = remote_config(small[0], url, tmp_path / "cache")
        config = config.model_copy(update={"cache": config.cache.model_copy(update={"deadline_s": 20.0})})
        prepared = open_prepared(config, {})
        loader = loader_of(prepared, config, micro_batch=1)
        seen = 0
        with pytest.raises(UserError) as caught:
            for seen in range(num_samples_of(loader)):
                if seen == 5:
                    process.kill()
                    process.wait()
                loader.next()
        loader.close()
    assert 5 <= seen < num_samples_of(loader)
    assert f"{url}/train/shard.000" in caught.value.given and "failed for 20 s" in caught.value.given


# ---- what is not whole is not there


def test_a_killed_publication_is_nothing_and_the_next_one_needs_no_new_shards(small, s3_place, tmp_path, monkeypatch):
    config = remote_config(small[0], s3_place[0], tmp_path / "cache")
    write, left = Store.write, [5]

    def failing(self, name, source):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(self, name, source)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Store, "write", failing)
        prepare(config, {}, silent)
    assert find_prepared(config) is None
    with pytest.raises(UserError, match="holds no prepared data"):
        open_prepared(config, {})
    said = []
    prepared = prepare(config, {}, said.append)
    assert not any("tokenizer:" in line for line in said), "what was made here is kept until it is published"
    assert sum(1 for _ in Reader(prepared.shards("train"))) == small[1].sets["train"].samples


def test_the_old_preparation_goes_before_the_new_one_comes(in_store, small, tmp_path, monkeypatch):
    config, folder = in_store
    old = {path.name for path in objects(folder)}
    seen, removed = [], []
    write, remove = Store.write, Store.remove

    def watching(self, name, source):
        seen.append((name, (folder / "prepared.json").exists(), {path.name for path in objects(folder)} & old))
        write(self, name, source)

    monkeypatch.setattr(Store, "write", watching)
    monkeypatch.setattr(Store, "remove", lambda self, names: removed.extend(names) or remove(self, names))
    prepare(remote_config(small[0], config.directory, tmp_path / "cache", sequence_length=200), {}, silent)
    assert removed[0] == "prepared.json" and removed[-1] == ".publishing"
    assert seen[0] == (".publishing", True, old), "until all is made, the old one stays"
    assert all(not whole for name, whole, _ in seen[1:]) and seen[-1][0] == "prepared.json"
    names = [name for name, _, _ in seen]
    assert names.index("train/index.json") > max(at for at, name in enumerate(names) if "shard." in name)


def test_what_is_no_preparation_is_never_replaced(s3_place, small, tmp_path):
    for at, name in enumerate(("thesis.tex", "train/index.json")):  # the second could be another tool's dataset
        store = Store(f"{s3_place[0]}/{at}", 20)
        store.write(name, b"years of work")
        with pytest.raises(UserError) as caught:
            prepare(remote_config(small[0], store.url, tmp_path / "cache"), {}, silent)
        assert f"{store.url} holds what windlass did not prepare: {name}" in caught.value.given
        assert store.sizes() == {name: 13}


def test_of_two_that_publish_at_once_the_later_goes_on(s3_place, small):
    store = Store(s3_place[0], 20)
    first = claim(store)
    second = claim(store)
    with pytest.raises(UserError, match="was taken over by another preparation"):
        publish(small[1].directory, store, first, silent)
    publish(small[1].directory, store, second, silent)
    assert "prepared.json" in store.sizes()


def test_a_publication_taken_over_in_the_middle_is_not_finished(s3_place, small, monkeypatch):
    store = Store(s3_place[0], 20)
    token, write = claim(store), Store.write

    def overtaken(self, name, source):
        write(self, name, source)
        if name == "train/index.json":
            write(self, ".publishing", b"another's")

    monkeypatch.setattr(Store, "write", overtaken)
    with pytest.raises(UserError, match="was taken over by another preparation"):
        publish(small[1].directory, store, token, silent)
    assert "prepared.json" not in store.sizes() and store.read(".publishing") == b"another's"


def test_a_store_that_cannot_be_written_is_refused_before_anything_is_made(small, tmp_path, monkeypatch, s3_place):
    monkeypatch.setattr("windlass.data.prepare.prepare.make", None)
    with pytest.raises(UserError, match=r"s3://no-such-bucket/x/\.publishing cannot be written"):
        prepare(remote_config(small[0], "s3://no-such-bucket/x", tmp_path / "cache"), {}, silent)


def test_a_web_server_serves_what_was_prepared_elsewhere(small, tmp_path):
    import functools
    import http.server
    import threading

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(Path(small[1].directory)))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        config = remote_config(small[0], f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
        prepared = prepare(config, {}, silent)
        found = np.stack([ids for ids, _ in Reader(prepared.shards("train"))])
        changed = remote_config(small[0], config.directory, tmp_path / "cache", sequence_length=20)
        with pytest.raises(UserError, match="is read only here"):
            prepare(changed, {}, silent)
    finally:
        server.shutdown()
        server.socket.close()
    assert (found == np.stack([ids for ids, _ in Reader(small[1].shards("train"))])).all()
