"""The plainest large run, cell by cell: bf16 beside pipelines, ZeRO and recomputation; compiled blocks; a budget of activations.

bf16 is near fp32's reference (3e-3 in loss, 3e-2 in norm), and its first gradients equal those of one process in bf16 as far as
fp32's sums do (1e-6 of a tensor's largest). What computes in fp64 is held to 1e-10.
"""

import functools
from unittest import mock

import pytest
import torch

from tests import cases
from tests.cases import Layout
from windlass.model.config import ModelConfig
from windlass.model.open_config import architecture_of
from windlass.parallel.activations import plan_recompute
from windlass.parallel.build import build_program
from windlass.parallel.config import ParallelConfig
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.proof.reference import train_reference

BLOCKS = 5
GIB = 1 << 30
TIED = "model.embed_tokens.weight"


def pp(schedule, zero, **more):
    cut = {"replicate": 2, "shard": 1} if zero == 0 else {"replicate": 1, "shard": 2}
    return Layout(4, zero, **cut, micro_batch=1, sharding=(("pp", 2), ("schedule", schedule)), **more)


BF16 = {
    **{
        f"{schedule} x zero {zero}": pp(schedule, zero, policy="bf16")
        for schedule in ("1f1b", "interleaved-1f1b")
        for zero in (0, 1)
    },
    "selective": Layout(2, 3, 1, 2, recompute="selective", policy="bf16"),
    "zero 1": Layout(2, 1, 1, 2, policy="bf16"),
    "zero 2": Layout(2, 2, 1, 2, policy="bf16"),
}
COMPILED = {"1f1b": pp("1f1b", 1, compile=True), "zero 2": Layout(2, 2, 1, 2, compile=True)}
BUDGET = Layout(2, 3, 1, 2, recompute="selective")
QUICK = ("1f1b x zero 1", "selective")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    @functools.cache
    def make(dtype):
        directory = cases.write_model(tmp_path_factory.mktemp("large"), "qwen3", True, num_hidden_layers=BLOCKS)
        return directory, train_reference(directory, cases.global_batches(), dtype, cases.SETTINGS)

    return make


@pytest.fixture(scope="module")
def alone(ranks, reference):
    """One process in bf16, with micro-batches of as many rows: a weight's gradient is rounded to bf16 once per micro-batch.
    Without FSDP2's casts (zero 0) other things are multiplied in fp32."""

    @functools.cache
    def train(zero, micro_batch):
        layout = Layout(1, min(zero, 1) * 3, 1, 1, micro_batch, policy="bf16")
        return ranks.run(1, cases.train_layout, str(reference(torch.float32)[0]), layout)[0]

    return train


def apart(ours, theirs):
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))


def furthest(ours, theirs):
    """Of all elements, relative to the largest of its tensor, or to a thousandth of the model's largest."""
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in theirs.values())
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max()) / max(float(theirs[n].abs().max()), floor) for n in theirs)


def joined(results, what):
    """The tensors of all stages."""
    return {name: tensor for result in results for name, tensor in result[what].items()}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in BF16]
)
def test_bf16(ranks, reference, alone, name):
    (directory, trace), case = reference(torch.float32), BF16[name]
    results = ranks.run(case.world, cases.train_layout, str(directory), case)
    single = alone(case.zero, case.micro_batch)
    for result in results:
        assert apart(result["losses"], trace.losses) <= 3e-3 and apart(result["norms"], trace.norms) <= 3e-2
        assert result["losses"] == results[0]["losses"] and result["norms"] == results[0]["norms"]
        assert apart(result["losses"][:1], single["losses"][:1]) <= 1e-6
    ours, theirs = joined(results, "gradients"), dict(single["gradients"])
    if (
        case.zero and case.sharding
    ):  # a stage adds the tied head's gradient in fp32, one process under FSDP2 in bf16: u = 2^-8
        assert furthest({TIED: ours.pop(TIED)}, {TIED: theirs.pop(TIED)}) <= 2**-8
    assert furthest(ours, theirs) <= 1e-6


def assert_equal_in_fp64(results, directory, trace):
    for result in results:
        assert apart(result["losses"], trace.losses) <= 1e-10 and apart(result["norms"], trace.norms) <= 1e-10
    for what, theirs in (("gradients", trace.gradients), ("weights", trace.weights)):
        tensors = joined(results, what)
        tensors.pop("lm_head.weight", None)  # a tied head's mirror on the last stage
        cases.assert_same_tensors(tensors, theirs, directory, 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(ranks, reference, name):
    (directory, trace), case = reference(torch.float64), COMPILED[name]
    assert_equal_in_fp64(
        ranks.run(case.world, cases.train_layout, str(directory), case, timeout_s=300), directory, trace
    )


def train_within(gib, directory, case):
    """On a rank: train_layout with the kind of each block that a budget chooses -> its result and the kinds."""
    architecture = architecture_of(ModelConfig.model_validate({"from": directory}))
    parallel = ParallelConfig(recompute="selective", activation_gib=gib)
    precision = precision_of(PrecisionConfig(policy=case.policy))
    kinds = plan_recompute(architecture, parallel, precision, "cpu", case.micro_batch, case.length).kinds
    with mock.patch.object(cases, "build_program", functools.partial(build_program, recompute=kinds)):
        return cases.train_layout(directory, case), kinds


@pytest.mark.long
@pytest.mark.parametrize(("kib", "kinds"), [(250, {"full", "selective"}), (600, {"selective", "none"})])
def test_a_budget_of_activations(ranks, reference, kib, kinds):
    directory, trace = reference(torch.float64)
    given = ranks.run(2, train_within, kib * 1024 / GIB, str(directory), BUDGET)
    assert all(set(chosen) == kinds for _, chosen in given), given[0][1]
    assert_equal_in_fp64([result for result, _ in given], directory, trace)
