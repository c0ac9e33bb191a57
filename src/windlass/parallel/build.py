"""Applies the techniques in the one order in which they work. Lines whose position matters give the reason for it."""

import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import nn

from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.chunks import USUAL, Chunks
from windlass.model.head.head import Head
from windlass.model.head.loss import adds_wide
from windlass.model.lora.adapter import SCALES, Adapter, frozen_base
from windlass.model.lora.linear import Linear
from windlass.model.transformer import Decoder
from windlass.parallel.config import ParallelConfig
from windlass.parallel.context import apply_context
from windlass.parallel.ddp import OverlappedSums, keep_in
from windlass.parallel.expert import apply_expert
from windlass.parallel.fsdp import apply_fsdp
from windlass.parallel.invariants import check_dtypes, check_units
from windlass.parallel.mesh import Mesh
from windlass.parallel.pipeline import PipelineProgram
from windlass.parallel.program import Program, ShardedProgram
from windlass.parallel.recompute import apply_recompute
from windlass.parallel.stages import cut_stages
from windlass.parallel.tensor import apply_tensor, overlap_exchanges
from windlass.parallel.tie import EMBEDDING, HEAD
from windlass.precision.fp8 import apply_fp8
from windlass.precision.fp8_weights import keep_in_fp8
from windlass.precision.masters import apply_masters, fill_copies, has_masters
from windlass.precision.policy import Precision
from windlass.precision.sums import apply_sums

Fill = Callable[[dict[str, torch.Tensor]], None]
"""Writes the starting weights into named parameters (DTensors where sharded), in place."""


class Parallelism(NamedTuple):
    """What a model is laid out by, and where this rank's part of it goes."""

    config: ParallelConfig
    precision: Precision
    mesh: Mesh
    device: torch.device


def _unwatched(_part: Decoder) -> None:
    """Training watches nothing."""


@dataclass(frozen=True)
class BuildHooks:
    """What a proof asks for: other sizes of chunks, and a call with each part of the model that this rank holds, filled."""

    chunks: Chunks = USUAL
    watch: Callable[[Decoder], None] = _unwatched


NO_HOOKS: Final = BuildHooks()


def check_device(config: ParallelConfig, device_type: str) -> None:
    """What compiled blocks need of the device, found here and not in the middle of the first step. For CPU torch.compile builds
    C++."""
    if config.async_tp and device_type == "cpu":
        raise UserError(
            "parallel.async_tp=true on CPU ranks",
            "GPUs of one host read each other's memory for it (torch's symmetric memory); CPU ranks cannot",
            "remove parallel.async_tp",
        )
    if config.compiles and device_type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "parallel.compile=true on a machine without g++ or clang++",
            "torch.compile builds C++ for CPU",
            "install g++ (apt install g++), or set parallel.compile=false",
        )


def check_tensor_hosts(config: ParallelConfig, hosts: Sequence[str]) -> None:
    """Raises UserError where `async_tp` would reach over hosts. `hosts`: of every rank; each `tp` ranks in a row are a group."""
    groups = [set(hosts[first : first + config.tp]) for first in range(0, len(hosts), config.tp)]
    if config.async_tp and (spread := [sorted(group) for group in groups if len(group) > 1]):
        raise UserError(
            f"parallel.async_tp=true with parallel.tp={config.tp}, and tensor ranks on {' and '.join(spread[0])}",
            "tensor ranks read each other's memory for it, which GPUs of one host can",
            "remove parallel.async_tp, or use a parallel.tp that divides the ranks of a host",
        )


