"""Context-parallel layouts train what one process of torch and transformers trains: losses, norms, every gradient of the first
step, weights after three. Rows as in test_same_loss, but of 24 tokens, which 2, 3 and 4 ranks divide into two slices each."""

import functools

import pytest
import torch

from tests import cases
from tests.cases import Layout
from tests.proof.test_same_loss import DTYPE, TOLERANCE, assert_every_number, assert_same
from tests.proof.test_same_loss_groups import CASES, optim_of
from windlass.proof.reference import ReferenceSettings, train_reference

LENGTH = 24
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}  # all layers but the first
MODELS = {
    "qwen3-tied": ("qwen3", True, {}),
    "qwen3": ("qwen3", False, {}),
    "llama": ("llama", False, {}),  # 6 query heads over 2
    "gpt2": ("gpt2", True, {"n_head": 4}),
    "window": ("qwen3", True, WINDOW),
    "nope": ("smollm3", True, {}),
    "deep": ("qwen3", True, {"num_hidden_layers": 5}),  # stages are unequal
}
KINDS = ("allgather", "ulysses")
OWN = ("recompute", "compile", "micro_batch", "packed", "policy", "optim")


def cut(kind, context=2, *, shard=1, replicate=1, tp=1, pp=1, zero=3, **more):
    """A layout of context ranks and others. `more`: fields of Layout (OWN), the rest ParallelConfig's."""
    axes = {name: size for name, size in (("context", context), ("tp", tp), ("pp", pp)) if size > 1}
    given = {name: more.pop(name) for name in OWN if name in more}
    settings = (*axes.items(), ("context_kind", kind), *more.items())
    return Layout(
        context * shard * replicate * tp * pp, zero, replicate, shard, sharding=settings, length=LENGTH, **given
    )


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    @functools.cache
    def write(model):
        family, tied, fields = MODELS[model]
        return cases.write_model(tmp_path_factory.mktemp(f"context-{model}"), family, tied, **fields)

    @functools.cache
    def make(model, policy, packed):
        batches = cases.packed_batches(LENGTH) if packed else cases.global_batches(LENGTH)
        return write(model), train_reference(write(model), batches, DTYPE[policy], cases.SETTINGS)

    return make


def run(ranks, reference, model, case):
    directory, trace = reference(model, case.policy, case.packed)
    limit_s = 300 if case.compile or case.world > 8 else 120
    results = ranks.run(case.world, cases.train_layout, str(directory), case, timeout_s=limit_s)
    assert_every_number(results, trace, directory, case.policy)
    return results[0], trace


def rows(table, quick):
    """Each named cell, long unless it is one of `quick`."""
    assert set(quick) <= set(table), set(quick) - set(table)
    return [pytest.param(*key, marks=() if key in quick else pytest.mark.long) for key in table]


ALONE = {
    "2": dict(context=2),
    "2-whole-batch": dict(context=2, micro_batch=8),
    "4": dict(context=4, micro_batch=8),
    "2-packed": dict(context=2, packed=True),
    "4-packed": dict(context=4, packed=True, micro_batch=1),
}
QUICK = {
    ("qwen3-tied", "allgather", "2"),
    ("qwen3-tied", "ulysses", "4-packed"),
    ("gpt2", "allgather", "2"),
    ("window", "allgather", "2-packed"),
    ("nope", "ulysses", "2"),
}
CELLS = [(m, kind, n) for m in MODELS for kind in KINDS for n in ALONE if (m, kind, n[0]) != ("llama", "ulysses", "4")]


@pytest.mark.parametrize(("model", "kind", "name"), rows(CELLS, QUICK))
def test_fp64(ranks, reference, model, kind, name):
    run(ranks, reference, model, cut(kind, **ALONE[name]))


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("model", "kind"),
    [("qwen3", "allgather"), ("llama", "ulysses"), pytest.param("llama", "allgather", marks=pytest.mark.long)],
)
def test_three_ranks_share_a_row(ranks, reference, model, kind, packed):
    """With ulysses each of two key/value heads is needed by two ranks."""
    run(ranks, reference, model, cut(kind, 3, packed=packed))


BESIDE = {
    "shard2": dict(shard=2),
    "shard2-zero2": dict(shard=2, zero=2, micro_batch=1),
    "shard2-zero1-packed": dict(shard=2, zero=1, micro_batch=1, packed=True),
    "zero1": dict(zero=1),
    "ddp": dict(zero=0),
    "replicate2-ddp-packed": dict(zero=0, replicate=2, packed=True),
    "replicate2": dict(replicate=2),
    "hsdp2x2": dict(replicate=2, shard=2, micro_batch=1, packed=True),
    "tp2": dict(tp=2),
    "tp2-packed": dict(tp=2, packed=True),
    "tp2-shard2": dict(tp=2, shard=2),
    "tp2-replicate2-packed": dict(tp=2, replicate=2, packed=True),
    "recompute-full-packed": dict(shard=2, recompute="full", packed=True),
    "recompute-selective": dict(shard=2, recompute="selective"),
    "tp2-recompute-selective-packed": dict(tp=2, recompute="selective", packed=True),
    "ddp-recompute-selective": dict(zero=0, recompute="selective"),
    "offload": dict(offload=True),
    "units-of-2-prefetch": dict(blocks_per_unit=2, prefetch=1),
}
QUICK_BESIDE = {
    ("qwen3-tied", "ulysses", "tp2-packed"),
    ("gpt2", "ulysses", "replicate2-ddp-packed"),
}
CELLS_BESIDE = [(model, kind, name) for model in ("qwen3-tied", "gpt2", "qwen3") for kind in KINDS for name in BESIDE]


