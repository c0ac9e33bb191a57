"""A run with experts, its step lines, and its checkpoints: from dealt-out experts into other layouts and back, every byte; what
transformers reads of its export."""

import pytest

from tests import tiny
from tests.training.test_resume_tensor import around, killed_and_gone_on
from windlass.commands.export import export
from windlass.report.events import read_events

MODEL = {
    "family": "qwen3_moe",
    "intermediate_size": None,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.01,
}
EXPERT = {"expert": 2, "shard": 2}
QUICK = [(1, {}), (2, EXPERT)]
RING = [
    (4, {"expert": 2, "shard": 4}),  # three experts over two ranks: cut by channels
    (4, {"shard": 4}),
    (2, {"tp": 2}),
    (4, {"expert": 2, "shard": 2, "tp": 2}),
    (4, {"expert": 2, "shard": 2, "replicate": 2}),
    (4, {"pp": 2, "expert": 2, "shard": 2}),
    (4, {"expert": 2, "context": 2, "shard": 2, "zero": 2}),
    (3, {"expert": 3, "shard": 3}),
    (1, {}),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks):
    """A run on two expert ranks, never interrupted."""
    base = tmp_path_factory.mktemp("resume-expert")
    config = tiny.recipe(base, "whole", model=MODEL, parallel=EXPERT)
    return base, config, ranks.run(2, tiny.train, config)


def test_step_lines_tell_the_routers_loss_and_the_busiest_experts(whole):
    _, config, _ = whole
    steps = [line for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == "step"]
    assert len(steps) == tiny.STEPS
    for line in steps:
        assert 1.5 < line["router_loss"] < 4.0, "2 where all experts get alike"
        assert len(line["expert_loads"]) == 2 and all(1.0 <= load <= 3.0 for load in line["expert_loads"])
    header = (config.run.directory / "resolved.yaml").read_text()
    assert "# experts: 2 of 6 in 2 of 2 layers" in header and "experts over 2 of shard x context" in header


def test_out_of_dealt_experts_and_back_every_byte_stays(whole, ranks, tmp_path):
    around(ranks, whole, tmp_path, QUICK)


@pytest.mark.long
def test_around_a_ring_of_layouts_every_byte_stays(whole, ranks, tmp_path):
    around(ranks, whole, tmp_path, RING)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world", "before", "after_world", "after"),
    [("out-of", 2, EXPERT, 1, {"shard": 1}), ("into", 2, {"shard": 2}, 4, {"expert": 2, "shard": 4})],
)
def test_a_killed_run_goes_on_in_another_layout(whole, ranks, name, world, before, after_world, after):
    base, config, _ = whole
    recipes = (tiny.recipe(base, name, model=MODEL, parallel=parallel) for parallel in (before, after))
    killed_and_gone_on(ranks, config, (world, after_world), *recipes)


def test_its_export_is_what_transformers_reads(whole):
    _, config, _ = whole
    assert export(config.run.directory).largest_difference <= 1e-5
