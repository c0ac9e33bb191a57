"""Rows of several documents in every layout: what one process of transformers trains, which finds documents by positions."""

import functools

import pytest

from tests import cases
from tests.cases import Layout
from tests.proof.test_same_loss import DTYPE, EVERY, MODELS, TOLERANCE, assert_same
from windlass.proof.reference import train_reference

LAYOUTS = {
    "one": Layout(1, zero=3, replicate=1, shard=1, micro_batch=8, packed=True),
    "ddp2-accumulated": Layout(2, zero=0, replicate=2, shard=1, packed=True),
    "zero2-2": Layout(2, zero=2, replicate=1, shard=2, micro_batch=4, packed=True),
    "zero3-2-selective": Layout(2, zero=3, replicate=1, shard=2, micro_batch=1, recompute="selective", packed=True),
    "hsdp2x2-full": Layout(4, zero=3, replicate=2, shard=2, recompute="full", packed=True),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    @functools.cache
    def make(family, tied, policy):
        directory = cases.write_model(tmp_path_factory.mktemp(f"packed-{family}-{tied}"), family, tied)
        batches = cases.packed_batches()
        return directory, train_reference(directory, batches, DTYPE[policy], cases.SETTINGS)

    return make


def run(ranks, reference, family, tied, case):
    directory, trace = reference(family, tied, case.policy)
    for result in ranks.run(case.world, cases.train_layout, str(directory), case):
        assert_same(result, trace, TOLERANCE[case.policy])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), EVERY)
def test_fp64(ranks, reference, family, tied, layout):
    run(ranks, reference, family, tied, LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["one", "zero3-2-selective"])
@pytest.mark.parametrize(("family", "tied"), MODELS[:1])
def test_fp32(ranks, reference, family, tied, layout):
    run(ranks, reference, family, tied, Layout(**{**vars(LAYOUTS[layout]), "policy": "fp32"}))


def train_without_borders(directory, case):
    """A mistake planted: the batch says nothing of its documents."""
    return cases.train_layout(directory, Layout(**{**vars(case), "packed": False}))


def train_with_borders_of_other_rows(directory, case):
    """A mistake planted: each rank takes the borders of the first rows."""
    documents = cases.documents
    cases.documents = lambda step, length: documents(step, length).roll(1, 0)
    try:
        return cases.train_layout(directory, case)
    finally:
        cases.documents = documents


@pytest.mark.parametrize("mistake", [train_without_borders, train_with_borders_of_other_rows])
def test_mistakes_are_seen(ranks, reference, mistake):
    directory, trace = reference("qwen3", True, "fp64")
    for result in ranks.run(2, mistake, str(directory), LAYOUTS["zero2-2"]):
        with pytest.raises(AssertionError):
            assert_same(result, trace, 1e-4)