@pytest.mark.parametrize(("model", "kind", "name"), rows(CELLS_BESIDE, QUICK_BESIDE))
def test_beside_other_axes(ranks, reference, model, kind, name):
    run(ranks, reference, model, cut(kind, **BESIDE[name]))


STAGED = {
    "1f1b": dict(zero=1),
    "1f1b-ddp": dict(zero=0),
    "1f1b-packed": dict(zero=1, packed=True),
    "gpipe-full": dict(zero=1, schedule="gpipe", recompute="full"),
    "interleaved-1f1b": dict(zero=1, schedule="interleaved-1f1b"),
    "interleaved-zero-bubble": dict(zero=0, schedule="interleaved-zero-bubble"),
    "zbv": dict(zero=1, schedule="zbv"),
    "1f1b-shard2": dict(zero=1, shard=2),
    "zbv-replicate2-packed": dict(zero=0, schedule="zbv", replicate=2, packed=True),
    "1f1b-tp2": dict(zero=1, tp=2),
    "zbv-tp2-packed": dict(zero=1, schedule="zbv", tp=2, packed=True),
    "context4": dict(zero=1, context=4),
    "1f1b-shard2-tp2": dict(zero=1, shard=2, tp=2),  # 16 ranks
}
QUICK_STAGED = {("allgather", "1f1b")}


@pytest.mark.parametrize(("kind", "name"), rows([(kind, name) for kind in KINDS for name in STAGED], QUICK_STAGED))
def test_in_a_pipeline(ranks, reference, kind, name):
    run(ranks, reference, "deep", cut(kind, pp=2, micro_batch=1, **STAGED[name]))


NARROW = {"2": dict(context=2), "4-packed": dict(context=4, packed=True, micro_batch=1), "tp2": dict(tp=2, packed=True)}


@pytest.mark.parametrize(
    ("kind", "name"),
    rows([(kind, name) for kind in KINDS for name in NARROW], {("allgather", "2")}),
)
def test_fp32(ranks, reference, kind, name):
    run(ranks, reference, "qwen3-tied", cut(kind, policy="fp32", **NARROW[name]))


@pytest.mark.long
@pytest.mark.parametrize("name", ["2-packed", "tp2", "shard2-selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(ranks, reference, kind, name):
    if kind == "ulysses" and torch.__version__ < "2.13":
        pytest.skip("refused there: test_degrees")
    more = {"2-packed": dict(packed=True), "tp2": dict(tp=2), "shard2-selective": dict(shard=2, recompute="selective")}
    run(ranks, reference, "qwen3-tied", cut(kind, compile=True, **more[name]))


@pytest.mark.long
@pytest.mark.parametrize("case", ["muon", "frozen bottom", "rates"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_muon(ranks, reference, kind, case):
    directory, _ = reference("qwen3-tied", "fp64", False)
    settings = ReferenceSettings(
        cases.SETTINGS.learning_rates, max_norm=0.3, groups=CASES[case]("qwen3"), muon=case == "muon"
    )
    trace = train_reference(directory, cases.global_batches(LENGTH), torch.float64, settings)
    layout = cut(kind, shard=2, optim=optim_of(case, "qwen3"))
    for result in ranks.run(4, cases.train_layout, str(directory), layout):
        assert_same(result, trace, TOLERANCE["fp64"])


@pytest.mark.parametrize(
    ("kind", "policy", "zero"),
    rows(
        [(kind, policy, zero) for kind in KINDS for policy in ("bf16", "fp16", "bf16-pure") for zero in (0, 3)],
        {("allgather", "bf16", 0), ("ulysses", "bf16", 3)},
    ),
)
def test_16_bits_stay_within_their_tolerance(ranks, reference, kind, policy, zero):
    directory, trace = reference("qwen3-tied", "fp32", True)
    for result in ranks.run(2, cases.train_layout, str(directory), cut(kind, policy=policy, zero=zero, packed=True)):
        for ours, theirs in zip(result["losses"], trace.losses, strict=True):
            assert abs(ours - theirs) <= 3e-3 * max(1.0, theirs)
        for ours, theirs in zip(result["norms"], trace.norms, strict=True):
            assert abs(ours - theirs) <= 3e-2 * theirs
