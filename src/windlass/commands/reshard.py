"""A checkpoint written once more, in the pieces of another layout: which rank holds what, and the bytes moved there.

Which box of which tensor each rank holds is asked of the program itself and not derived a second time: it is built as those ranks
would build it, on the meta device (shapes only) and over torch's `fake` process group, in which one process acts as any rank
and nothing is sent. One build per pipeline rank shows all others, since a DTensor knows its cut at every coordinate of its mesh.
Optimizer states are cut as their parameters are. Replicas hold the same, so one of them is asked, and written for.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.distributed.tensor import DTensor

from windlass.checkpoint.grid import Box, RankPart
from windlass.checkpoint.index import SavedTensor, read_tensor_index
from windlass.checkpoint.manifest import step_name
from windlass.checkpoint.reshard import reshard
from windlass.checkpoint.verify import Checkpoint
from windlass.config import RunConfig, check_recipe
from windlass.errors import UserError, raise_all
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.lora.adapter import adapter_of
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import MeshLayout, ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.rules.check_layout import OtherSettings, check_layout
from windlass.parallel.rules.pipeline import schedule_errors
from windlass.precision.policy import precision_of
from windlass.ranks.owned_part import ranges_at
from windlass.training.run_directory import hold
from windlass.training.start.open_saved import find_checkpoint, read_trainer_state
from windlass.training.start.restore import nothing
from windlass.units import format_bytes


def move(
    path: Path, target: Path, settings: Mapping[str, Any], *, num_ranks: int | None = None, step: int | None = None
) -> Iterator[str]:
    """Writes the checkpoint that `path` and `step` name into the run directory `target`, as ranks of the layout in `settings` (a
    recipe's section parallel) would have. -> sentences. Raises UserError before it writes, BadCheckpoint at a bad byte."""
    source = find_checkpoint(path, step)
    trainer_state, checkpoint = read_trainer_state(source), Checkpoint.open(source)
    where = target / "checkpoints" / step_name(checkpoint.manifest.step)
    if where.exists():
        raise UserError(
            f"{where} is committed already",
            "a committed checkpoint is never overwritten",
            "choose another TARGET, or another --step",
        )
    if num_ranks is None:
        check_that_ranks_are_counted(settings)
    config = config_with(trainer_state, settings)
    layout, architecture = layout_of(config, num_ranks), architecture_from_hf(trainer_state["model"])
    is_nf4 = config.adapter.base == "nf4"
    adds_in_bf16 = config.precision.gradients == "bf16"
    others = OtherSettings(config.precision.policy, config.optim.kind, is_nf4=is_nf4, adds_in_bf16=adds_in_bf16)
    check_layout(config.parallel, architecture, layout.world, others)
    parts = rank_parts(read_tensor_index(checkpoint), held_by_ranks(config, architecture, layout))
    files = len({part.rank for held in parts.values() for part in held})
    yield f"{source}: {len(parts)} tensors of {checkpoint.manifest.world} ranks, for {layout.world} ranks: {_axes(layout)}"
    start_s = time.monotonic()
    with _held(target):
        manifest = reshard(source, where.parent, parts, layout.world)
    elapsed_s = time.monotonic() - start_s
    size, rate = format_bytes(manifest.num_bytes), format_bytes(int(manifest.num_bytes / max(elapsed_s, 1e-9)))
    yield f"{where}: {size} in {files} files, every byte verified on the way in and hashed on the way out, {rate}/s"


def config_with(trainer_state: Mapping[str, Any], settings: Mapping[str, Any]) -> RunConfig:
    """The recipe that made a checkpoint, in the layout of `settings` and nothing of its own."""
    if others := [key for key in settings if key != "parallel"]:
        raise UserError(
            f"settings of {', '.join(others)}",
            "a reshard moves bytes between the files of ranks and changes nothing else",
            "give settings of parallel only: parallel.tp=2 parallel.shard=4",
        )
    given, length = settings.get("parallel", {}), trainer_state["config"]["data"]["sequence_length"]
    with contextlib.suppress(ValidationError):  # which check_recipe says in a sentence
        parallel = ParallelConfig.model_validate(given)
        fixed = OtherSettings(sequence_length=length, is_length_fixed=True)
        check_layout(parallel, architecture_from_hf(trainer_state["model"]), None, fixed)
    return check_recipe({**trainer_state["config"], "parallel": given})


def check_that_ranks_are_counted(settings: Mapping[str, Any]) -> None:
    """Raises UserError where an axis is to take the ranks that are left: nobody says of how many."""
    parallel = settings.get("parallel")
    for axis in ("replicate", "shard"):
        if isinstance(parallel, Mapping) and parallel.get(axis) == -1:
            raise UserError(
                f"parallel.{axis}=-1 without --ranks",
                "-1 is what the other axes leave of the ranks, and a checkpoint is written for a number of them",
                f"add --ranks N, or give the size: parallel.{axis}=4",
            )


def layout_of(config: RunConfig, num_ranks: int | None) -> MeshLayout:
    """`num_ranks` None: as many as the sizes that are given multiply to."""
    parallel = config.parallel
    given = max(parallel.replicate, 1) * max(parallel.shard, 1)
    layout = parallel.layout(num_ranks or parallel.pp * parallel.context * parallel.tp * given)
    raise_all(schedule_errors(parallel.schedule, layout.pp))
    return layout


class CutParameter(NamedTuple):
    """How a parameter is cut: its shape, and its parts, each with the first rank that holds it."""

    shape: list[int]
    parts: list[RankPart]


def held_by_ranks(config: RunConfig, architecture: Architecture, layout: MeshLayout) -> dict[str, CutParameter]:
    """Parameter name -> how `layout` cuts it. One process, shapes only. Raises UserError where the model cannot be cut so."""
    assert not dist.is_initialized(), "this process acts as other ranks"
    # none of these changes which rank holds what: the first would allocate, the others do nothing on shapes
    plain = {"offload": False, "compile": False, "recompute": "none", "activation_gib": None}
    parallel, precision = config.parallel.changed(**plain), precision_of(config.precision)
    lean, held = replace(layout, replicate=1), {}
    per_stage = lean.world // lean.pp
    for stage in range(lean.pp):
        own_rank = stage * per_stage
        others = own_rank * (layout.replicate - 1)  # ranks of replicas that come before this stage's
        dist.init_process_group("fake", rank=own_rank, world_size=lean.world)
        try:
            parallelism = Parallelism(parallel, precision, make_mesh(lean, "cpu"), torch.device("meta"))
            adapter = adapter_of(config.adapter, architecture)
            program = build_program(architecture, parallelism, nothing, adapter=adapter)
            for record in program.records():
                parts = [RankPart(rank + others, box) for rank, box in _boxes(record.tensor, own_rank)]
                held[record.name] = CutParameter(list(record.logical_shape), parts)
        finally:
            dist.destroy_process_group()
    return held


def _boxes(parameter: torch.Tensor, own_rank: int) -> list[tuple[int, Box]]:
    """(rank, box) of every part that is not empty, each once, with the lowest rank that holds it."""
    if not isinstance(parameter, DTensor):
        return [(own_rank, Box((0,) * parameter.dim(), tuple(parameter.shape)))]
    found: dict[Box, int] = {}
    for coordinate in itertools.product(*map(range, parameter.device_mesh.shape)):
        ranges = ranges_at(parameter, coordinate)
        box = Box(tuple(part.start for part in ranges), tuple(map(len, ranges)))
        rank = int(parameter.device_mesh.mesh[coordinate])
        if box.num_elements:
            found[box] = min(rank, found.get(box, rank))
    return sorted((rank, box) for box, rank in found.items())


def rank_parts(tensors: Mapping[str, SavedTensor], held: Mapping[str, CutParameter]) -> dict[str, list[RankPart]]:
    """The parts of every saved tensor: of parameters and of states of their shape as the parameters', of the rest whole."""
    parts = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        own = held.get(rest if kind == "model" else rest.rpartition(".")[0])
        whole = RankPart(own.parts[0].rank if own else 0, tensor.whole)
        parts[name] = own.parts if own and own.shape == list(tensor.shape) else [whole]
    return parts


def _axes(layout: MeshLayout) -> str:
    sizes = vars(layout)
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one"


def _held(target: Path) -> Any:
    """The lock of a run directory, so that no run trains there meanwhile. Raises UserError."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        return hold(target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written to: {error.strerror}",
            "the target is a run directory that no process uses, and it is created if it does not exist",
            "choose another TARGET, or stop the run that uses it",
        ) from error
