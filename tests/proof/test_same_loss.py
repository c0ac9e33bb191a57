"""Every layout trains what one process of torch and transformers trains: losses, norms, weights. Sizes are odd, masks uneven."""

import functools

import pytest
import torch

from tests import cases
from tests.cases import Layout
from windlass.proof.reference import train_reference

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
    "zero1-2-accumulated": Layout(2, zero=1, replicate=1, shard=2, micro_batch=1),
    "hsdp2x2-zero1": Layout(4, zero=1, replicate=2, shard=2, micro_batch=1),
    "offload-one": Layout(1, zero=3, replicate=1, shard=1, sharding=(("offload", True),)),
    "offload-zero3-2": Layout(2, zero=3, replicate=1, shard=2, micro_batch=1, sharding=(("offload", True),)),
    "offload-zero2-2": Layout(2, zero=2, replicate=1, shard=2, micro_batch=1, sharding=(("offload", True),)),
    "offload-zero1-2": Layout(2, zero=1, replicate=1, shard=2, micro_batch=1, sharding=(("offload", True),)),
    "units-of-2-prefetch": Layout(2, zero=3, replicate=1, shard=2, sharding=(("blocks_per_unit", 2), ("prefetch", 1))),
}
MODELS = [("qwen3", True), ("qwen3", False), ("llama", False), ("llama", True), ("gpt2", True), ("gpt2", False)]
FEW = {"one", "ddp2-accumulated", "zero2-2", "zero3-4-accumulated", "hsdp2x2-accumulated", "offload-zero1-2"}
QUICK = {("qwen3", True), ("gpt2", True)}
EVERY = [pytest.param(*model, marks=() if model in QUICK else pytest.mark.long) for model in MODELS]
QUICK_CELLS = {("qwen3", True, layout) for layout in LAYOUTS} | {("gpt2", True, layout) for layout in FEW}
CELLS = [
    pytest.param(*model, layout, marks=() if (*model, layout) in QUICK_CELLS else pytest.mark.long)
    for model in MODELS
    for layout in LAYOUTS
]


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


def assert_losses(results, trace, tolerance):
    """Losses and norms of every rank, and one number on all of them."""
    for result in results:
        assert_same(result, trace, tolerance)
        assert result["losses"] == results[0]["losses"], "the loss is the same number on every rank"
        assert result["norms"] == results[0]["norms"]


def assert_every_number(results, trace, directory, policy):
    """Besides, every gradient of the first step, and with fp64 every weight after the last."""
    assert_losses(results, trace, TOLERANCE[policy])
    # AdamW divides a small gradient by its own size, so that fp32 noise of the gradients is no noise of the weights
    for name in ("gradients", "weights") if policy == "fp64" else ("gradients",):
        held = {parameter: value for result in results for parameter, value in result[name].items()}
        cases.assert_same_tensors(held, getattr(trace, name), directory, TOLERANCE[policy])


def run(ranks, reference, family, tied, case):
    directory, trace = reference(family, tied, case.policy)
    results = ranks.run(case.world, cases.train_layout, str(directory), case)
    assert_every_number(results, trace, directory, case.policy)
    return results[0], trace


@pytest.mark.parametrize(("family", "tied", "layout"), CELLS)
def test_fp64(ranks, reference, family, tied, layout):
    run(ranks, reference, family, tied, LAYOUTS[layout])


@pytest.mark.parametrize("layout", [pytest.param(one, marks=() if one in FEW else pytest.mark.long) for one in LAYOUTS])
def test_fp32(ranks, reference, layout):
    case = LAYOUTS[layout]
    run(ranks, reference, "qwen3", True, Layout(**{**vars(case), "policy": "fp32"}))
