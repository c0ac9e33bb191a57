"""Every layout trains what one process of torch and transformers trains: losses, norms, weights. Sizes are odd, masks uneven."""

import functools

import pytest
import torch

from tests.jobs import cases
from tests.jobs.cases import Layout
from windlass.jobs.reference import train_reference

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
DTYPE = {"fp64": torch.float64, "fp32": torch.float32}

LAYOUTS = {
    "one": Layout(1, zero=3, replicate=1, shard=1, micro_batch=8),
    "one-accumulated": Layout(1, zero=3, replicate=1, shard=1),
    "ddp2": Layout(2, zero=0, replicate=2, shard=1, micro_batch=4),
    "ddp2-accumulated": Layout(2, zero=0, replicate=2, shard=1),
    "zero2-2": Layout(2, zero=2, replicate=1, shard=2, micro_batch=4),
    "zero2-2-accumulated": Layout(2, zero=2, replicate=1, shard=2),
    "zero3-2": Layout(2, zero=3, replicate=1, shard=2, micro_batch=4),
    "zero3-2-accumulated": Layout(2, zero=3, replicate=1, shard=2),
    "zero3-4-accumulated": Layout(4, zero=3, replicate=1, shard=4, micro_batch=1),
    "hsdp2x2": Layout(4, zero=3, replicate=2, shard=2),
    "hsdp2x2-accumulated": Layout(4, zero=3, replicate=2, shard=2, micro_batch=1),
    "hsdp2x2-zero2": Layout(4, zero=2, replicate=2, shard=2, micro_batch=1),
}
MODELS = [("qwen3", True), ("qwen3", False), ("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)]
QUICK = {("qwen3", True), ("gpt2", True), ("llama", False)}
EVERY = [pytest.param(*model, marks=() if model in QUICK else pytest.mark.long) for model in MODELS]


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    @functools.cache
    def make(family, tied, policy):
        directory = cases.write_model(tmp_path_factory.mktemp(f"{family}-{tied}"), family, tied)
        trace = train_reference(directory, cases.global_batches(), DTYPE[policy], cases.SETTINGS)
        return directory, trace

    return make


def assert_same(result, trace, tolerance):
    for name in ("losses", "norms"):
        ours, theirs = result[name], getattr(trace, name)
        worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))
        assert worst <= tolerance, (name, worst, ours, theirs)


def run(ranks, reference, family, tied, case):
    directory, trace = reference(family, tied, case.policy)
    results = ranks.run(case.world, cases.train_layout, str(directory), case)
    for result in results:
        assert_same(result, trace, TOLERANCE[case.policy])
        assert result["losses"] == results[0]["losses"], "the loss is the same number on every rank"
        assert result["norms"] == results[0]["norms"]
    return results[0], trace


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), EVERY)
def test_fp64(ranks, reference, family, tied, layout):
    run(ranks, reference, family, tied, LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "tied"), MODELS[:1])
def test_fp32(ranks, reference, family, tied, layout):
    case = LAYOUTS[layout]
    run(ranks, reference, family, tied, Layout(**{**vars(case), "policy": "fp32"}))
