"""The global batches are the stream, whatever the layout; and a failure is an error, never a short epoch."""

import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.data.streams import Mixed, open_bare
from windlass.data.shards.mds import Reader, Writer
from windlass.data.stream.collate import sample_keys
from windlass.data.stream.loader import BATCHES_AHEAD, Loader
from windlass.data.stream.order import Order
from windlass.errors import BadShard

T = 6
NUM_SAMPLES = 53  # divides by no batch


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Samples whose ids give their number: sample i holds 1000 i .. 1000 i + T; every fifth has labels of -100."""
    path = tmp_path_factory.mktemp("loader") / "train"
    ids = (1000 * np.arange(NUM_SAMPLES)[:, None] + np.arange(T + 1)).astype(np.int32)
    labels = np.where((np.arange(NUM_SAMPLES)[:, None] % 5 == 0) & (np.arange(T + 1) > 3), -100, ids).astype(np.int32)
    writer = Writer(path, T + 1, 4096 // 4)
    writer.write(ids, labels)
    writer.close()
    return path


def make(directory, **changes):
    return open_bare(directory, **{"sequence_length": T, "seed": 17, "shuffle_window": 2, **changes})


def numbers(batches):
    return [row // 1000 for batch in batches for row in batch["input_ids"][:, 0].tolist()]


def take(directory, num_batches, **settings):
    """Sample numbers of the next batches of one rank, one list per global batch."""
    loader = make(directory, **settings)
    found = [numbers(loader.next()) for _ in range(num_batches)]
    loader.close()
    return found


def wanted_stream(directory, count, seed=17):
    reader = Reader(directory)
    starts = np.concatenate([[0], np.cumsum(reader.shard_samples)])
    return [int(starts[shard] + row) for shard, row in Order(reader.shard_samples, seed, 2).take(0, count).tolist()]


@pytest.mark.parametrize("batch_ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_joined_in_order_are_the_stream_for_every_layout(directory, batch_ranks, accumulation):
    micro_batch = 8 // batch_ranks // accumulation
    ranks = [
        take(
            directory, 20, micro_batch=micro_batch, accumulation=accumulation, batch_rank=rank, batch_ranks=batch_ranks
        )
        for rank in range(batch_ranks)
    ]
    joined = [number for step in zip(*ranks) for rank in step for number in rank]
    assert joined == wanted_stream(directory, 160)  # three epochs; borders fall inside batches


def test_an_epoch_holds_every_sample_once_though_no_batch_divides_it(directory):
    stream = [number for batch in take(directory, 2 * NUM_SAMPLES, micro_batch=1) for number in batch]
    assert sorted(stream[:NUM_SAMPLES]) == sorted(stream[NUM_SAMPLES:]) == list(range(NUM_SAMPLES))


def test_a_batch_larger_than_the_epoch_wraps(directory):
    (batch,) = take(directory, 1, micro_batch=2 * NUM_SAMPLES + 3)
    assert batch == wanted_stream(directory, 2 * NUM_SAMPLES + 3)


def test_consumed_is_all_the_state_there_is(directory):
    draw = random.Random(0)
    whole = wanted_stream(directory, 400)
    loader = make(directory, micro_batch=3)
    consumed = 0
    for _ in range(12):  # stop anywhere, go on with another batch size
        micro_batch, accumulation = draw.randint(1, 5), draw.randint(1, 3)
        loader.close()
        loader = make(directory, micro_batch=micro_batch, accumulation=accumulation, consumed=consumed)
        for _ in range(draw.randint(1, 4)):
            batch = numbers(loader.next())
            assert batch == whole[consumed : consumed + len(batch)]
            consumed += len(batch)
            assert loader.consumed == consumed and len(batch) == micro_batch * accumulation
    loader.close()


def test_tensors_are_shifted_once_and_keep_the_labels(directory):
    loader = make(directory, micro_batch=3, accumulation=2)
    batches = loader.next()
    loader.close()
    assert len(batches) == 2
    for batch in batches:
        assert set(batch) == {"input_ids", "targets"}
        assert all(tensor.shape == (3, T) and tensor.dtype == torch.int64 for tensor in batch.values())
        for ids, targets in zip(batch["input_ids"].tolist(), batch["targets"].tolist()):
            number = ids[0] // 1000
            assert ids == [1000 * number + at for at in range(T)]
            known = T if number % 5 else 3
            assert targets == [1000 * number + at + 1 if at < known else -100 for at in range(T)]


def keys_of(directory, num_batches, **settings):
    loader = make(directory, with_keys=True, **settings)
    found = [[batch["keys"] for batch in loader.next()] for _ in range(num_batches)]
    loader.close()
    return found


@pytest.mark.parametrize("batch_ranks", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_samples_key_is_that_of_its_place_in_the_stream_for_every_layout(directory, batch_ranks, accumulation):
    micro_batch = 8 // batch_ranks // accumulation
    shape = {"micro_batch": micro_batch, "accumulation": accumulation, "batch_ranks": batch_ranks}
    ranks = [keys_of(directory, 20, batch_rank=rank, **shape) for rank in range(batch_ranks)]
    assert all(keys.shape == (micro_batch,) for step in ranks[0] for keys in step)
    joined = torch.cat([keys for step in zip(*ranks) for rank in step for keys in rank])
    assert torch.equal(joined, sample_keys(17, 0, 160))
    assert joined.unique().numel() == 160, "a sample that comes again, in the next epoch, has another key"
    resumed = keys_of(directory, 1, batch_rank=batch_ranks - 1, consumed=24, **shape)[0]
    assert torch.equal(torch.cat(resumed), sample_keys(17, 32 - 8 // batch_ranks, 8 // batch_ranks))


def spoilt(directory, tmp_path):
    """A copy whose last shard in the order has one flipped bit, found only when the thread gets there."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    reader = Reader(copy)
    last = Order(reader.shard_samples, 17, 1).take(0, NUM_SAMPLES)[-1, 0]
    data = bytearray(Path(reader.name(last)).read_bytes())
    data[-5] ^= 16
    Path(reader.name(last)).write_bytes(data)
    return copy, Path(reader.name(last))


