"""An evaluation set is the same samples for every layout, and its bytes are exactly its text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from windlass.data.packing import Borders
from windlass.data.shards.mds import Folder, Reader, Writer
from windlass.data.stream.evaluation_set import dealt, evaluation_set
from windlass.data.stream.loader import BatchCut
from windlass.errors import UserError

T = 33


def bare(directory, cut, num_sequences, *, name="set", token_bytes_V=None, borders=None, source_shards=()):
    """Of a bare folder of samples."""
    prepared = SimpleNamespace(
        shards=lambda _name: Folder(directory),
        token_bytes=lambda _name: token_bytes_V,
        borders=lambda _name: borders,
        sets={name: SimpleNamespace(source_shards=source_shards)},
    )
    config = SimpleNamespace(isolate=borders is not None, is_preference=False, sequences_per_sample=1)
    return evaluation_set(prepared, config, name, cut, num_sequences)


def ranks_of(small, name, num_sequences, micro_batch, batch_ranks):
    config, prepared, _ = small
    cuts = [BatchCut(micro_batch, batch_rank=rank, batch_ranks=batch_ranks) for rank in range(batch_ranks)]
    return [evaluation_set(prepared, config, name, cut, num_sequences) for cut in cuts]


@pytest.mark.parametrize("batch_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("num_sequences", [1, 10, 10**6])
def test_every_layout_scores_the_same_samples_once(small, batch_ranks, micro_batch, num_sequences):
    _, prepared, _ = small
    found = ranks_of(small, "validation", num_sequences, micro_batch, batch_ranks)
    shapes = {tuple(tensor.shape) for one in found for batch in one.batches for tensor in batch.values()}
    assert shapes == {(micro_batch, T)} and len({len(one.batches) for one in found}) == 1
    rows = [
        (ids.tolist(), targets.tolist())
        for number in range(len(found[0].batches))
        for one in found
        for ids, targets in zip(one.batches[number]["input_ids"], one.batches[number]["targets"])
    ]
    samples = [(ids[:-1].tolist(), labels[1:].tolist()) for ids, labels in Reader(prepared.directory / "validation")]
    num_samples = min(num_sequences, len(samples))
    assert rows[:num_samples] == samples[:num_samples]
    assert all(targets == [-100] * T for _, targets in rows[num_samples:])
    assert len(rows) - num_samples < micro_batch * batch_ranks  # no more filling than it takes
    counted = sum(int((batch["targets"] != -100).sum()) for one in found for batch in one.batches)
    assert {(one.num_samples, one.num_targets) for one in found} == {(num_samples, counted)}
    assert len({one.num_bytes for one in found}) == 1


@pytest.mark.parametrize("name", ["train", "validation"])
def test_the_bytes_of_a_whole_set_are_its_text(small, name):
    _, prepared, _ = small
    (whole,) = ranks_of(small, name, 10**6, 4, 1)
    info = prepared.sets[name]
    assert (whole.num_bytes, whole.num_targets, whole.num_samples) == (info.bytes, info.tokens, info.samples)


def test_the_bytes_of_a_part_are_those_of_its_decoded_targets(small):
    from windlass.data.tokenize.tokenizer import open_tokenizer

    _, prepared, _ = small
    tokenizer, _ = open_tokenizer(prepared.tokenizer_directory)
    (part,) = ranks_of(small, "validation", 3, 1, 1)
    targets = torch.cat([batch["targets"].flatten() for batch in part.batches])
    assert len(targets) == part.num_targets == 3 * T
    bytes_V = prepared.token_bytes("validation")
    assert part.num_bytes == bytes_V[targets.numpy()].sum()
    text = tokenizer.decode(targets.tolist(), skip_special_tokens=True)
    assert abs(part.num_bytes - len(text.encode())) <= 6  # a sequence may end inside a character of up to 4 bytes


def test_unknown_bytes_are_zero(small):
    _, prepared, _ = small
    assert bare(prepared.directory / "validation", BatchCut(1), 2, token_bytes_V=None).num_bytes == 0


def test_it_is_the_same_every_time(small):
    first, second = (ranks_of(small, "validation", 5, 2, 2)[1] for _ in range(2))
    for one, other in zip(first.batches, second.batches, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in ("input_ids", "targets"))


def test_isolated_sets_count_no_target_across_a_border(tmp_path):
    ids = np.array([[0, 5, 6, 0, 7, 0, 0], [0, 5, 0, 6, 0, 7, 0]], np.int32)
    writer = Writer(tmp_path / "set", 7, 4096)
    writer.write(ids, ids)
    writer.close()
    found = bare(tmp_path / "set", BatchCut(3), 8, token_bytes_V=np.arange(8), borders=Borders(0, 5))
    assert (found.num_samples, found.num_targets, found.num_bytes) == (2, 6, 6)
    (batch,) = found.batches
    assert batch["documents"].tolist() == [[0, 1, 4, 6, 6], [0, 1, 3, 5, 6], [0, 6, 6, 6, 6]]
    assert int((batch["targets"] != -100).sum()) == found.num_targets


def test_a_set_without_a_target_is_refused_by_name(tmp_path):
    writer = Writer(tmp_path / "set", 7, 4096)
    writer.write(np.ones((2, 7), np.int32), np.full((2, 7), -100, np.int32))
    writer.close()
    with pytest.raises(UserError) as caught:
        bare(tmp_path / "set", BatchCut(1), 8, name="chats")
    assert caught.value.given == "the first 2 samples of the set chats count no target"
    assert "evaluate.sequences" in caught.value.change


def test_the_first_samples_hold_every_source_in_its_share():
    order, sources = dealt([3, 3, 2, 1], [2, 1, 0, 1], 9)
    assert sources.tolist()[:3] == [0, 1, 3], "one of each that has some comes first"
    assert order.tolist() == [0, 6, 8, 1, 2, 3, 7, 4, 5] and sorted(order.tolist()) == list(range(9))
    assert sources[:5].tolist().count(0) == 3 and sources.tolist().count(1) == 2
    order, sources = dealt([4, 5], [], 7)
    assert order.tolist() == list(range(7)) and not sources.any(), "one source stays in its order"


@pytest.mark.parametrize("batch_ranks", [1, 2])
def test_each_source_has_batches_of_its_own_and_pairs_are_kept_together(tmp_path, batch_ranks):
    rows = np.arange(6 * 8, dtype=np.int32).reshape(6, 8)
    writer = Writer(tmp_path / "set", 8, 4096)
    for part in (rows[:4], rows[4:]):
        writer.write(part, part)
        writer.end_shard()
    writer.close()

    def found(rank, **more):
        return bare(tmp_path / "set", BatchCut(2, batch_rank=rank, batch_ranks=batch_ranks), 3, **more)

    of_rank = [found(rank, source_shards=[1, 1]) for rank in range(batch_ranks)]
    scored = {
        number: sorted(
            int(ids[0]) // 8
            for one in of_rank
            for batch in one.batches[dict(one.of_sources)[number]]
            for ids, targets in zip(batch["input_ids"], batch["targets"])
            if (targets != -100).any()
        )
        for number, _ in of_rank[0].of_sources
    }
    assert scored == {0: [0, 1], 1: [4]}, "the first three by share"
    assert {(one.num_samples, one.num_targets) for one in of_rank} == {(3, 21)}
    assert all(len(one.batches) == sum(len(one.batches[held]) for _, held in one.of_sources) for one in of_rank)
    assert found(0).of_sources == [] and found(0, source_shards=[2]).of_sources == []
