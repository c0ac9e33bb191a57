"""Every layout trains what one process trains: the matrix of rows.py, a check of checks.py each. And what is no cell of it."""

import functools
from dataclasses import replace
from unittest import mock

import pytest

from tests import cases
from tests.proof.bugs import BUGS
from tests.proof.checks import CHECKS, assert_exact, exact
from tests.proof.matrix import layout_of, run
from tests.proof.planting import Planting
from tests.proof.rows import CELLS, FIRST_STEP, THREE_STEPS
from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.model.open_config import architecture_of
from windlass.parallel.activations import Workload, plan_recompute
from windlass.parallel.build import build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.check_layout import OtherSettings, check_layout
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.proof.pool import RankFailed

GIB = 1 << 30


@pytest.mark.parametrize(
    "cell",
    [
        *(
            pytest.param(cell, id=str(cell), marks=() if str(cell) in THREE_STEPS else pytest.mark.long)
            for cell in CELLS
        ),
        *(pytest.param(cell, id=str(cell)) for cell in FIRST_STEP),
    ],
)
def test_the_layout_trains_what_one_process_trains(references, ranks, cell):
    CHECKS[cell.check](references, ranks, cell.model, cell.layout)


WRONG = {  # what the rules refuse -> what comes of it
    "exact: qwen3 tied blocks5: pp2 zbv selective": (RankFailed, "only allowed to backward once"),
    "exact: qwen3 tied blocks5: pp2 interleaved-zero-bubble selective": (RankFailed, "only allowed to backward once"),
    "exact: qwen3 tied blocks5: pp2 zbv compile": (AssertionError, "losses"),
    "exact: qwen3 tied blocks5: pp2 interleaved-zero-bubble compile": (AssertionError, "losses"),
}


@pytest.mark.long
@pytest.mark.parametrize("cell", WRONG)
def test_what_is_refused_beside_a_backward_that_is_cut_in_two_is_wrong(references, ranks, cell):
    check, model, words = cell.split(": ")
    case = layout_of(model, words)
    parallel = ParallelConfig(recompute=case.recompute, compile=case.compile, zero=case.zero, **dict(case.sharding))
    with pytest.raises(UserError, match=r"parallel\.schedule="):
        check_layout(parallel, others=OtherSettings(policy=case.policy))
    error, said = WRONG[cell]
    with pytest.raises(error, match=said):
        CHECKS[check](references, ranks, model, words)


def test_quick_cells_are_of_the_matrix():
    cells = [str(cell) for cell in CELLS]
    assert len(cells) == len(set(cells))
    assert set(cells) >= THREE_STEPS | {str(cell).replace("steps1 ", "") for cell in FIRST_STEP}


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(one, marks=pytest.mark.long) for one in ("pp2 1f1b", "pp2 interleaved-1f1b shard2")),
        "steps1 pp2 zbv",
    ],
)
def test_evaluation_is_that_of_one_process(references, ranks, layout):
    model = "qwen3 tied blocks5"
    one = references.alone(model, replace(layout_of(model, "one"), steps=layout_of(model, layout).steps))["evaluations"]
    assert exact(references, ranks, model, layout)[0]["evaluations"] == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_something_is_dropped_at_all(references, family):
    """The same weights and batches without dropout lose something else, by far more than any tolerance."""
    dropped = references.alone(f"{family} tied drops", layout_of(family, "one micro8"))
    undropped = references.of(f"{family} tied", "one")
    differences = [abs(a - b) for a, b in zip(dropped["losses"], undropped.losses, strict=True)]
    assert min(differences) > 1e-4, differences


def bias(moments, exact):
    """By how much the mean second moment is off."""
    total = [sum(v.double().sum().item() for n, v in found.items() if n.endswith("_sq")) for found in (moments, exact)]
    return total[0] / total[1] - 1


@pytest.mark.parametrize(
    "layout", ["one", *(pytest.param(one, marks=pytest.mark.long) for one in ("shard2", "zero0 replicate2"))]
)
def test_bf16_moments_are_right_on_the_mean(references, ranks, layout):
    model = "qwen3 tied"
    case = layout_of(model, f"{layout} fp32 states-bf16")
    whole = run(references, ranks, model, replace(case, precision=()))[0]["moments"]
    pool = Planting(ranks, (), BUGS["truncated moments"].patches)
    assert abs(bias(run(references, pool, model, case)[0]["moments"], whole)) <= 5e-4
    pool.chosen = 1
    assert bias(run(references, pool, model, case)[0]["moments"], whole) < -2e-3, "rounded down instead"


def train_within(gib, directory, case):
    """On a rank: train_layout with the kind of each block that a budget chooses -> its result and the kinds."""
    architecture = architecture_of(ModelConfig.model_validate({"from": directory}))
    parallel = ParallelConfig(recompute="selective", activation_gib=gib)
    precision = precision_of(PrecisionConfig(policy=case.policy))
    kinds = plan_recompute(Workload(architecture, parallel, precision, "cpu", (case.micro_batch, case.length))).kinds
    with mock.patch.object(cases, "build_program", functools.partial(build_program, recompute=kinds)):
        return cases.train_layout(directory, case), kinds


@pytest.mark.long
@pytest.mark.parametrize(("kib", "kinds"), [(250, {"full", "selective"}), (600, {"selective", "none"})])
def test_a_budget_of_activations(references, ranks, kib, kinds):
    model, words = "qwen3 tied blocks5", "shard2 selective"
    given = run(references, ranks, model, layout_of(model, words), train_within, kib * 1024 / GIB)
    assert all(set(chosen) == kinds for _, chosen in given), given[0][1]
    assert_exact(references, model, words, [result for result, _ in given])
