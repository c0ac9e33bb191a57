"""The techniques, applied in their one order. Each line below has a reason to stand where it stands."""

import shutil
from collections.abc import Callable

import torch

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.transformer import Decoder
from windlass.parallel.census import check_dtypes, check_units
from windlass.parallel.config import ParallelConfig
from windlass.parallel.ddp import apply_ddp
from windlass.parallel.fsdp import apply_fsdp
from windlass.parallel.mesh import Mesh
from windlass.parallel.precision import Precision
from windlass.parallel.program import ShardedProgram
from windlass.parallel.recompute import apply_recompute

Fill = Callable[[dict[str, torch.Tensor]], None]
"""Writes the starting weights into named parameters (DTensors where sharded), in place."""


def check_compiler(config: ParallelConfig, device_type: str) -> None:
    """torch.compile builds C++ for CPU: a missing compiler is found here, and not in the middle of the first step."""
    if config.compile and device_type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "parallel.compile=true on a machine without g++ or clang++",
            "torch.compile builds C++ for CPU",
            "install g++ (apt install g++), or set parallel.compile=false",
        )


def build_program(
    architecture: Architecture,
    config: ParallelConfig,
    precision: Precision,
    mesh: Mesh,
    device: torch.device,
    fill: Fill,
) -> ShardedProgram:
    """The decoder laid out over `mesh`, holding the weights that `fill` wrote. Collective: all ranks call it alike.

    Kept per rank afterwards: its own shard of the parameters and nothing else; the whole model exists on no rank.
    """
    with torch.device("meta"):  # shapes only: a rank never builds what it does not keep
        model = Decoder(architecture).to(precision.stored)
    apply_recompute(model.blocks, config.recompute)  # before compile, which traces the forward it finds
    if config.compile:
        for block in model.blocks:  # per block: one graph serves all; before sharding, so that hooks stay outside of it
            block.compile(fullgraph=True)
    if config.zero != 0:
        apply_fsdp(model, model.blocks, mesh, precision, config.zero)
    model.to_empty(device=device)  # after sharding: only the shards get memory
    model.tie()  # to_empty gives each name its own tensor
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    fill(named)
    caller = apply_ddp(model, mesh, device) if config.zero == 0 else model  # after filling: it copies nothing later
    program = ShardedProgram(model, caller, mesh, precision, config.zero)
    check_units(model, model.blocks, program.records())
    check_dtypes(program.records(), precision.stored)
    return program
