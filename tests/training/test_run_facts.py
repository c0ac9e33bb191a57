"""What the first event says of a run for `windlass advise`."""

import json
import math
from pathlib import Path

import pytest

from windlass.advice.facts import RunFacts
from windlass.config import load_recipe
from windlass.model.architecture import parameter_shapes
from windlass.model.config import architecture_from_hf
from windlass.model.flops import flops_per_token
from windlass.report.events import read_events
from windlass.training.run_facts import num_units
from windlass.training.start.drift import newest_trainer_state

ROOT = Path(__file__).parents[2]


def test_the_first_event_has_what_a_step_of_the_run_costs(run):
    first, state = read_events(run / "events.jsonl")[0], newest_trainer_state(run)
    architecture = architecture_from_hf(state["model"])
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(architecture).items()}
    facts = RunFacts(**first["facts"])
    assert (facts.device, facts.ranks, facts.hosts, facts.peak_flops) == ("CPU", state["world"], 1, None)
    assert facts.elements == facts.trained_elements == sum(sizes.values())
    assert facts.end_elements == sum(size for name, size in sizes.items() if ".layers." not in name)
    assert facts.flops_per_token == flops_per_token(architecture, state["config"]["data"]["sequence_length"]).causal
    per_rank = state["sequences_per_step"] // facts.ranks
    assert facts.accumulation == per_rank // state["config"]["run"]["micro_batch"]
    assert 0 < facts.filled <= 1 and facts.recomputed_flops == 0


@pytest.mark.parametrize("zero", [1, 2])
def test_the_units_of_a_pipeline_are_those_of_the_rank_s_stages(zero):
    """benchmarks/results/techniques.json counted the collectives of 4 micro-batches on rank 0."""
    config = load_recipe(str(ROOT / "docs" / "techniques" / "pipeline.yaml"), "parallel.pp=2", "model.vocab_size=512")
    rows = json.loads((ROOT / "benchmarks" / "results" / "techniques.json").read_text())["pages"]["pipeline"]
    sent = rows[f"pp 2 x shard 2, ZeRO-{zero}"]["per_rank"][0]["sent"]
    units, ends = num_units(config.model.architecture(), config.parallel)
    assert sent["all-gather"]["calls"] == units == 4 + ends
    assert sent["reduce-scatter"]["calls"] == units * (4 if zero == 2 else 1)


@pytest.mark.parametrize(
    ("schedule", "tied", "units"), [("1f1b", True, (5, 1)), ("interleaved-1f1b", True, (5, 1)), ("zbv", False, (6, 2))]
)
def test_units_of_rank_0_by_schedule(schedule, tied, units):
    """Eight blocks over two ranks: a V has both ends on the first."""
    config = load_recipe(
        str(ROOT / "docs" / "techniques" / "pipeline.yaml"), "parallel.pp=2", f"parallel.schedule={schedule}",
        "model.vocab_size=512", f"model.tie_word_embeddings={str(tied).lower()}",
    )  # fmt: skip
    assert num_units(config.model.architecture(), config.parallel) == units