def freeze(model: Decoder, frozen: Collection[str]) -> None:
    """Parameters of these names get no gradient: none is computed, kept, or reduced. A tied head follows its embedding, on
    another pipeline stage too."""
    names = _with_mirror(frozen, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


def _with_mirror(names: Collection[str], model: Decoder) -> Collection[str]:
    return {*names, HEAD} if model.arch.tied and EMBEDDING in names else names


def store(part: Decoder, precision: Precision, base: Collection[str]) -> None:
    """On meta: what is trained in the dtype of the masters. The frozen base of an adapter has none, and is stored as it computes;
    NF4's codes and scales keep their dtypes."""
    in_compute = _with_mirror(base, part)
    for name, parameter in part.named_parameters():
        if parameter.is_floating_point() and not name.endswith(f".{SCALES}"):
            parameter.data = parameter.data.to(precision.compute if name in in_compute else precision.stored)


def build_program(
    architecture: Architecture,
    parallelism: Parallelism,
    fill: Fill,
    frozen: Collection[str] = (),
    recompute: Sequence[str] | None = None,
    hooks: BuildHooks = NO_HOOKS,
    adapter: Adapter | None = None,
) -> Program:
    """The decoder laid out over the mesh, holding the weights that `fill` wrote. Collective: all ranks call it alike.

    Each rank then keeps its own shard of the parameters and nothing else; no rank ever holds the whole model. `frozen`:
    names of parameters that are not trained, besides the base of an `adapter`. `recompute`: the kind of each block, where a
    budget chose (activations.py).
    """
    config, precision, mesh, device = parallelism
    stages = None if mesh.layout.pp == 1 else cut_stages(architecture, mesh.layout.pp, config.schedule)
    with torch.device("meta"):  # shapes only: a rank never builds what it does not keep
        if stages is None:
            parts = [Decoder(architecture, chunks=hooks.chunks, adapter=adapter)]
        else:
            parts = stages.parts(architecture, mesh.coordinate["pp"], hooks.chunks, adapter)
    base, masters = frozen_base(architecture, adapter), dict[str, nn.Parameter]()
    keeps_masters = has_masters(mesh.fsdp.size(), precision, config.zero_stage, config.offload)
    replicas = _sums_over_replicas(parallelism)
    for part in parts:
        store(part, replace(precision, stored=precision.compute) if keeps_masters else precision, base)
        _lay_out(part, parallelism, {*frozen, *base}, recompute, keeps_masters)
        slots = {} if replicas is None else replicas.fill(part, config.bucket_mib)  # parameters are final now
        if keeps_masters:
            masters |= apply_masters(part, precision, _with_mirror(base, part), config.compiles, slots)
            # a pipeline cannot (sums.py), and no bucket hears of what products add
            if stages is None and replicas is None and sums_in_products(precision, device):
                apply_sums(_linears(part), masters, precision.gradients)
        else:
            keep_in(slots, part)
    named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    fill({**named, **masters})
    fill_copies(named, masters)
    for part in parts:
        hooks.watch(part)
    program: Program
    if stages is not None:
        program = PipelineProgram(parts, stages, mesh, precision, config, base, masters)
    else:
        (model,) = parts
        bucket_mib = config.bucket_mib if config.zero_stage == 0 and mesh.layout.tp > 1 else None
        program = ShardedProgram(model, mesh, precision, config.zero_stage, replicas, bucket_mib, base, masters)
    _check(program, parts, config, precision)
    return program


def _sums_over_replicas(parallelism: Parallelism) -> OverlappedSums | None:
    """Where there are replicas whose sums can be sent in backward (ddp.py)."""
    config, precision, mesh, _ = parallelism
    is_whole = mesh.layout.tp == mesh.layout.pp == 1
    if config.zero_stage != 0 or not is_whole or mesh.loss_group.size() == 1:
        return None
    return OverlappedSums(mesh.loss_group, precision.gradients, precision.reduce)


def sums_in_products(precision: Precision, device: torch.device) -> bool:
    """Whether products can add gradients up where they are summed."""
    is_wide = precision.gradients != precision.compute
    return device.type == "cuda" and (not is_wide or adds_wide(device.type, precision.compute))


def _linears(part: Decoder) -> Iterator[tuple[str, Linear]]:
    """The linear layers of the blocks, by the names they have in the whole model."""
    return ((name, module) for name, module in part.named_modules() if isinstance(module, Linear))


def _check(program: Program, parts: Sequence[Decoder], config: ParallelConfig, precision: Precision) -> None:
    for part in parts:
        own = {id(parameter) for parameter in part.parameters()}
        records = [record for record in program.records() if id(record.tensor) in own]
        check_units(part, part.blocks, part.end, records, config.blocks_per_unit)
    check_dtypes(program.records(), precision)


def _lay_out(
    part: Decoder,
    parallelism: Parallelism,
    frozen: Collection[str],
    recompute: Sequence[str] | None,
    keeps_masters: bool,
) -> None:
    """The model, or one stage of it: from shapes to memory that waits for its weights."""
    config, precision, mesh, device = parallelism
    freeze(part, frozen)  # before all the rest: compile and FSDP2 ask which parameters need a gradient
    apply_expert(part, mesh)  # before tensor, which leaves no parameter whole
    # before recompute and compile, which take the forwards they find
    apply_tensor(part, part.blocks, mesh.dense["tp"])
    apply_context(part, mesh, config.context_kind)  # attention asks for it in every forward
    # likewise before recompute and compile: it replaces the products of a forward
    apply_fp8((module for _, module in _linears(part)), precision.scaling, device, config.offload, config.compiles)
    kinds = recompute or [config.recomputes] * part.arch.num_layers
    # before compile, which traces the forward it finds
    apply_recompute(part.blocks, [kinds[int(index)] for index in part.model.layers])
    if config.compiles:
        overlap_exchanges(mesh.dense["tp"], config.async_tp)
        for block in part.blocks:  # per block: one graph serves all; before sharding, so that hooks stay outside of it
            block.compile(fullgraph=True)
        if part.last and isinstance(part.lm_head, Head):  # not where its rows are cut over ranks
            on_gpu = device.type == "cuda"
            logits = part.chunks.compiled_head_logits_gpu if on_gpu else part.chunks.head_logits
            part.lm_head.compile_loss(logits, part.chunks.compiled_head_tokens)
    if config.zero_stage != 0 and not keeps_masters:
        apply_fsdp(part, part.blocks, part.end, mesh, precision, config)
    # after sharding: only the shards get memory, in the host's where they are offloaded
    part.to_empty(device=torch.device("cpu") if config.offload else device)
    part.tie()  # to_empty gives each name its own tensor
    if keeps_masters:
        keep_in_fp8(module for _, module in _linears(part))
