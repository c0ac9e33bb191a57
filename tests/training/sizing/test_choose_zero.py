"""`parallel.zero: auto`: by what fits, recorded, kept by a resume on the same ranks, chosen anew on others."""

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from tests import tiny
from windlass.config import check_recipe
from windlass.model.config import ModelConfig
from windlass.optim.rules import NO_RULES
from windlass.parallel.activations import RecomputePlan
from windlass.training.parts.device_memory import Room
from windlass.training.sizing import choose_zero
from windlass.training.start.drift import newest_trainer_state
from windlass.training.start.model_plan import ModelPlan
from windlass.units import GIB


def recipe(base, name, steps=2, policy="fp32", **parallel):
    sections = {} if policy == "fp32" else {"precision": {"policy": policy}}
    return tiny.recipe(base, name, run={"steps": steps}, parallel={"zero": "auto"} | parallel, **sections)


def trained(config, free):
    """On one rank, whose host has `free` bytes left: what rank 0 printed, and the layout."""
    original, choose_zero.available_bytes = choose_zero.available_bytes, lambda: free
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            tiny.train(config)
    finally:
        choose_zero.available_bytes = original
    return said.getvalue()


def layout(config):
    """The settings that the newest checkpoint keeps, after a look at resolved.yaml."""
    kept = newest_trainer_state(config.run.directory)["config"]["parallel"]
    assert yaml.safe_load((config.run.directory / "resolved.yaml").read_text())["parallel"] == kept
    return kept["zero"], kept["replicate"], kept["shard"]


def test_cpu_ranks_keep_what_fits_whole_and_a_resume_keeps_the_choice(base, ranks):
    config = recipe(base, "zero-kept")
    said, silent = ranks.run(2, trained, config, GIB)
    line = r"auto: parallel\.zero=0: nothing is cut; a step needs [\d.]+ KiB of the 256\.0 MiB that a rank may take\n"
    assert re.search(line, said) and "parallel.zero" not in silent
    assert layout(config) == (0, -1, 1) and "replicate 2 x shard 1, zero 0" in said

    said, _ = ranks.run(2, trained, recipe(base, "zero-kept", steps=4), 1)  # a host without room for any
    assert (
        "auto: parallel.zero=0, parallel.recompute=none, parallel.compile=false: as the run began on the same" in said
    )
    assert layout(config) == (0, -1, 1) and "drift: parallel" not in said

    (said,) = ranks.run(1, trained, recipe(base, "zero-kept", steps=6), GIB)
    assert (
        "parallel.zero, parallel.recompute, parallel.compile are chosen again, since the checkpoint was written on 2 x CPU and "
        "this run has 1 x CPU; this changes memory and speed, not the result" in said
    )
    assert "auto: parallel.zero" not in said, "one rank cuts nothing"
    assert layout(config) == (3, 1, -1) and "drift: parallel" not in said


def test_where_nothing_fits_what_needs_least_is_taken_and_the_numbers_say_why(base, ranks):
    config = recipe(base, "zero-small")
    said, _ = ranks.run(2, trained, config, 1024)
    assert layout(config) == (2, 1, -1), "its embedding is most of it, and is gathered whole with its gradient"
    line = r"auto: parallel\.zero=2: optimizer states and gradients are cut; a step needs ([\d.]+) KiB of the 256 B that a "
    too_much = (
        r"rank may take, which is too much by the count; with less cut: zero 0 ([\d.]+) KiB, zero 1 ([\d.]+) KiB\n"
    )
    found = re.search(line + too_much, said)
    assert float(found[1]) < min(float(found[2]), float(found[3]))


def test_losses_are_those_of_the_stage_as_a_number(base, ranks):
    auto, given = recipe(base, "zero-auto"), recipe(base, "zero-given", zero=0)
    ranks.run(2, trained, auto, GIB)
    ranks.run(2, trained, given, GIB)
    assert tiny.losses(auto.run.directory) == tiny.losses(given.run.directory)


def test_zero_3_on_cpu_ranks_that_could_keep_all_is_said_with_its_cost(base, ranks):
    said, _ = ranks.run(2, trained, recipe(base, "zero-said", zero=3), GIB)
    assert re.search(
        r"parallel\.zero=3 on 2 CPU ranks gathers weights with every micro-batch, and gloo copies each message: 2\.5 times the "
        r"processor time of zero 0, in fp32 \(benchmarks/results/layouts\.json\); parallel\.zero=auto takes 0 here, which needs "
        r"[\d.]+ KiB of the 256\.0 MiB that a rank may take\n",
        said,
    )
    for free, parallel in ((1, {"zero": 3}), (None, {"zero": 3}), (GIB, {"zero": 2})):
        said, _ = ranks.run(2, trained, recipe(base, f"zero-unsaid-{free}-{parallel['zero']}", **parallel), free)
        assert "CPU ranks" not in said


def test_in_16_bits_cpu_ranks_keep_what_fits_whole_too(base, ranks):
    config = recipe(base, "zero-bf16", policy="bf16")
    said, _ = ranks.run(2, trained, config, GIB)
    assert "auto: parallel.zero=0: nothing is cut" in said and layout(config) == (0, -1, 1)
    said, _ = ranks.run(2, trained, recipe(base, "zero-said-bf16", policy="bf16", zero=3), GIB)
    assert "parallel.zero=auto takes 0 here" in said


def said_of_zero_3(free, **settings):
    """On two CPU ranks of a preset, whose host has `free` GiB left: the sentences."""
    config, plan, runtime = counted("smollm3-3b", 2, **settings)
    with of_host(free):
        return choose_zero.cuts_what_fits(config, plan, runtime)


