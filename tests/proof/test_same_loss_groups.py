"""Frozen parts, rates and decays by name, and Muon: every layout trains what one process of torch trains with the same groups."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

from tests import cases
from tests.cases import OPTIM, SETTINGS, Layout
from tests.marks import quick_once
from tests.proof.test_same_loss import TOLERANCE, assert_same
from windlass.model.names import VOCABULARY
from windlass.optim import adamw, groups, muon
from windlass.optim.config import OptimConfig
from windlass.parallel import build
from windlass.proof.reference import Group, ReferenceSettings, train_reference

DTYPE = {"fp64": torch.float64, "fp32": torch.float32}
LAYOUTS = {
    "one": Layout(1, zero=3, replicate=1, shard=1, micro_batch=8),
    "ddp2": Layout(2, zero=0, replicate=2, shard=1),
    "zero2-2": Layout(2, zero=2, replicate=1, shard=2),
    "zero3-2": Layout(2, zero=3, replicate=1, shard=2, recompute="full"),
    "hsdp2x2": Layout(4, zero=3, replicate=2, shard=2, micro_batch=1),
}
EMBEDDING, BLOCK, NORM = (
    {"qwen3": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"},
    {"qwen3": "model.layers.{}.*", "gpt2": "transformer.h.{}.*"},
    {"qwen3": "*norm*", "gpt2": "*ln_*"},
)
QUERY = {"qwen3": "*.2.self_attn.*_proj.weight", "gpt2": "transformer.h.2.attn.c_attn.*"}


def frozen_bottom(family):
    return [
        Group([EMBEDDING[family], "transformer.wpe.weight"][: 1 + (family == "gpt2")], frozen=True),
        Group([BLOCK[family].format(0)], frozen=True),
    ]


def frozen_middle(family):
    return [Group([NORM[family]]), Group([BLOCK[family].format(1), QUERY[family]], frozen=True)]


def rates(family):
    """A slower embedding without decay, norms that decay, a faster block."""
    return [
        Group([EMBEDDING[family]], learning_rate_scale=0.1, weight_decay=0.0),
        Group([NORM[family]], weight_decay=0.5),
        Group([BLOCK[family].format(1)], learning_rate_scale=3.0),
    ]


def muons(family):
    return [*frozen_middle(family), Group([BLOCK[family].format(0)], learning_rate_scale=0.5, weight_decay=0.3)]


CASES = {"frozen bottom": frozen_bottom, "frozen middle": frozen_middle, "rates": rates, "muon": muons}


def optim_of(case, family):
    """The same groups in a recipe's words."""
    groups = [
        {
            "names": g.names,
            "learning_rate_scale": g.learning_rate_scale,
            "weight_decay": g.weight_decay,
            "frozen": g.frozen,
        }
        for g in CASES[case](family)
    ]
    return OptimConfig.model_validate(
        OPTIM.model_dump() | {"groups": groups, "kind": "muon" if case == "muon" else "adamw"}
    )


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    @functools.cache
    def make(family, tied, policy, case):
        directory = cases.write_model(tmp_path_factory.mktemp(f"{family}-{tied}"), family, tied)
        settings = ReferenceSettings(
            SETTINGS.learning_rates, max_norm=0.3, groups=CASES[case](family), muon=case == "muon"
        )
        return directory, train_reference(directory, cases.global_batches(), DTYPE[policy], settings)

    return make


def compare(ranks, reference, case, layout, family="qwen3", tied=True, policy="fp64", train=cases.train_layout, *more):
    directory, trace = reference(family, tied, policy, case)
    row = Layout(**{**vars(LAYOUTS[layout]), "policy": policy, "optim": optim_of(case, family)})
    for result in ranks.run(row.world, train, str(directory), row, *more):
        assert_same(result, trace, TOLERANCE[policy])
        if family != "gpt2":
            for name, weight in trace.weights.items():
                ours = result["weights"][name][: len(weight)] if name in VOCABULARY else result["weights"][name]
                assert (ours - weight).abs().max() <= TOLERANCE[policy] * 10, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_fp64(ranks, reference, case, layout):
    compare(ranks, reference, case, layout)


