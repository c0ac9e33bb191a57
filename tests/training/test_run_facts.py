"""What the first event says of a run for `windlass advise`."""

import math

from windlass.advice.facts import RunFacts
from windlass.model.architecture import parameter_shapes
from windlass.model.config import architecture_from_hf
from windlass.model.flops import flops_per_token
from windlass.report.events import read_events
from windlass.training.start.drift import newest_trainer_state


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