def test_a_failure_in_the_thread_is_raised_by_next_after_the_good_batches(directory, tmp_path):
    copy, path = spoilt(directory, tmp_path)
    loader = make(copy, micro_batch=1, shuffle_window=1)
    served = []
    with pytest.raises(BadShard, match=path.name):
        for _ in range(NUM_SAMPLES):
            served += numbers(loader.next())
    assert 0 < len(served) < NUM_SAMPLES and loader.consumed == len(served)
    for _ in range(3):  # and it stays an error
        with pytest.raises(BadShard):
            loader.next()
    loader.close()


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("windlass-loader")]


def test_close_ends_the_thread_even_if_nothing_was_taken(directory):
    before = len(loader_threads())
    loader = make(directory)
    assert len(loader_threads()) == before + 1
    loader.close()
    loader.close()
    assert len(loader_threads()) == before


STUCK = """
import sys, threading
from pathlib import Path
from windlass.data.shards.mds import Reader
from windlass.data.stream.loader import BatchCut, Loader
from windlass.data.stream.order import Order
from windlass.errors import Unavailable

reader, asked = Reader(Path(sys.argv[1])), threading.Event()
def make(places, start):  # a disk that never answers
    asked.set()
    threading.Event().wait()
loader = Loader(Order(reader.shard_samples, 17, 1), reader.shards, make, BatchCut(2, 1, 1, 3, world_rank=5), 6, "cpu", 0.2)
asked.wait()
try:
    loader.next()
except Unavailable as error:
    print(error)
    loader.close()
    sys.exit(error.code)
"""


def test_a_batch_that_never_comes_ends_the_run_with_words_and_the_process_too(directory):
    done = subprocess.run([sys.executable, "-c", STUCK, str(directory)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 74, done.stderr
    given, rule, change = done.stdout.splitlines()
    shard = Reader(directory).shards[Order(Reader(directory).shard_samples, 17, 1).take(8, 2)[0, 0]].stored.name
    assert given.startswith(
        "rank 5 (batch rank 1 of 3) waited 0.2 s for samples 6 to 12 of the training stream; the loader is reading "
    )
    assert shard in given and "data.timeout_s" in rule and "resumes from the last checkpoint" in change


@pytest.mark.parametrize("first_epoch", ["shuffled", "written"])
def test_a_batch_that_is_late_is_no_error(directory, monkeypatch, first_epoch):
    """Of a written order too, whose shards are all there."""
    waited = []
    monkeypatch.setattr(Loader, "is_ready", lambda self, timeout_s: waited.append(timeout_s) or True)
    loader = make(directory, timeout_s=600.0, first_epoch=first_epoch)
    loader.next()
    loader.close()
    assert waited == [600.0]


def test_no_more_is_read_ahead_than_said(directory, monkeypatch):
    made = []
    read = Loader._read
    monkeypatch.setattr(Loader, "_read", lambda self, start: made.append(start) or read(self, start))
    loader = make(directory, micro_batch=4)
    loader.next()
    loader.next()
    loader.close()
    assert made == [4 * number for number in range(len(made))] and 2 <= len(made) <= 2 + BATCHES_AHEAD


def test_the_wait_is_measured(directory, monkeypatch):
    batches, now_s, is_asked = Loader._read, [0.0], threading.Event()

    def perf_counter():
        is_asked.set()
        return now_s[0]

    def read(self, start):
        if start == 0:
            assert is_asked.wait(60)
            now_s[0] = 0.5
        return batches(self, start)

    monkeypatch.setattr("windlass.data.stream.loader.time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(Loader, "_read", read)
    loader = make(directory)
    for waited_s in (0.5, 0.0):
        loader.next()
        assert loader.wait_s == waited_s
    loader.close()


def test_it_draws_from_no_global_generator(directory):
    torch.manual_seed(0)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    take(directory, 5)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


# ---- mixtures and isolation


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("batch_ranks", [1, 2, 4])
def test_a_mixture_is_one_stream_for_every_layout_and_over_a_resume(directory, batch_ranks, accumulation):
    num_shards = len(Reader(directory).shards)
    shares = Mixed([2, num_shards - 2], [3.0, 1.0])
    mixture = shares.order(Reader(directory).shard_samples, 17, 2)
    starts = np.concatenate([[0], np.cumsum(Reader(directory).shard_samples)])
    wanted = [int(starts[shard]) + row for shard, row in mixture.take(0, 64).tolist()]
    found = []
    for consumed in (0, 32):  # the second half by loaders that begin there, on another layout
        ranks = batch_ranks if consumed == 0 else 3 - min(batch_ranks, 2)
        micro = 16 // (ranks * accumulation)
        settings = {"micro_batch": micro, "accumulation": accumulation, "batch_ranks": ranks, "consumed": consumed}
        by_rank = [take(directory, 2, batch_rank=rank, shares=shares, **settings) for rank in range(ranks)]
        found += [number for step in zip(*by_rank) for part in step for number in part]
    assert found == wanted
