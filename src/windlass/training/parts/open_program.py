"""The program and the optimizer of a run: the model laid out over the ranks, and what updates it."""

import shutil

import torch
from torch.utils._triton import has_triton

from windlass.config import RunConfig
from windlass.optim.elementwise import Storage
from windlass.optim.optimizer import Optimizer, make_optimizer
from windlass.optim.rules import Rules, frozen_names
from windlass.parallel.build import NO_HOOKS, BuildHooks, Fill, Parallelism, build_program
from windlass.parallel.invariants import check_optimizer
from windlass.parallel.mesh import Mesh, make_mesh
from windlass.parallel.program import Program
from windlass.precision.policy import Precision, precision_of
from windlass.runtime import Runtime
from windlass.training.start.model_plan import ModelPlan


def open_program(
    config: RunConfig,
    runtime: Runtime,
    plan: ModelPlan,
    fill: Fill,
    hooks: BuildHooks = NO_HOOKS,
    mesh: Mesh | None = None,
) -> tuple[Program, Optimizer]:
    """The model on all ranks, filled by `fill`, and its optimizer. Collective, but on a `mesh` that sends nothing."""
    mesh = mesh or make_mesh(config.parallel.layout(runtime.world), runtime.device.type)
    precision = precision_of(config.precision)
    architecture, adapter, rules, recompute = plan
    parallelism = Parallelism(config.parallel, precision, mesh, runtime.device)
    program = build_program(
        architecture, parallelism, fill, frozen_names(rules), recompute.kinds, hooks=hooks, adapter=adapter
    )
    return program, optimizer_of(config, program, rules, precision)


def optimizer_of(config: RunConfig, program: Program, rules: Rules, precision: Precision) -> Optimizer:
    """Made after sharding, which replaces every parameter; that it holds the program's own is checked."""
    storage = storage_of(config, precision, program.mesh.dense.device_type)
    optimizer = make_optimizer(program.records(), config.optim, rules, precision.compute, storage)
    check_optimizer(optimizer.param_groups, program.records())
    return optimizer


def can_compile(device_type: str) -> bool:
    """Whether a GPU's update may be compiled without being asked: operator by operator it moves up to 590 bytes per parameter,
    for 16 to 32. It needs Triton, a GPU that Triton knows, and the host's compiler, which builds its launchers."""
    return device_type == "cuda" and has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


def storage_of(config: RunConfig, precision: Precision, device_type: str) -> Storage:
    """How the optimizer stores. Updates that round to nothing are counted where they can: bf16 weights, to the nearest."""
    rounded = config.precision.is_rounded
    is_default = config.optim.kernel != "foreach" and not config.parallel.offload
    can_lose = precision.stored == torch.bfloat16 and not precision.is_stochastic
    return Storage(
        states=precision.states if rounded else None,
        stochastic=precision.is_stochastic,
        gradients=precision.gradients,
        seed=config.run.seed,
        compiled=config.parallel.compiles or (is_default and can_compile(device_type)),
        watch_every=config.report.every_steps if can_lose else 0,
    )