def test_it_counts_the_copies_of_16_bits_and_is_silent_where_zero_0_is_refused():
    """SmolLM3's 3.08 billion weights: 12.3 GB in fp32, and 6.2 in 16 bits beside them."""
    for policy, size in (("fp32", 16), ("bf16", 18)):
        (line,) = said_of_zero_3(1000, policy=policy, length=64, parallel={"zero": 3})
        needed = float(re.search(r"needs ([\d.]+) GiB", line)[1])
        assert needed * GIB / 3.075e9 == pytest.approx(size, abs=0.9)
        assert "takes 0 here" in line
        assert said_of_zero_3(4 * needed - 2, policy=policy, length=64, parallel={"zero": 3}) == []
    refused = {"policy": "bf16", "gradients": "bf16"}
    assert said_of_zero_3(1000, parallel={"zero": 3}, precision=refused) == []


def test_the_cost_that_is_said_is_the_one_that_was_measured():
    rows = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "layouts.json").read_text())["rows"]
    times = rows["ZeRO-3, none"]["cpu_s"] / rows["DDP, none"]["cpu_s"]
    assert f"{times:.1f} times the processor time of zero 0" in choose_zero.COST


@contextlib.contextmanager
def of_host(free_gib):
    """A host with so much left."""
    original, choose_zero.available_bytes = choose_zero.available_bytes, lambda: free_gib and int(free_gib * GIB)
    try:
        yield
    finally:
        choose_zero.available_bytes = original


def counted(preset, world, room_gib=None, hosts=1, policy="bf16", length=4096, **settings):
    """(config, plan, runtime) of a preset on `world` GPUs, or on CPUs of `hosts` hosts."""
    parallel = {"zero": "auto", **settings.pop("parallel", {})}
    tree = {
        "run": {"directory": "run", "steps": 4, "tokens_per_step": length * 64, "micro_batch": "auto"}
        | settings.pop("run", {}),
        "model": {"preset": preset},
        "data": {
            "sources": [{"builtin": "python-stdlib"}],
            "tokenizer": {"train": 300},
            "directory": "data",
            "sequence_length": length,
        },
        "parallel": parallel,
        "precision": {"policy": policy},
        **settings,
    }
    config = check_recipe(tree)
    architecture = ModelConfig.model_validate({"preset": preset}).architecture()
    names = [f"host{rank * hosts // world}" for rank in range(world)]
    runtime = SimpleNamespace(
        world=world,
        rank=0,
        device=torch.device("cpu" if room_gib is None else "cuda"),
        hosts=lambda: names,
        gathered=lambda value: [value] * world,
    )
    return config, ModelPlan(architecture, None, NO_RULES, RecomputePlan(())), runtime


def chosen(preset, world, room_gib=None, free_gib=None, **settings):
    """(`zero`, replicate, shard, why) of what `counted` describes; `free_gib`: left on each host."""
    config, plan, runtime = counted(preset, world, room_gib, **settings)
    room = None if room_gib is None else Room(int(room_gib * GIB), lambda _size: 0)
    with of_host(free_gib):
        found, why = choose_zero.with_least_zero(config, plan, runtime, room)
    return found.parallel.zero, found.parallel.replicate, found.parallel.shard, *why


@pytest.mark.parametrize(
    ("room_gib", "policy", "stage"),
    [(400, "bf16-pure", 0), (400, "bf16", 0), (140, "bf16", 1), (88, "bf16", 2), (86, "bf16", 3), (10, "bf16", 3)],
)
def test_on_gpus_the_count_decides(room_gib, policy, stage):
    """Llama 3.1 8B on 8, micro-batches of 4 x 4,096 tokens with selective: 114.4, 86.4 and 75.1 GiB with zero 1, 2 and 3."""
    found = chosen("llama-3.1-8b", 8, room_gib, policy=policy)
    assert found[:3] == ((0, -1, 1) if stage == 0 else (stage, 1, -1))


def test_on_cpus_the_share_of_a_rank_is_that_of_its_own_host():
    """SmolLM3 in fp32, one sequence of 4,096: 82.1, 70.7 and 60.2 GiB with zero 0, 1 and 2; half of a share may be taken."""
    assert chosen("smollm3-3b", 4, free_gib=520, policy="fp32")[0] == 2
    assert chosen("smollm3-3b", 4, free_gib=520, hosts=2, policy="fp32")[0] == 0
    assert chosen("smollm3-3b", 4, free_gib=None, policy="fp32")[::3] == (
        3,
        "auto: parallel.zero=3: this host does not say how much memory it has left",
    )


@pytest.mark.parametrize(
    ("parallel", "stage"),
    [
        ({"tp": 2}, 3),
        ({"pp": 2}, 1),
        ({"context": 2}, 3),
        ({"offload": True}, 3),
    ],
)
def test_layouts_that_are_not_counted_keep_what_they_are_where_it_is_left_out(parallel, stage):
    found = chosen("llama-3.1-8b", 8, 1000, parallel=parallel)
    assert found[0] == stage and "what a rank of this layout keeps is not counted" in found[3]


@pytest.mark.parametrize("parallel", [{"shard": 4, "replicate": 2}, {"prefetch": 1}, {"blocks_per_unit": 2}])
def test_what_zero_0_does_not_go_with_keeps_it_out(parallel):
    assert chosen("llama-3.1-8b", 8, 1000, policy="bf16-pure", parallel=parallel)[0] == 1


def test_replicas_that_are_given_become_all_ranks_with_zero_0():
    assert chosen("llama-3.1-8b", 8, 1000, policy="bf16-pure", parallel={"replicate": 2})[:3] == (0, -1, 1)
