"""The door wraps the loader only in what the recipe asks for."""

import pytest

from tests.data.streams import Mixed, open_bare
from windlass.data.packing import Borders
from windlass.data.stream.growing_stream import GrowingStream, WrittenOrder
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.loader import Loader
from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_lanes import MixedLanes
from windlass.data.stream.order import Order
from windlass.data.stream.skipping_stream import SkippingReader, SkippingStream
from windlass.errors import Unavailable

WRITTEN = {"first_epoch": "written"}
HALVES = Mixed([4, 4], [1.0, 1.0])


@pytest.mark.parametrize(
    ("features", "sources", "orders"),
    [
        ({}, [Loader], [Order]),
        ({"shares": HALVES}, [Loader], [Mixture]),
        (WRITTEN, [GrowingStream, Loader], [WrittenOrder]),
        (
            {**WRITTEN, "shares": HALVES},
            [Loader],
            [Mixture],
        ),  # sources are written one after another: all must be there
        ({"lanes": 2}, [Loader], [LaneOrder]),
        ({"lanes": 2, "shares": HALVES}, [Loader], [MixedLanes]),
        ({"lanes": 2, "shares": HALVES, "limit": 1}, [SkippingStream, Loader], [SkippingReader, MixedLanes]),
        ({"limit": 1}, [SkippingStream, Loader], [SkippingReader, Order]),
        ({"limit": 1, **WRITTEN}, [SkippingStream, GrowingStream, Loader], [SkippingReader, WrittenOrder]),
        ({"limit": 1, "skipped": [[2, 6]]}, [SkippingStream, Loader], [SkippingReader, Order]),
    ],
)
def test_each_feature_is_one_layer(folder, features, sources, orders):
    source = open_bare(folder, 8, 2, 7, **features)
    source.close()
    layers = [source]
    while not isinstance(layers[-1], Loader):
        layers.append(getattr(layers[-1], "_source", None) or layers[-1]._loader)
    assert [type(layer) for layer in layers] == sources
    found = [layers[-1]._order]
    if isinstance(found[0], SkippingReader):
        found.append(found[0]._order)
    assert [type(order) for order in found] == orders


def test_what_a_checkpoint_keeps_is_what_each_layer_adds(folder):
    source = open_bare(folder, 8, 2, 7, consumed=6, limit=1, skipped=[[2, 4]], **WRITTEN)
    source.next()
    state = source.state()
    source.close()
    assert list(state) == ["samples_consumed", "read_from", "skipped"]
    assert state["samples_consumed"] == 8 and state["skipped"] == [[2, 4]] and state["read_from"]["num_shards"] == 2


def test_tensors_are_what_is_asked_for(folder):
    names = []
    for more in ({}, {"with_keys": True}, {"with_keys": True, "borders": Borders(0, 9)}):
        source = open_bare(folder, 8, 2, 7, **more)
        names.append(list(source.next()[0]))
        source.close()
    assert names == [
        ["input_ids", "targets"],
        ["input_ids", "targets", "keys"],
        ["input_ids", "targets", "documents", "keys"],
    ]


def test_all_features_at_once_give_the_samples_of_the_plain_stream(folder):
    """One loader reads all; four ranks of two micro-batches read their parts through all layers."""
    plain = open_bare(folder, 8, 2, 7, micro_batch=16, first_epoch="written")
    wanted = [plain.next()[0]["input_ids"].tolist() for _ in range(8)]
    plain.close()
    more = {"limit": 2, "borders": Borders(0, 9), "with_keys": True, **WRITTEN}
    ranks = [open_bare(folder, 8, 2, 7, 2, 2, rank, 4, **more) for rank in range(4)]
    found = [[row for rank in ranks for batch in rank.next() for row in batch["input_ids"].tolist()] for _ in range(8)]
    for rank in ranks:
        rank.close()
    assert found == wanted


@pytest.mark.parametrize(
    ("shares", "labels", "said"),
    [
        (HALVES, ["a/*.txt", "b/*.txt"], ["a/*.txt", "b/*.txt"]),
        (None, ["a/*.txt", "b/*.txt"], ["a/*.txt, b/*.txt"]),
    ],
)
def test_a_batch_that_does_not_come_names_shard_directory_and_source(folder, monkeypatch, shares, labels, said):
    source = open_bare(folder, 8, 2, 7, shares=shares, labels=labels, timeout_s=0.5)
    assert source.is_ready(60.0)
    monkeypatch.setattr(Loader, "is_ready", lambda *_: False)
    with pytest.raises(Unavailable) as caught:
        source.next()
    source._is_stuck = False  # its thread is well, and close waits for it
    source.close()
    given = caught.value.given
    assert given.startswith("rank 0 (batch rank 0 of 1) waited 0.5 s for samples 0 to 2 of the training stream")
    named = {shard.stored.name: k for k, shard in enumerate(source.shards) if shard.stored.name in given}
    assert named, given
    for name, number in named.items():
        assert f"{name} of here (source {said[0 if shares is None else number // 4]})" in given