@pytest.mark.parametrize("case", ["frozen bottom", "frozen middle", "rates"])
@pytest.mark.parametrize("layout", ["zero3-2", pytest.param("ddp2", marks=pytest.mark.long)])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_gpt2s_own_names(ranks, reference, case, layout, tied):
    compare(ranks, reference, case, layout, "gpt2", tied)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_untied_and_in_fp32_where_nothing_is_orthogonalised(ranks, reference, case, layout):
    compare(ranks, reference, case, layout, policy="fp32" if case != "muon" else "fp64", tied=False)


# ---- mutations: each comparison turns red


def scale_dropped_by_the_schedule():
    def plain(param_groups, rate):
        for group in param_groups:
            group["lr"] = rate

    return mock.patch.object(adamw, "set_learning_rate", plain)


def frozen_weight_decays():
    step = adamw.AdamW.step

    def with_decay(self, norm):
        step(self, norm)
        for record in self.everything:
            if not record.tensor.requires_grad:
                record.tensor.data.mul_(1 - 1e-3 * 0.1)

    make = adamw.AdamW.__init__

    def init(self, records, *rest, **named):
        self.everything = records
        make(self, records, *rest, **named)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(adamw.AdamW, "__init__", init))
    stack.enter_context(mock.patch.object(adamw.AdamW, "step", with_decay))
    return stack


def decay_by_local_shape():
    """What a flat shard looks like: one dimension."""
    decay = groups.decay_of

    def flat(record, config, rules):
        local = record.tensor.to_local() if hasattr(record.tensor, "to_local") else record.tensor
        flattened = groups_record(record.name, record.tensor, torch.Size([local.numel()]))
        return decay(flattened, config, rules)

    return mock.patch.object(groups, "decay_of", flat)


def groups_record(name, tensor, shape):
    from windlass.parallel.records import Record

    return Record(name, tensor, shape)


def nothing_is_frozen():
    return mock.patch.object(build, "freeze", lambda model, frozen: None)


def rows_orthogonalised_alone():
    """Every rank iterates on its own rows."""

    def alone(self, dealt, is_finite):
        return [muon.newton_schulz(self._update(parameter, is_finite), 5) for parameter in dealt]

    return mock.patch.object(muon.Muon, "_orthogonal", alone)


def momentum_at_adamws_rate():
    return mock.patch.object(muon, "MATCH_ADAMW", 1.0)


RED = [
    (scale_dropped_by_the_schedule, "rates", "ddp2"),
    (scale_dropped_by_the_schedule, "rates", "zero3-2"),
    (frozen_weight_decays, "frozen bottom", "ddp2"),
    (frozen_weight_decays, "frozen middle", "zero3-2"),
    (decay_by_local_shape, "rates", "zero2-2"),
    (nothing_is_frozen, "frozen bottom", "zero3-2"),
    (nothing_is_frozen, "frozen middle", "ddp2"),
    (rows_orthogonalised_alone, "muon", "zero3-2"),
    (rows_orthogonalised_alone, "muon", "hsdp2x2"),
    (momentum_at_adamws_rate, "muon", "ddp2"),
]


def train_mutated(directory, row, mutation):
    with globals()[mutation]():
        return cases.train_layout(directory, row)


@pytest.mark.parametrize(
    ("mutation", "case", "layout"), quick_once(RED), ids=lambda value: getattr(value, "__name__", value)
)
def test_the_comparison_turns_red(ranks, reference, mutation, case, layout):
    from windlass.proof.pool import RankFailed

    with pytest.raises(AssertionError) as caught:
        compare(ranks, reference, case, layout, "qwen3", True, "fp64", train_mutated, mutation.__name__)
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"
