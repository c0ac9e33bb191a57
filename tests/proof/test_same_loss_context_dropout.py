"""Dropout 0.1 under context parallelism: every layout trains, and evaluates, what one process does, mask for mask. The reference
is our own decoder on one process, which tests/model/test_dropout.py holds against transformers."""

import functools

import pytest

from tests import cases
from tests.cases import Layout
from tests.proof.test_same_loss_context import KINDS, LENGTH, cut, rows

DROPS = {
    "gpt2": {"n_head": 4, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "qwen3": {"attention_dropout": 0.1},
}
LAYOUTS = {
    "2": dict(context=2),
    "4-packed": dict(context=4, packed=True),
    "shard2-packed": dict(shard=2, packed=True),
    "ddp": dict(zero=0),
    "tp2": dict(tp=2),
    "tp2-packed": dict(tp=2, packed=True),
    "recompute-full": dict(recompute="full"),
    "recompute-selective-packed": dict(recompute="selective", packed=True),
    "pp2": dict(pp=2, zero=1, micro_batch=1),
}
QUICK = {("gpt2", "allgather", "2"), ("gpt2", "ulysses", "4-packed")}


@pytest.fixture(scope="session")
def dropped(tmp_path_factory, ranks):
    @functools.cache
    def write(family):
        return cases.write_model(tmp_path_factory.mktemp(f"{family}-context-drops"), family, True, **DROPS[family])

    @functools.cache
    def make(family, packed):
        one = Layout(1, zero=3, replicate=1, shard=1, length=LENGTH, packed=packed)
        return write(family), ranks.run(1, cases.train_layout, str(write(family)), one)[0]

    return make


def check(ranks, dropped, family, case, function=cases.train_layout, *more):
    directory, expected = dropped(family, case.packed)
    results = ranks.run(case.world, function, *more, str(directory), case)
    for result in results:
        for name in ("losses", "norms", "evaluations"):
            worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(result[name], expected[name], strict=True))
            assert worst <= 1e-10, (name, worst)
    for name in ("gradients", "weights"):
        held = {parameter: value for result in results for parameter, value in result[name].items()}
        for parameter, value in expected[name].items():
            assert (held[parameter] - value).abs().max() <= 1e-10, (name, parameter)


CELLS = [(family, kind, name) for family in DROPS for kind in KINDS for name in LAYOUTS]


@pytest.mark.parametrize(("family", "kind", "name"), rows(CELLS, QUICK))
def test_context_ranks_drop_what_one_process_drops(ranks, dropped, family, kind, name):
    check(ranks, dropped, family, cut(kind, **LAYOUTS[name]))
