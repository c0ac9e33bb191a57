"""What is counted of a set, and what each token of a sample is."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.planted import LENGTH, Planted, text, texts
from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.statistics import read_sample, sample_number, survey_set
from windlass.errors import UserError


@pytest.fixture
def planted(small, tmp_path):
    return Planted(small, tmp_path / "data")


def test_lengths_fill_and_vocabulary_are_those_of_the_documents(planted):
    documents = [text(number, 3 + number) for number in range(30)]
    prepared = planted.prepared(documents)
    found = survey_set(prepared, "train", 10**6)
    lengths = sorted(len(planted.ids(one)) - 1 for one in documents)
    assert found.lengths.tolist() == lengths and found.num_pieces == 0
    assert found.num_content == found.num_targets == prepared.sets["train"].tokens
    assert found.fill == found.num_content / (found.num_read * LENGTH) and found.counted == 1
    assert found.percentiles[0] == lengths[0] and found.percentiles[100] == lengths[-1]
    assert found.percentiles[50] in (lengths[14], lengths[15])
    assert sum(count for _, count in found.histogram) == 30
    shortest = found.histogram[0][0]
    assert shortest <= lengths[0] < 2 * shortest
    ids = np.concatenate([planted.ids(one) for one in documents])
    assert found.num_distinct == len(set(ids.tolist()))
    token, share = found.frequent[0]
    top = np.bincount(ids).max()
    assert share == top / len(ids) and token in ("<|endoftext|>", *map(chr, range(128)), *text(0).split(), " ")


def test_a_large_set_is_read_in_part(planted):
    prepared = planted.prepared(texts())
    found = survey_set(prepared, "train", 80)
    assert found.num_read == 80 < prepared.sets["train"].samples
    assert 0 < len(found.lengths) < 30 and found.num_pieces > 0


def test_the_share_in_the_loss_is_that_of_the_labels(planted):
    def half(ids_NL, labels_NL):
        labels_NL[:, 1 : 1 + LENGTH // 2] = NOT_COUNTED

    found = survey_set(planted.prepared(texts(), edit=half), "train", 10**6)
    assert found.counted == pytest.approx(0.5, abs=0.01)


def test_a_samples_tokens_are_marked_and_its_text_is_whole(planted):
    def first_document(ids_NL, labels_NL):
        labels_NL[0, 1:4] = NOT_COUNTED

    documents = ["rope", "anchor", "mast"]
    prepared = planted.prepared(documents, edit=first_document)
    sample = read_sample(prepared, "train", 0)
    assert sample.where == "train, shard.00000.mds, sample 0"
    assert [segment.kind for segment in sample.rows[0]][:2] == ["context", "masked"]
    assert [segment.kind for segment in sample.rows[0]][-2:] == ["end", "padding"]
    assert (
        "".join(s.text for s in sample.rows[0]) == "<|endoftext|>" + "<|endoftext|>".join(documents) + "<|endoftext|>"
    )
    assert sum(segment.num_tokens for segment in sample.rows[0]) == LENGTH + 1


def test_isolated_documents_have_no_first_target(planted):
    prepared = planted.prepared(["rope anchor", "mast deck"])
    kinds = [segment.kind for segment in read_sample(prepared, "train", 0).rows[0]]
    assert kinds == ["context", "target", "end", "target", "end", "padding"]
    isolated = [segment.kind for segment in read_sample(prepared, "train", 0, is_isolated=True).rows[0]]
    assert isolated == ["context", "masked", "target", "end", "masked", "target", "end", "padding"]


def fake_set(counts):
    shards = SimpleNamespace(shards=[SimpleNamespace(num_samples=count) for count in counts])
    return SimpleNamespace(shards=lambda name: shards)


def test_a_sample_is_named_by_its_number_or_by_shard_and_row():
    prepared = fake_set([3, 3, 1])
    given = ["0", "6", "0/2", "1/0", "1/2", "2/0", "02/00"]
    assert [sample_number(prepared, "train", sample) for sample in given] == [0, 6, 2, 3, 5, 6, 6]


@pytest.mark.parametrize("sample", ["-1", "7", "1/3", "3/0", "0/", "/1", "one", "1/2/3", "٣", ""])
def test_a_sample_that_is_not_there_is_refused(sample):
    with pytest.raises(UserError) as caught:
        sample_number(fake_set([3, 3, 1]), "train", sample)
    assert caught.value.given == f"--sample {sample}"
    assert caught.value.rule == "the samples of train are 0 to 6; or shard/row, of the shards 0 to 2"
