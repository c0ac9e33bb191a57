"""Planted slow runs, each trained for a few steps and recognised by its own events; and healthy ones, which have no lever."""

import dataclasses
import math

import pytest

from tests.advice import planted
from tests.parallel.tiny import num_buckets
from windlass.advice.levers import Lever, find_levers, rates_of, without
from windlass.advice.observed import observe
from windlass.model.architecture import parameter_shapes
from windlass.model.config import architecture_from_hf
from windlass.profiling.summary import Summary
from windlass.training.start.drift import newest_trainer_state

TIMES = ("the loader is starved", "logging every step")
"""What a busy machine does to any tiny run."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def observed(base, ranks):
    """name of a planted run -> what its events say, each trained once. Times stay as they were measured."""
    found = {}

    def observed(name):
        if name not in found:
            world = planted.RUNS[name][0]
            if world == 1:
                planted.train(base, name)
            else:
                ranks.run(world, planted.train, base, name, timeout_s=300)
            found[name] = observe(base / name.replace(" ", "_"))
        return found[name]

    return observed


def levers(run, **changes) -> dict[str, Lever]:
    return {lever.name: lever for lever in find_levers(dataclasses.replace(run, **changes))}


QUIET = {"step_s": 0.02, "wait_s": 1e-5, "log_s": 1e-5}
LONGER = {**QUIET, "step_s": 0.08}
"""Of runs with 4 micro-batches."""


@pytest.mark.parametrize("name", ["healthy", "healthy on two ranks"])
def test_a_healthy_run_has_no_lever(observed, name):
    run = observed(name)
    assert levers(run, **(QUIET if run.facts.accumulation == 1 else LONGER)) == {}
    assert (run.reads, run.facts.ranks, run.script) == (0, planted.RUNS[name][0], "")
    assert run.operators > 500


@pytest.mark.parametrize("name", TIMES)
def test_what_a_run_measures_of_itself_is_recognised_by_its_times(observed, name):
    run = observed(name)
    assert run.wait_s > 0 and run.log_s > 0, "both are in its lines"
    spent = {"wait_s": 0.2, "step_s": 0.25} if name == TIMES[0] else {"log_s": 0.002}
    (lever,) = levers(run, **{**QUIET, **spent}).values()
    assert (lever.name, lever.source) == (name, "measured")
    assert lever.gain == pytest.approx(4.0 if name == TIMES[0] else without(0.09))


def test_a_loader_of_the_scripts_own_is_named(observed):
    run = observed("the loader is starved")
    assert run.wait_s >= 0.2, "what the source says of its last batch"
    assert "The source is the script's own" in levers(run, step_s=0.25)["the loader is starved"].seen


def test_lines_that_are_rare_or_quick_are_no_lever(observed):
    run = observed("logging every step")
    assert levers(run, **QUIET) == {}, "half a permille of the step"
    rare = {**run.settings, "report": {"every_steps": 10}}
    assert levers(run, **{**QUIET, "log_s": 0.002}, settings=rare) == {}


def test_a_read_in_the_step_is_counted_and_named(observed):
    run = observed("the host reads from the device")
    (lever,) = levers(run, **QUIET).values()
    assert (run.reads, lever.gain, lever.source) == (2, None, "unknown")
    assert lever.seen.startswith("2 reads in a step that is not logged") and "objective Reading" in lever.seen
    on_gpu = levers(run, **QUIET, facts=dataclasses.replace(run.facts, device="NVIDIA H200"), profile=PROFILE)
    assert on_gpu["the host reads from the device"].gain == pytest.approx(1 / 0.9 - 1), "the idle share of the profile"


def test_a_check_of_every_step_is_named_as_what_reads(observed):
    run = observed("the host reads from the device")
    checking = {**run.settings, "parallel": {**run.settings["parallel"], "check": True}}
    (lever,) = levers(run, **QUIET, settings=checking).values()
    assert "parallel.check compares ranks" in lever.seen and lever.change.startswith("parallel.check=false")


def test_padding_is_counted(observed):
    run = observed("rows of unequal length")
    (lever,) = levers(run, **QUIET).values()
    assert 0.4 < run.facts.filled < 0.8 and lever.name == "rows of unequal length"
    assert lever.gain == pytest.approx(1 / run.facts.filled - 1) and lever.source == "measured"


def test_a_gradient_that_is_sent_for_a_handful_of_tokens(observed):
    run = observed("no accumulation")
    (lever,) = levers(run, **QUIET).values()
    assert (lever.name, lever.source) == ("no accumulation", "estimated")
    assert "run.tokens_per_step=4 times" in lever.change and "changes the maths" in lever.change
    assert "a rank sends 63.2 KiB in 1 call for" in lever.seen, "2 (N-1)/N of 16,184 gradients of 4 bytes"
    measured = levers(run, **QUIET, profile=PROFILE)["no accumulation"]
    assert measured.source == "measured"
    assert measured.gain == pytest.approx(1 / (1 - 0.225) - 1), "of the 30 % that are sent, three quarters fall away"
    hidden = dataclasses.replace(PROFILE, hidden_s=0.03)
    assert levers(run, **QUIET, profile=hidden) == {}, "what is measured replaces the estimate"


def test_zero_3_that_accumulates_sends_on_every_micro_batch(observed):
    run = observed("no accumulation")
    facts = dataclasses.replace(run.facts, accumulation=8, layout={**run.facts.layout, "replicate": 1, "shard": 2})
    sharded = {**run.settings, "parallel": {**run.settings["parallel"], "zero": 3}}
    found = levers(run, **QUIET, facts=facts, settings=sharded, profile=PROFILE)["communication is not hidden"]
    assert found.change.startswith("parallel.zero=1")
    assert found.gain == pytest.approx(1 / (1 - 0.2625) - 1), "of the 30 % that are sent, seven eighths fall away"


def test_buckets_that_hold_next_to_nothing(base, observed):
    run = observed("tiny buckets")
    (lever,) = levers(run, **LONGER).values()
    assert (lever.name, lever.source) == ("tiny buckets", "estimated")
    assert lever.change == "parallel.bucket_mib=25: 1 collective for the same bytes"
    shapes = parameter_shapes(architecture_from_hf(newest_trainer_state(base / "tiny_buckets")["model"]))
    buckets = num_buckets([4 * math.prod(shape) for shape in reversed(shapes.values())], 0.001)
    assert len(shapes) > buckets == run.facts.buckets > 10, "the norms share some"
    assert lever.seen.startswith(f"{buckets} collectives a step of ")
    assert lever.gain == pytest.approx(without((buckets - 1) * 1e-4 / 0.08))


def test_units_that_are_tiny_are_joined(observed):
    run = observed("tiny buckets")
    facts = dataclasses.replace(run.facts, units=65, layout={**run.facts.layout, "replicate": 1, "shard": 2})
    sharded = {**run.settings, "parallel": {**run.settings["parallel"], "zero": 3}}
    assert levers(run, **QUIET, facts=facts, settings=sharded)["tiny buckets"].change.startswith(
        "parallel.blocks_per_unit=64: 23 collectives"
    )


def test_micro_batches_of_a_few_tokens(observed):
    run = observed("tiny micro-batches")
    (lever,) = levers(run, **QUIET).values()
    assert (lever.name, lever.source) == ("tiny micro-batches", "estimated")
    assert lever.change.startswith("run.micro_batch=4: the same result")
    assert "8 micro-batches of 16 tokens" in lever.seen
    (unknown,) = levers(run, **QUIET, operators=None).values()
    assert (unknown.gain, unknown.source) == (None, "unknown")


@pytest.mark.parametrize(("share", "is_named"), [(0.09, False), (0.11, True)])
def test_micro_batches_of_a_few_tokens_on_a_gpu_that_computes_longer_than_it_is_called(observed, share, is_named):
    """8 micro-batches become one, so that seven eighths of the calls fall away: `share` of the step."""
    run = observed("tiny micro-batches")
    on_gpu = dataclasses.replace(run.facts, device="NVIDIA H200")
    step_s = run.operators * 5e-6 * 7 / 8 / share
    found = levers(run, **{**QUIET, "step_s": step_s}, facts=on_gpu)
    assert ("tiny micro-batches" in found) == is_named
    if is_named:
        assert found["tiny micro-batches"].gain == pytest.approx(1 / (1 - share) - 1)
        assert found["tiny micro-batches"].change.startswith("run.micro_batch=8: the same result")


@pytest.mark.parametrize(("num_hosts", "link_bytes_s"), [(1, 330e9), (2, 25e9)])
def test_estimates_take_the_slower_link_where_ranks_are_on_several_hosts(observed, num_hosts, link_bytes_s):
    run = observed("healthy on two ranks")
    facts = dataclasses.replace(run.facts, device="NVIDIA H200", hosts=num_hosts)
    rates = rates_of(dataclasses.replace(run, facts=facts))
    assert (rates.link_bytes_s, rates.flops) == (link_bytes_s, 0.5 * 989.4e12)
    assert rates_of(run).link_bytes_s == 1e9, "gloo, on CPUs"


def test_a_step_that_is_mostly_calls_of_operators(observed):
    """Its own count and its own time: 4 us for an operator, of which 5 would be calling it."""
    run = observed("tiny steps")
    (lever,) = levers(run, **{**QUIET, "step_s": 4e-6 * run.operators + 2e-5}).values()
    assert (lever.name, lever.source, lever.gain) == ("tiny steps", "estimated", 1.0)
    assert lever.seen.startswith(
        f"{run.operators:,} operators in a step of 1 x 16 tokens take 4 us each, of which calling one"
    )
    assert lever.change.startswith("run.micro_batch=4 with run.tokens_per_step=64. It changes the maths")
    assert levers(run, **{**QUIET, "step_s": 7e-6 * run.operators}) == {}, "more of the step is work"
    (lever,) = levers(run, **{**QUIET, "step_s": 6.5e-6 * run.operators}).values()
    assert lever.gain == 1.0, "an estimate says twice at most"
    assert levers(run, **{**QUIET, "step_s": 1e-3}, operators=None) == {}, "not counted, not said"


def test_a_step_of_calls_that_accumulates_takes_larger_micro_batches_first(observed):
    run = observed("tiny steps")
    settings = {**run.settings, "run": {**run.settings["run"], "micro_batch": 8}}
    facts = dataclasses.replace(run.facts, accumulation=2)
    (lever,) = levers(run, **{**QUIET, "step_s": 4e-6 * run.operators}, settings=settings, facts=facts).values()
    assert (lever.name, lever.change) == ("tiny steps", "run.micro_batch=16: the same result in fewer operators")


def test_the_levers_of_a_gpu(observed):
    run = observed("healthy")
    h200 = dataclasses.replace(run.facts, device="NVIDIA H200", recomputed_flops=run.facts.flops_per_token / 4)
    found = levers(run, **QUIET, facts=h200, memory_bytes=20 << 30)
    assert list(found) == ["blocks are computed twice", "operators one by one", "products in fp32"]
    assert found["blocks are computed twice"].gain == 0.25
    assert found["products in fp32"].change == "precision.policy=bf16"
    full = levers(run, **QUIET, facts=dataclasses.replace(h200, gathered_bytes=2), memory_bytes=130 << 30)
    assert list(full) == ["operators one by one"], "there is no room to keep more"


def test_the_largest_gain_comes_first_and_the_unknown_last(observed):
    run = observed("the host reads from the device")
    found = find_levers(
        dataclasses.replace(run, step_s=1.0, wait_s=0.1, log_s=0.0, facts=dataclasses.replace(run.facts, filled=0.5))
    )
    assert [lever.name for lever in found] == [
        "rows of unequal length", "the loader is starved", "the host reads from the device",
    ]  # fmt: skip


PROFILE = Summary(
    rank=0, first_step=5, last_step=9, device="CPU", step_s=0.1, computing_s=0.06, communicating_s=0.03, hidden_s=0.0,
    idle_s=0.01, kinds=(), operators=(), traffic=(),
)  # fmt: skip
