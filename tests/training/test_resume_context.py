"""Runs over context ranks: what one rank trains, killed and gone on with in other layouts, around a ring of them, and out."""

import json
import math

import pytest

from tests import tiny
from tests.commands.test_evaluate import evaluate
from tests.training.test_resume_tensor import around, assert_close, killed_and_gone_on
from windlass.commands.export import export
from windlass.commands.generate import generate
from windlass.report.events import read_events

MODEL = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 36}
DATA = {"packing": "best-fit", "isolate": True}
CONTEXT, SHARDS = {"context": 2}, {"shard": 2}
RING = [
    (2, {"context": 2}),
    (4, {"context": 2, "shard": 2, "context_kind": "ulysses"}),
    (2, {"shard": 2}),
    (8, {"context": 2, "tp": 2, "shard": 2}),
    (1, {}),
    (4, {"context": 2, "zero": 0, "replicate": 2}),
    (4, {"pp": 2, "context": 2}),
    (4, {"context": 4, "zero": 2}),
]


def recipe(base, name, **parallel):
    return tiny.recipe(base, name, model=MODEL, data=DATA | {"directory": str(base / "data")}, parallel=parallel)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks):
    """A run on two context ranks, never interrupted: where it lies, and the rows that each rank read."""
    base = tmp_path_factory.mktemp("resume-context")
    config = recipe(base, "whole", **CONTEXT)
    return base, config, ranks.run(2, tiny.train, config)


def test_context_ranks_read_the_same_rows_and_train_what_one_rank_trains(whole, ranks):
    base, config, (first, second) = whole
    assert first["rows"] == second["rows"]
    one = recipe(base, "one")
    ranks.run(1, tiny.train, one)
    assert_close(one.run.directory, config.run.directory)
    counted = [
        [line["targets"] for line in read_events(place / "events.jsonl") if "targets" in line]
        for place in (config.run.directory, one.run.directory)
    ]
    assert counted[0] == counted[1], "rows are counted once"
    validated = [
        [line["loss"] for line in read_events(place / "events.jsonl") if line["kind"] == "validation"]
        for place in (config.run.directory, one.run.directory)
    ]
    assert len(validated[0]) == len(validated[1]) > 1
    assert all(math.isclose(ours, theirs, rel_tol=1e-5) for ours, theirs in zip(*validated, strict=True))


def test_the_start_of_a_run_tells_its_context(whole):
    _, config, _ = whole
    told = json.loads((config.run.directory / "events.jsonl").read_text().splitlines()[0])["derived"]
    assert told["layout"] == "replicate 1 x shard 1 x context 2, zero 3, allgather"
    assert told["attention"] == "flash for CPU, document by document"


@pytest.mark.parametrize(
    ("name", "world", "before", "after_world", "after"),
    [
        ("out-of", 2, CONTEXT, 1, {}),
        pytest.param("into", 2, SHARDS, 4, {"context": 2, "tp": 2, "context_kind": "ulysses"}, marks=pytest.mark.long),
        pytest.param(
            "across", 4, {"context": 4}, 4, {"pp": 2, "context": 2, "context_kind": "ulysses"}, marks=pytest.mark.long
        ),
    ],
)
def test_a_killed_run_goes_on_in_another_layout(whole, ranks, name, world, before, after_world, after):
    base, config, _ = whole
    killed_and_gone_on(ranks, config, (world, after_world), recipe(base, name, **before), recipe(base, name, **after))


@pytest.mark.parametrize(
    "ring",
    [pytest.param(RING[:3], marks=pytest.mark.long), pytest.param(RING[3:], marks=pytest.mark.long)],
    ids=["first", "rest"],
)
def test_around_a_ring_of_layouts_every_byte_stays(whole, ranks, tmp_path, ring):
    around(ranks, whole, tmp_path, ring)


def test_what_comes_out_of_it_is_a_model_as_any_other(whole, ranks):
    _, config, _ = whole
    directory = config.run.directory
    assert export(directory).largest_difference <= 1e-5
    assert generate(directory, ["a rope"], max_tokens=8, temperature=0) != [""]
    logged = [line for line in read_events(directory / "events.jsonl") if line["kind"] == "validation"][-1]
    (lines,) = ranks.run(1, evaluate, directory)
    assert f"step {logged['step']}, loss {logged['loss']:.4f}" in lines[0]
