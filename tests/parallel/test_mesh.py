"""Coordinates and groups of the ranks' grid, against the factorisation written out."""

import itertools

import pytest
import torch
import torch.distributed as dist

from windlass.parallel.config import MeshLayout
from windlass.parallel.mesh import AXES, make_mesh, make_silent_mesh

LAYOUTS = {
    "one": MeshLayout(1, 1, 1, 1, 1, 1),
    "ddp4": MeshLayout(1, 4, 1, 1, 1, 1),
    "shard4": MeshLayout(1, 1, 4, 1, 1, 1),
    "hsdp2x2": MeshLayout(1, 2, 2, 1, 1, 1),
    "pp2 x shard2": MeshLayout(2, 1, 2, 1, 1, 1),
    "shard2 x tp2": MeshLayout(1, 1, 2, 1, 2, 1),
    "context2 x shard2": MeshLayout(1, 1, 2, 2, 1, 1),
    "hsdp2x4": MeshLayout(1, 2, 4, 1, 1, 1),
    "pp2 x shard2 x tp2": MeshLayout(2, 1, 2, 1, 2, 1),
    "replicate2 x shard2 x context2": MeshLayout(1, 2, 2, 2, 1, 1),
    "pp2 x context2 x tp2": MeshLayout(2, 1, 1, 2, 2, 1),
}


def describe(layout):
    """What this rank sees of the grid."""
    mesh = make_mesh(layout, "cpu")
    summed = mesh.sum_over_loss(torch.tensor(2.0 ** dist.get_rank()))
    counted = mesh.sum_over_batch(torch.tensor(2.0 ** dist.get_rank()))
    return {
        "coordinate": mesh.coordinate,
        "batch_rank": mesh.batch_rank,
        "loss": dist.get_process_group_ranks(mesh.loss_group),
        "summed": int(summed.item()),
        "batch": dist.get_process_group_ranks(mesh.batch_group),
        "counted": int(counted.item()),
        "context": [dist.get_rank()] if mesh.context is None else mesh.context.mesh.tolist(),
        "pp_group": dist.get_process_group_ranks(mesh.pp_group),
        "fsdp": sorted(mesh.fsdp.mesh.flatten().tolist()),
        "fsdp_dims": mesh.fsdp.ndim,
        "replicate": dist.get_process_group_ranks(mesh.dense["replicate"].get_group()),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_grid_is_the_factorisation_of_the_world_with_tp_innermost(ranks, name):
    layout = LAYOUTS[name]
    sizes = [getattr(layout, axis) for axis in AXES]
    places = [dict(zip(AXES, place)) for place in itertools.product(*map(range, sizes))]

    def together(rank, *varying):
        """Ranks whose place differs from `rank`'s along `varying` only."""
        fixed = [axis for axis in AXES if axis not in varying]
        return [other for other, place in enumerate(places) if all(place[a] == places[rank][a] for a in fixed)]

    results = ranks.run(layout.world, describe, layout)
    for rank, seen in enumerate(results):
        assert seen["coordinate"] == places[rank]
        assert seen["batch_rank"] == places[rank]["replicate"] * layout.shard + places[rank]["shard"]
        assert seen["loss"] == together(rank, "replicate", "shard", "context")
        assert seen["summed"] == sum(2**other for other in seen["loss"])
        assert seen["batch"] == together(rank, "replicate", "shard"), "context ranks read the same rows"
        assert seen["counted"] == sum(2**other for other in seen["batch"])
        assert seen["context"] == together(rank, "context")
        assert seen["pp_group"] == together(rank, "pp")
        assert seen["fsdp"] == together(rank, *(("replicate",) if layout.replicate > 1 else ()), "shard", "context")
        assert seen["fsdp_dims"] == (2 if layout.replicate > 1 else 1)
        assert seen["replicate"] == together(rank, "replicate")
    batch_ranks = [seen["batch_rank"] for seen in results]
    assert sorted(set(batch_ranks)) == list(range(layout.batch_ranks)), "the batch axes cut the batch without a gap"
    if layout.batch_ranks == layout.world:
        assert batch_ranks == list(range(layout.world)), "rank r reads part r"


def wrong_world():
    try:
        make_mesh(MeshLayout(1, 1, 4, 1, 1, 1), "cpu")
    except AssertionError as error:
        return "Layout" in str(error)
    return False


def test_a_layout_of_another_world_is_our_bug(ranks):
    assert ranks.run(2, wrong_world) == [True, True]


def equal_parts(layout):
    """Names of this rank's meshes of more than one rank that a silent one equals."""
    real, silent = make_mesh(layout, "cpu"), make_silent_mesh(layout, "cpu")
    pairs = {"dense": (real.dense, silent.dense), "context": (real.context, silent.context)}
    pairs |= {axis: (real.dense[axis], silent.dense[axis]) for axis in ("pp", "replicate", "fsdp", "tp")}
    pairs |= {"fsdp": (real.fsdp, silent.fsdp)} | {
        axis: (real.expert[axis], silent.expert[axis]) for axis in ("expert_fsdp", "expert") if real.expert is not None
    }
    return [name for name, (one, other) in pairs.items() if one is not None and one.size() > 1 and one == other]


@pytest.mark.parametrize(
    "layout",
    [
        MeshLayout(1, 1, 2, 1, 1, 1),
        MeshLayout(1, 2, 2, 1, 1, 2),
        MeshLayout(2, 1, 1, 1, 2, 1),
        MeshLayout(1, 1, 2, 2, 1, 1),
    ],
)
def test_no_part_of_a_silent_mesh_is_taken_for_the_real_one(ranks, layout):
    """DTensor's caches hold a mesh, and are looked up by equality."""
    assert ranks.run(layout.world, equal_parts, layout) == [[]] * layout.world
