"""One stream for every layout, killed anywhere and resumed on any other: each sample once per epoch, in one order.

A cell is a run: W ranks with A micro-batches read global batches, all ranks die at some moment, each at a place of its own; the
run goes on from its last checkpoint with W' ranks and A' micro-batches, perhaps on other hosts with empty caches. What was read
behind the checkpoint is in no weights, so what counts is what was read up to it and then. (The same with processes that are
really killed: tests/training/runs/test_stream_killed.py.)
"""

import hashlib
import itertools
import random
import shutil

import numpy as np
import pytest
import xxhash

from tests.data.streams import Mixed, open_bare
from windlass.data.shards.cache import Cache
from windlass.data.shards.mds import Folder, Reader, Writer
from windlass.data.shards.remote import Remote
from windlass.data.stream.order import Order
from windlass.object_store import Store

T, NUM_SAMPLES, GLOBAL_BATCH, EPOCHS = 15, 337, 48, 2  # a prime: no batch ends where an epoch does
WORLDS, ACCUMULATIONS, KILLS = (1, 2, 3, 4, 8), (1, 2), 10
SEED, WINDOW, SHARES_AT = 23, 3, 5
STEPS = -(-EPOCHS * NUM_SAMPLES // GLOBAL_BATCH)


def write(directory):
    ids = (100 * np.arange(NUM_SAMPLES)[:, None] + np.arange(T + 1)).astype(np.int32)
    writer = Writer(directory, T + 1, 4096)
    writer.write(ids, ids)
    writer.close()
    return len(Reader(directory).shards)


def wanted_order(reader, shares):
    order = Order(reader.shard_samples, SEED, WINDOW)
    if shares is not None:
        order = shares.order(reader.shard_samples, SEED, WINDOW)
    return order.take(0, STEPS * GLOBAL_BATCH)


def hash_of(rows):
    return hashlib.sha256(np.ascontiguousarray(rows, np.int64).tobytes()).hexdigest()


class Place:
    """Where a cell reads: `source(rank)` is that rank's ShardSource."""

    def __init__(self, folder, source, shares=None, left_out=None):
        self.source, self.shares, self.left_out = source, shares, left_out or {}
        reader = Reader(folder)
        rows_N2 = wanted_order(reader, shares)
        is_lost_N = np.isin(rows_N2[:, 0], list(self.left_out))
        rows_N = np.stack([reader.read(shard, row)[0] for shard, row in rows_N2.tolist()])
        self.wanted = np.stack([rows_N[:, :-1], rows_N[:, 1:]], 1)
        self.wanted[is_lost_N, 0], self.wanted[is_lost_N, 1] = 0, -100
        self.rows_N2 = rows_N2

    def ranks(self, world, accumulation, consumed):
        return [
            open_bare(
                self.source(rank),
                sequence_length=T,
                micro_batch=GLOBAL_BATCH // world // accumulation,
                accumulation=accumulation,
                batch_rank=rank,
                batch_ranks=world,
                seed=SEED,
                shuffle_window=WINDOW,
                consumed=consumed,
                shares=self.shares,
                limit=len(self.left_out),
                skipped=self.left_out.items(),
            )
            for rank in range(world)
        ]


def read(loaders, steps):
    """The global batches, as their ranks hold them one behind the other: [samples, 2, T]."""
    parts = []
    for _ in range(steps):
        for loader in loaders:
            parts += [np.stack([batch["input_ids"], batch["targets"]], 1) for batch in loader.next()]
    return np.concatenate(parts) if parts else np.empty((0, 2, T), np.int64)


def cell(place, first, second, draw, between=lambda: None):
    """The hash of what a run read that was killed once."""
    saved = draw.randrange(STEPS)
    loaders = place.ranks(*first, 0)
    kept = read(loaders, saved)
    for loader in loaders:  # behind the checkpoint each rank gets as far as it gets
        read([loader], draw.randrange(4))
        loader.close()
    between()
    loaders = place.ranks(*second, len(kept))
    rest = read(loaders, STEPS - saved)
    for loader in loaders:
        loader.close()
    return hash_of(np.concatenate([kept, rest]))


def run_cells(place, cells, between=lambda: None):
    wanted = hash_of(place.wanted)
    for number, (first, second) in cells:
        assert cell(place, first, second, random.Random(number), between) == wanted, (number, first, second)


def some():
    """All layouts x kill points, each on one layout of another world."""
    draw = random.Random(2)
    for number, (_, pairs) in enumerate(itertools.groupby(every(), lambda one: one[0] // 8)):
        yield number, draw.choice(list(pairs))[1]


def few():
    """Every layout once before a kill and once behind one."""
    layouts = list(itertools.product(WORLDS, ACCUMULATIONS))
    draw = random.Random(1)
    others = draw.sample(layouts, len(layouts))
    return [(number, pair) for number, pair in enumerate(zip(layouts, others))]


def every():
    """All layouts x kill points x the 8 layouts of every other world."""
    layouts = list(itertools.product(WORLDS, ACCUMULATIONS))
    runs = itertools.product(layouts, range(KILLS), layouts)
    return list(enumerate((first, second) for first, _, second in runs if second[0] != first[0]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stream")
    assert write(directory / "train") > 2 * WINDOW
    return directory / "train"


def local(folder, kind):
    num_shards = len(Reader(folder).shards)
    shares = Mixed([SHARES_AT, num_shards - SHARES_AT], [3.0, 1.0]) if kind == "mixture" else None
    met = wanted_order(Reader(folder), shares)[:, 0].tolist()
    left_out = {bad: met.index(bad) // GLOBAL_BATCH * GLOBAL_BATCH for bad in (4, 1)} if kind == "left out" else None
    return Place(folder, lambda rank: Folder(folder), shares, left_out)


def test_the_wanted_stream_has_every_sample_once_per_epoch(folder):
    """Of what the cells are compared with."""
    reader = Reader(folder)
    places = list(map(tuple, local(folder, "plain").rows_N2.tolist()))
    everything = {(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)}
    for epoch in range(EPOCHS):
        assert set(places[epoch * NUM_SAMPLES : (epoch + 1) * NUM_SAMPLES]) == everything
    assert len(everything) == NUM_SAMPLES and places[:NUM_SAMPLES] != places[NUM_SAMPLES : 2 * NUM_SAMPLES]


@pytest.mark.parametrize("kind", ["plain", "mixture", "left out"])
def test_killed_and_resumed_on_another_world_the_stream_is_the_same(folder, kind):
    run_cells(local(folder, kind), few())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "mixture", "left out"])
def test_every_cell_of_the_matrix(folder, kind):
    assert len(every()) == len(WORLDS) * len(ACCUMULATIONS) * KILLS * 8
    run_cells(local(folder, kind), every())


def in_store(folder, url, cache, limit_kib=40):
    """The set at `url`, read by each rank through the cache that a host shares; it holds few shards, so that they come and go."""
    digest = xxhash.xxh3_128_hexdigest((folder / "index.json").read_bytes())
    store = Store(url, 120)  # one for all: making one takes longer than reading

    def source(rank):
        remote = Remote(store, Cache(cache, limit_kib << 10), b"", {"train/index.json": digest})
        found = remote.shards("train")
        found.keeps = remote  # its small files stay while the shards are read
        return found

    return Place(folder, source)


def empty(cache):
    return lambda: shutil.rmtree(cache, ignore_errors=True)


def test_the_same_from_an_s3_store_through_a_small_cache(folder, s3_place, tmp_path):
    url, objects = s3_place
    shutil.copytree(folder, objects / "train")
    cells = [(0, ((2, 1), (3, 2))), (1, ((3, 1), (1, 2)))]
    run_cells(in_store(folder, url, tmp_path / "cache"), cells, empty(tmp_path / "cache"))


@pytest.mark.long
def test_every_layout_and_kill_point_from_an_s3_store(folder, s3_place, tmp_path):
    url, objects = s3_place
    shutil.copytree(folder, objects / "train")
    cells = list(some())
    assert len(cells) == len(WORLDS) * len(ACCUMULATIONS) * KILLS
    run_cells(in_store(folder, url, tmp_path / "cache"), cells, empty(tmp_path / "cache"))
