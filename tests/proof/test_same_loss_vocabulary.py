"""A padded vocabulary (157 entries in 256 rows) trains what transformers trains with 157 rows, in every layout, whatever
the padded rows hold: their columns get no probability, and the rows no gradient. All other rows of the matrix hold 0 there."""

import contextlib
import math
from unittest import mock

import pytest

from tests import cases
from tests.cases import Layout
from tests.proof.test_same_loss import TOLERANCE, assert_same, reference  # noqa: F401  the fixture
from windlass.model.loss import Head
from windlass.model.slices import local_part, owned_ranges
from windlass.proof.pool import RankFailed

GARBAGE = 3.0
PADDED = 256
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
LAYOUTS = {
    "one": Layout(1, zero=3, replicate=1, shard=1, micro_batch=8),
    "ddp2": Layout(2, zero=0, replicate=2, shard=1),
    "zero2-2": Layout(2, zero=2, replicate=1, shard=2),  # 128 rows per rank: the second has true and padded ones
    "zero3-4": Layout(4, zero=3, replicate=1, shard=4),  # 64 rows: the last has padded ones only
    "hsdp2x2": Layout(4, zero=3, replicate=2, shard=2),
}


def nothing():
    return contextlib.nullcontext()


def unmasked():
    """Softmax runs over all rows in memory."""
    build = Head.__init__
    return mock.patch.object(
        Head, "__init__", lambda self, hidden, vocabulary, padded, *rest: build(self, hidden, padded, padded, *rest)
    )


def train_with_garbage(garbage, mutation, directory, case):
    """The padded rows hold `garbage` when training starts, in whatever part of them a rank has."""
    load = cases.load_weights

    def load_and_spoil(source, architecture, named):
        load(source, architecture, named)
        for name in named.keys() & set(TABLES):
            rows = owned_ranges(named[name])[0]
            local_part(named[name])[max(0, cases.VOCABULARY - rows.start) :] = garbage

    with globals()[mutation](), mock.patch.object(cases, "load_weights", load_and_spoil):
        return cases.train_layout(directory, case)


def check(ranks, reference, family, tied, case, garbage, mutation="nothing"):  # noqa: F811
    directory, trace = reference(family, tied, case.policy)
    decay = math.prod(1 - rate * cases.OPTIM.weight_decay for rate in cases.RATES)
    for result in ranks.run(case.world, train_with_garbage, garbage, mutation, str(directory), case):
        assert_same(result, trace, TOLERANCE[case.policy])
        for name in result["weights"].keys() & set(TABLES):
            assert result["weights"][name].shape[0] == PADDED
            padded = result["weights"][name][cases.VOCABULARY :]
            assert (padded - garbage * decay).abs().max() <= TOLERANCE[case.policy], (
                "decayed, and never moved by a gradient"
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("qwen3", False)])
def test_padded_rows_change_nothing(ranks, reference, family, tied, layout):  # noqa: F811
    check(ranks, reference, family, tied, LAYOUTS[layout], GARBAGE)


@pytest.mark.parametrize("garbage", [0.0, GARBAGE])
@pytest.mark.parametrize("policy", ["fp64", "fp32"])
@pytest.mark.parametrize("layout", ["one", "zero2-2"])
def test_without_the_mask_the_comparison_turns_red(ranks, reference, layout, policy, garbage):  # noqa: F811
    case = Layout(**{**vars(LAYOUTS[layout]), "policy": policy})
    with pytest.raises(AssertionError) as caught:
        check(ranks, reference, "gpt2", True, case, garbage, "unmasked")
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"
