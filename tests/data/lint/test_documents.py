"""Documents come out of samples as they went in, whichever way they were packed and however little is read."""

import numpy as np
import pytest

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.documents import DocumentWalk, SampleBlock, blocks, content_lengths, position, runs_of
from windlass.data.packing import pack, pack_best_fit
from windlass.data.shards.mds import Reader, Writer

EOS, LENGTH = 7, 6


def written(directory, documents, way=pack, shard_bytes=4096):
    parts = [np.array([*ids, EOS], np.int32) for ids in documents]
    packed = list(way(iter(parts), EOS, LENGTH))
    writer = Writer(directory, LENGTH + 1, shard_bytes)
    writer.write(*(np.concatenate(column) for column in zip(*packed)))
    writer.close()
    return Reader(directory)


def read(reader, runs):
    documents = DocumentWalk(EOS)
    found = [document for block in blocks(reader, runs, is_text=True) for document in documents.add(block)]
    return found + list(documents.end())


def documents_of(draw, count=40, longest=20):
    return [(100 + draw.integers(0, 50, draw.integers(0, longest))).tolist() for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_every_document_of_a_concatenated_set_comes_back(tmp_path, seed):
    documents = documents_of(np.random.default_rng(seed))
    reader = written(tmp_path / "set", documents)
    found = read(reader, runs_of(reader.num_samples, 10**6))
    assert [document.ids_N.tolist() for document in found] == documents
    assert all(document.is_whole and document.counted_N.all() for document in found)
    assert [len(document.counted_N) for document in found] == [len(ids) + 1 for ids in documents]


def test_best_fit_gives_whole_documents_and_pieces(tmp_path):
    documents = [[100] * 3, [101] * 14, [102] * 2]
    found = read(written(tmp_path / "set", documents, pack_best_fit), [range(4)])
    whole = sorted(document.ids_N.tolist() for document in found if document.is_whole)
    assert whole == [[100] * 3, [102] * 2], "the rest of the long one is none"
    assert sorted(len(document.ids_N) for document in found if not document.is_whole) == [2, LENGTH, LENGTH]


@pytest.mark.parametrize("seed", range(3))
def test_best_fit_gives_back_what_fits_and_nothing_else_as_whole(tmp_path, seed):
    """Lengths around one and two sequences: pieces that padding follows, and rests of one token."""
    draw = np.random.default_rng(seed)
    documents = [(100 + draw.integers(0, 50, length)).tolist() for length in draw.integers(1, 2 * LENGTH + 3, 60)]
    found = read(reader := written(tmp_path / "set", documents, pack_best_fit), [range(reader.num_samples)])
    fits = [ids for ids in documents if len(ids) < LENGTH]
    assert sorted(document.ids_N.tolist() for document in found if document.is_whole) == sorted(fits)
    pieces = [document.ids_N.tolist() for document in found if not document.is_whole]
    assert sum(map(len, pieces)) == sum(len(ids) for ids in documents) - sum(map(len, fits))
    assert {LENGTH - 1, 1} <= set(map(len, pieces)), "the case at hand is there"


def test_what_is_across_the_border_of_a_run_is_not_whole(tmp_path):
    documents = [[100 + n] * 9 for n in range(20)]
    reader = written(tmp_path / "set", documents)
    found = read(reader, [range(4), range(11, 16)])
    assert all(document.ids_N.tolist() in documents for document in found if document.is_whole)
    assert sum(not document.is_whole for document in found) == 3, "behind the first run, before and behind the second"
    assert {document.sample for document in found} <= {*range(4), *range(11, 16)}


def test_padding_is_no_content_and_the_masked_eos_of_a_document_is():
    ids = np.array([[EOS, 100, EOS, EOS, EOS], [100, 101, EOS, EOS, EOS], [EOS, 100, 101, 102, 103]], np.int32)
    labels = ids.copy()
    labels[0, 3:] = labels[1] = NOT_COUNTED
    assert content_lengths(SampleBlock(ids, labels, 0, True), EOS).tolist() == [3, 3, 5]
    ids[1], labels[1] = [EOS, 100, 101, 102, EOS], [NOT_COUNTED, 100, 101, 102, NOT_COUNTED]
    assert content_lengths(SampleBlock(ids, labels, 0, True), EOS).tolist() == [3, 5, 5]
    assert content_lengths(SampleBlock(ids, labels, 0, True, is_text=True), EOS).tolist() == [3, 4, 5], (
        "padding behind a piece"
    )


def test_of_chats_only_a_stored_end_ends_a_document_and_the_eos_of_a_turn_does_not():
    """Else the system prompts of different chats are duplicate documents."""
    ids = np.array([[EOS, 1, 2, EOS, 3, EOS, 1, 2, EOS, 4, EOS]], np.int32)
    ends = np.isin(np.arange(ids.shape[1]), (0, 5, 10))[None]
    walk = DocumentWalk(EOS)
    block = SampleBlock(ids, ids.copy(), 0, True, ends_NL=ends)
    found = [document.ids_N.tolist() for document in (*walk.add(block), *walk.end()) if len(document.ids_N)]
    assert found == [[1, 2, EOS, 3], [1, 2, EOS, 4]]


@pytest.mark.parametrize(("num", "most"), [(5, 10), (10, 10), (100, 10), (1000, 3), (17, 16)])
def test_runs_are_in_the_set_apart_and_reach_both_ends(num, most):
    runs = runs_of(num, most)
    numbers = [number for run in runs for number in run]
    assert len(set(numbers)) == len(numbers) <= most or num <= most
    assert min(numbers) == 0 and max(numbers) == num - 1


def test_a_sample_is_named_by_its_shard(tmp_path):
    reader = written(tmp_path / "set", [[100] * 400], shard_bytes=1024)
    first = reader.shard_samples[0]
    assert len(reader.shards) > 1
    assert position(reader, first - 1) == f"shard.00000.mds, sample {first - 1}"
    assert position(reader, first) == "shard.00001.mds, sample 0"
    block = next(blocks(reader, [range(first, first + 1)]))
    assert block.ids_NL[0].tolist() == reader.read(1, 0)[0].tolist()


def test_rows_that_follow_no_other_share_no_id_and_no_document():
    ids = np.array([[1, 2, EOS, 3, 4], [5, EOS, 6, EOS, EOS], [EOS, 8, EOS, EOS, EOS]], np.int32)
    labels = np.where(np.arange(5) < np.array([[5], [4], [3]]), ids, -100)
    block = SampleBlock(ids, labels, 0, True, is_text=True, is_alone=True)
    walk = DocumentWalk(EOS)
    found = [*walk.add(block), *walk.end()]
    assert [(document.ids_N.tolist(), document.is_whole) for document in found] == [
        ([1, 2], False), ([3, 4], False), ([5], False), ([6], True), ([8], True),
    ]  # fmt: skip
