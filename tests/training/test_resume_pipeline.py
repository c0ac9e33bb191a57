"""Checkpoints move between pipelines and other layouts bit for bit; what follows them (evaluate, export, generate) too."""

import json
import shutil

import pytest
import torch

from tests import tiny
from windlass.checkpoint.keep import diff
from windlass.commands.evaluate import evaluate
from windlass.commands.export import export
from windlass.commands.generate import generate
from windlass.report.events import read_events

BLOCKS = 5
LAYOUTS = {
    "one": (1, {}),
    "pp2": (2, {"pp": 2}),
    "pp2 x shard2, interleaved": (4, {"pp": 2, "shard": 2, "schedule": "interleaved-1f1b"}),
    "zbv x replicate2": (4, {"pp": 2, "replicate": 2, "zero": 0, "schedule": "zbv"}),
    "shard2": (2, {"shard": 2}),
    "pp4": (4, {"pp": 4}),
}


def recipe(base, name, layout, steps=6, tied=True, **more):
    model = {"num_hidden_layers": BLOCKS, "tie_word_embeddings": tied}
    sections = {"run": {"steps": steps}, "checkpoint": {"every_steps": 3, "keep_last": 10}}
    return tiny.recipe(base, name, model=model, parallel=LAYOUTS[layout][1], **sections, **more)


def moved(config, source):
    """On one of the ranks: what a program of this layout holds once `source` was restored into it, saved again elsewhere."""
    from windlass.checkpoint.checkpoints import Checkpoints
    from windlass.model.config import architecture_from_hf
    from windlass.optim.rules import NO_RULES
    from windlass.parallel.build import build_program
    from windlass.parallel.mesh import make_mesh
    from windlass.precision.policy import precision_of
    from windlass.runtime import start_runtime
    from windlass.training import assemble as parts
    from windlass.training.restore import state_tensors

    runtime = start_runtime()  # groups are made in the order of a run: torch keeps their names from case to case
    rank, world = runtime.rank, runtime.world
    trainer_state = json.loads((source / "trainer_state.json").read_text())["trainer_state"]
    mesh, precision = make_mesh(config.parallel.layout(world), "cpu"), precision_of(config.precision)
    architecture = architecture_from_hf(trainer_state["model"])
    program = build_program(architecture, config.parallel, precision, mesh, torch.device("cpu"), parts.nothing)
    optimizer = parts.optimizer_of(config, program, NO_RULES, precision)
    group = runtime.saving if world > 1 else None
    checkpoints = Checkpoints(
        config.run.directory, config.checkpoint, run_id="moved", rank=rank, world=world, group=group, tell=print
    )
    checkpoints.restore_from(source, state_tensors(program, optimizer), what="all")
    checkpoints.save(3, state_tensors(program, optimizer), trainer_state, {}, final=True)
    runtime.close()


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """A run of 3 steps on one process, with its base directory."""
    base = tmp_path_factory.mktemp("pipelines")
    config = recipe(base, "one", "one", steps=3)
    ranks.run(1, tiny.train, config)
    return base, config.run.directory / "checkpoints" / "step-00000003"


@pytest.mark.long  # tests/commands/test_reshard.py has a short one
def test_a_ring_of_layouts_returns_every_bit(ranks, trained):
    base, first = trained
    source = first
    for number, layout in enumerate(["pp2", "zbv x replicate2", "shard2", "pp2 x shard2, interleaved", "pp4", "one"]):
        world, _ = LAYOUTS[layout]
        config = recipe(base, f"ring-{number}", layout, steps=3)
        config.run.directory.mkdir(parents=True)
        ranks.run(world, moved, config, source)
        source = config.run.directory / "step-00000003"
        difference = diff(first, source)
        assert not (difference.only_first or difference.only_second or difference.form or difference.bytes), layout
        assert difference.same > 3 * 11 * BLOCKS, "weights and two moments of every tensor"


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("pp2", "one"),
        ("one", "pp2 x shard2, interleaved"),
        pytest.param("pp2", "zbv x replicate2", marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_in_another_layout_as_one_process_would(ranks, tmp_path, begin, end):
    straight = recipe(tmp_path, "straight", "one")
    ranks.run(1, tiny.train, straight)
    broken = recipe(tmp_path, "broken", begin)
    ranks.run(LAYOUTS[begin][0], tiny.train, broken)
    shutil.rmtree(broken.run.directory / "checkpoints" / "step-00000006")
    ranks.run(LAYOUTS[end][0], tiny.train, recipe(tmp_path, "broken", end))
    expected, found = tiny.losses(straight.run.directory), tiny.losses(broken.run.directory)
    assert found.keys() == expected.keys() and ("resume", 3) in tiny.kinds(broken.run.directory)
    for step, (loss, norm) in expected.items():
        assert found[step] == pytest.approx((loss, norm), rel=1e-5), step


def test_the_same_pipeline_resumes_bit_for_bit(ranks, tmp_path):
    straight, broken = (recipe(tmp_path, name, "pp2") for name in ("straight", "broken"))
    ranks.run(2, tiny.train, straight)
    ranks.run(2, tiny.train, broken)
    shutil.rmtree(broken.run.directory / "checkpoints" / "step-00000006")
    ranks.run(2, tiny.train, broken)
    assert tiny.losses(broken.run.directory) == tiny.losses(straight.run.directory)


def test_evaluation_export_and_text_of_a_pipelines_run_are_those_of_one_process(ranks, tmp_path):
    directories = []
    for name, layout in (("one", "one"), ("piped", "zbv x replicate2")):
        config = recipe(tmp_path, name, layout)
        ranks.run(LAYOUTS[layout][0], tiny.train, config)
        directories.append(config.run.directory)
        export(config.run.directory, tmp_path / f"export-{name}")
    from safetensors.torch import load_file

    one, piped = (load_file(tmp_path / f"export-{name}" / "model.safetensors") for name in ("one", "piped"))
    assert one.keys() == piped.keys()
    assert all((one[name] - piped[name]).abs().max() < 1e-3 for name in one)
    assert generate(directories[0], ["the"], max_tokens=4, temperature=0) == generate(
        directories[1], ["the"], max_tokens=4, temperature=0
    )
    (told,) = ranks.run(1, evaluate, directories[1])[0]
    (own,) = [
        e["loss"] for e in read_events(directories[1] / "events.jsonl") if (e["kind"], e["step"]) == ("validation", 6)
    ]
    assert f"step 6, loss {own:.4f}" in told, "one process scores what the pipeline scored"
