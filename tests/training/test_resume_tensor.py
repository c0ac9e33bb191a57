"""A run moves between tensor-parallel and other layouts: the same losses, the same bytes, and an export of the same weights."""

import pytest

from tests import tiny
from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.keep import Difference, diff
from windlass.commands.export import export
from windlass.config import check_recipe
from windlass.model.config import architecture_from_hf
from windlass.parallel.build import build_program
from windlass.parallel.mesh import make_mesh
from windlass.precision.policy import precision_of
from windlass.proof.pool import RankFailed
from windlass.training.assemble import optimizer_of
from windlass.training.open_saved import read_trainer_state
from windlass.training.restore import state_tensors

MODEL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
}  # 18 channels a rank: uneven over 4
TP, SHARDS = {"tp": 2}, {"shard": -1}
RING = [
    (2, {"tp": 2}),
    (8, {"tp": 2, "shard": 4}),
    (2, {"shard": 2}),
    (4, {"tp": 2, "replicate": 2, "shard": 1}),
    (1, {}),
    (4, {"tp": 2, "shard": 2, "zero": 2}),
    (2, {"tp": 2, "shard": 1, "zero": 1}),
]


def checkpoint(directory, step):
    return directory / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks):
    """A run on two tensor ranks, never interrupted: where it lies, and the rows that each rank read."""
    base = tmp_path_factory.mktemp("resume-tensor")
    config = tiny.recipe(base, "whole", model=MODEL, parallel=TP)
    return base, config, ranks.run(2, tiny.train, config)


def assert_close(one, two):
    expected, got = tiny.losses(one), tiny.losses(two)
    assert got.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert abs(got[step][0] - loss) <= 1e-5 and abs(got[step][1] - norm) <= 1e-5, step


def killed_and_gone_on(ranks, whole, worlds, before, after):
    """A run of the recipe `before` is killed, goes on as `after`, and is the run `whole` that nobody killed."""
    with pytest.raises(RankFailed):
        ranks.run(worlds[0], tiny.train, before, (0, 8))
    ranks.run(worlds[1], tiny.train, after)
    assert_close(whole.run.directory, after.run.directory)


def test_tensor_ranks_read_the_same_rows(whole):
    _, _, (first, second) = whole
    assert first["rows"] == second["rows"]


@pytest.mark.parametrize(
    ("name", "world", "before", "after_world", "after"),
    [pytest.param("out-of", 2, TP, 2, SHARDS, marks=pytest.mark.long), ("into", 2, SHARDS, 4, {"tp": 2, "shard": 2})],
)
def test_a_killed_run_goes_on_in_another_layout(whole, ranks, name, world, before, after_world, after):
    base, config, _ = whole
    recipes = (tiny.recipe(base, name, model=MODEL, parallel=parallel) for parallel in (before, after))
    killed_and_gone_on(ranks, config, (world, after_world), *recipes)


def carry(source, target, tree, world, parallel):
    """On one of `world` ranks: reads a checkpoint into a layout and writes it out of it, without a step."""
    import torch
    import torch.distributed as dist

    config = check_recipe({**tree, "parallel": parallel})
    mesh, precision = make_mesh(config.parallel.layout(world), "cpu"), precision_of(config.precision)
    trainer_state = read_trainer_state(source)
    architecture = architecture_from_hf(trainer_state["model"])
    parts = (architecture, config.parallel, precision, mesh, torch.device("cpu"), lambda named: None)
    program = build_program(*parts)
    optimizer = optimizer_of(config, program, {}, precision)
    state = state_tensors(program, optimizer)
    group = dist.new_group(backend="gloo") if world > 1 else None
    checkpoints = Checkpoints(
        target, config.checkpoint, run_id="ring", rank=dist.get_rank(), world=world, group=group, tell=print
    )
    checkpoints.restore_from(source, state, what="all")
    beside = [source / "resolved.yaml", source / "provenance.json", *(source / "tokenizer").iterdir()]
    checkpoints.save(1, state, trainer_state, {str(path.relative_to(source)): path for path in beside}, final=True)
    checkpoints.wait()


def around(ranks, whole, tmp_path, ring):
    """The last checkpoint of a run, carried through the layouts of `ring`: after each every byte is the first one's."""
    _, config, _ = whole
    first = source = checkpoint(config.run.directory, tiny.STEPS)
    for number, (world, parallel) in enumerate(ring):
        target = tmp_path / str(number) / "checkpoints"
        ranks.run(world, carry, source, target, config.model_dump(mode="json", by_alias=True), world, parallel)
        source = target / "step-00000001"
        difference = diff(first, source)
        assert difference == Difference(same=difference.same) and difference.same > 0, (parallel, difference)


@pytest.mark.long  # tests/commands/test_reshard.py has a short one
def test_around_a_ring_of_layouts_every_byte_stays(whole, ranks, tmp_path):
    around(ranks, whole, tmp_path, RING)


def test_its_export_is_what_transformers_reads(whole):
    _, config, _ = whole
    assert export(config.run.directory).largest_difference <= 1e-5
