"""Checkpoints of every kind of layout, carried around a ring of others and back: every byte stays. What reads them afterwards
(export, evaluate, generate) reads a model as any other; and what a run of such a layout reports."""

import math

import pytest

from tests import tiny
from tests.commands.models.test_evaluate import evaluate
from tests.training.runs.resuming import around, assert_close
from windlass.commands.models.export import export
from windlass.commands.models.generate import generate
from windlass.commands.models.sampling import Sampling
from windlass.report.events import read_events

RINGS = {
    ("heads", "tp2"): [
        ["tp2", "tp2 shard4", "shard2", "tp2 replicate2", "one", "tp2 zero2 shard2", "tp2 zero1"],
    ],
    ("bf16 heads", "tp2"): [["tp2", "one", "pp2", "tp2 pp2", "tp2 shard2", "shard2", "tp2 zero0", "one"]],
    ("documents", "context2"): [
        ["context2", "context2 shard2 ulysses", "shard2"],
        ["context2 tp2 shard2", "one", "context2 zero0 replicate2", "pp2 context2", "context4 zero2"],
    ],
    ("experts", "expert2 shard2"): [
        ["one", "expert2 shard2"],
        # three experts over two ranks are cut by channels
        ["expert2 shard4", "shard4", "tp2", "expert2 shard2 tp2", "expert2 shard2 replicate2", "pp2 expert2 shard2",
         "expert2 context2 shard2 zero2", "expert3 shard3", "one"],
    ],
    ("deep", "one"): [["pp2", "pp2 zbv zero0 replicate2", "shard2", "pp2 interleaved-1f1b shard2", "pp4", "one"]],
}  # fmt: skip
QUICK = ["one", "expert2 shard2"]  # tests/commands/test_reshard.py has another short one


def lines_of(config, kind):
    return [line for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == kind]


@pytest.mark.parametrize(
    ("settings", "layout", "ring"),
    [
        pytest.param(*key, ring, id=f"{key[0]}: {', '.join(ring)}", marks=() if ring == QUICK else pytest.mark.long)
        for key, rings in RINGS.items()
        for ring in rings
    ],
)
def test_around_a_ring_of_layouts_every_byte_stays(runs, ranks, tmp_path, settings, layout, ring):
    around(ranks, runs.whole(settings, layout)[0], tmp_path, ring)


@pytest.mark.parametrize(("settings", "layout"), [key for key in RINGS if key[0] != "deep"])
def test_its_export_is_what_transformers_reads(runs, settings, layout):
    config, _ = runs.whole(settings, layout)
    assert export(config.run.directory).largest_difference <= 1e-5


def test_context_ranks_train_what_one_rank_trains(runs):
    (config, _), (one, _) = runs.whole("documents", "context2"), runs.whole("documents", "one")
    assert_close(one.run.directory, config.run.directory)
    counted = [[line["targets"] for line in lines_of(each, "step")] for each in (config, one)]
    assert counted[0] == counted[1] and len(counted[0]) == tiny.STEPS, "rows are counted once"
    validated = [[line["loss"] for line in lines_of(each, "validation")] for each in (config, one)]
    assert len(validated[0]) == len(validated[1]) > 1
    assert all(math.isclose(ours, theirs, rel_tol=1e-5) for ours, theirs in zip(*validated, strict=True))
    derived = tiny.lines(config.run.directory)[0]["derived"]
    assert derived["layout"] == "replicate 1 x shard 1 x context 2, zero 3, allgather"
    assert derived["attention"] == "flash for CPU, document by document"


def test_step_lines_report_the_routers_loss_and_the_busiest_experts(runs):
    config, _ = runs.whole("experts", "expert2 shard2")
    steps = lines_of(config, "step")
    assert len(steps) == tiny.STEPS
    for line in steps:
        assert 1.5 < line["router_loss"] < 4.0, "2 where all experts get alike"
        assert len(line["expert_loads"]) == 2 and all(1.0 <= load <= 3.0 for load in line["expert_loads"])
        assert list(line["expert_shares"]) == list("012345")
        assert math.isclose(sum(line["expert_shares"].values()), 1.0)
    header = (config.run.directory / "resolved.yaml").read_text()
    assert "# experts: 2 of 6 in 2 of 2 layers" in header and "experts over 2 of shard x context" in header


@pytest.mark.parametrize(
    ("settings", "layout"),
    [pytest.param("documents", "context2", marks=pytest.mark.long), ("deep", "pp2")],
)
def test_one_process_scores_and_continues_what_the_ranks_trained(runs, ranks, settings, layout):
    directory = runs.whole(settings, layout)[0].run.directory
    assert generate(directory, ["a rope"], Sampling(max_tokens=8, temperature=0)) != [""]
    logged = lines_of(runs.whole(settings, layout)[0], "validation")[-1]
    (scores,) = ranks.run(1, evaluate, directory)
    assert scores[0].step == logged["step"] and scores[0].loss == pytest.approx(logged["loss"], rel=1e-5)


@pytest.mark.long
def test_export_and_text_of_a_pipelines_run_are_those_of_one_process(runs, tmp_path):
    from safetensors.torch import load_file

    held, said = [], []
    for layout in ("one", "pp2 zbv zero0 replicate2"):
        directory = runs.whole("deep", layout)[0].run.directory
        export(directory, tmp_path / layout)
        held.append(load_file(tmp_path / layout / "model.safetensors"))
        said.append(generate(directory, ["the"], Sampling(max_tokens=4, temperature=0)))
    one, piped = held
    assert one.keys() == piped.keys() and said[0] == said[1]
    assert all((one[name] - piped[name]).abs().max() < 1e-3 for name in one)
