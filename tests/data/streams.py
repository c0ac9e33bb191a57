"""Streams over a bare folder of samples, opened by the door that a run uses."""

from types import SimpleNamespace
from typing import NamedTuple

from windlass.data.shards.mds import Folder
from windlass.data.stream.loader import BatchCut
from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_shares import Shares, Stage
from windlass.data.stream.open_order import Opening
from windlass.data.stream.open_stream import open_stream


class Mixed(NamedTuple):
    """Sources of that many shards in shares by `weights`, at first."""

    source_shards: list[int]
    weights: list[float]
    later: list = []  # stages of (first sample, weights)

    def order(self, shard_samples, seed, shuffle_window, **more):
        return Mixture(
            shard_samples, self.source_shards, Shares([Stage(0, tuple(self.weights))]), seed, shuffle_window, **more
        )


class Bare:
    """What `open_stream` asks of a `Prepared`."""

    where = "here"

    def __init__(self, source, borders=None, shares=None):
        self._source, self._borders = source, borders
        self.sets = {"train": SimpleNamespace(source_shards=[] if shares is None else shares.source_shards)}

    def shards(self, name):
        return Folder(self._source) if hasattr(self._source, "is_dir") else self._source

    def borders(self, name):
        return self._borders


def open_bare(
    source, sequence_length, shuffle_window, seed, micro_batch=2, accumulation=1, batch_rank=0, batch_ranks=1, consumed=0,
    borders=None, shares=None, first_epoch="shuffled", limit=0, skipped=(), read_from=None, timeout_s=600.0, labels="abc",
    kept=None, lanes=1, kept_lanes=None, log=print, **more,
):  # fmt: skip
    """`source`: a folder or a ShardSource. `limit`: shards that may be left out; `skipped`, `read_from` and `kept`, its
    shares: of the checkpoint."""
    labels = labels[: 1 if shares is None else len(shares.weights)] if labels == "abc" else labels
    config = SimpleNamespace(
        sequence_length=sequence_length,
        sequences_per_sample=1,
        shuffle_window=shuffle_window,
        isolate=borders is not None,
        mixture=[] if shares is None else [(0, shares.weights), *shares.later],
        max_bad_shards=limit,
        timeout_s=timeout_s,
        order=SimpleNamespace(first_epoch=first_epoch, lanes=lanes),
        sources=list(labels),
        labels=list(labels),
    )
    cut = BatchCut(micro_batch, accumulation, batch_rank, batch_ranks)
    state = {"samples_consumed": consumed, "skipped": list(skipped), "read_from": read_from}
    state |= {} if kept is None else {"shares": kept}
    state |= {} if kept_lanes is None else {"lanes": kept_lanes}
    return open_stream(Opening(Bare(source, borders, shares), config, cut, seed, state, log), **more)


def num_samples_of(stream):
    """Samples of one epoch."""
    return sum(shard.num_samples for shard in stream.shards)
