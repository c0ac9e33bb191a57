"""One size tried for real before step 0: does a step of it fit into the device?

The trial is of a copy: the model of the run in the run's layout, filled with zeros, and its optimizer. The copy does one step of
two micro-batches, so that its peak meets gradients that are there and states that are there, and is dropped. The run's own model
is not built yet: its parameters, optimizer, data position and random numbers cannot know of it.

No rank waits for another in a trial. A rank that runs out of memory leaves in the middle of a step, and the others would wait for
it in the next collective; so the groups of the copy's mesh send nothing. What the copy computes is meaningless then, and what it
allocates is not. After each trial all ranks agree: a size fits where it fits on every one of them.

Not in the trial: what NCCL allocates for itself, and the batches of validation, which keep nothing for a backward.
"""

import gc

import torch

from windlass.config import RunConfig
from windlass.data.batch_fields import Batch
from windlass.optim.clip import gradient_norm
from windlass.parallel.mesh import Mesh
from windlass.plan.sizes import StepSize
from windlass.runtime import Runtime
from windlass.training.parts.device_memory import Room
from windlass.training.parts.open_program import open_program
from windlass.training.sizing.out_of_memory import is_out_of_memory
from windlass.training.start.model_plan import ModelPlan


def step_fits(config: RunConfig, runtime: Runtime, plan: ModelPlan, mesh: Mesh, size: StepSize, room: Room) -> bool:
    """Whether a step of `config`, whose sizes are `size`, fits on every rank. Collective only in its agreement at the end."""
    _clean(config, runtime)
    try:
        _step(config, runtime, plan, mesh)
        is_fitting = room.peak(size) <= room.limit_bytes
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        is_fitting = False
    _clean(config, runtime)
    return all(runtime.gathered(is_fitting))


def _step(config: RunConfig, runtime: Runtime, plan: ModelPlan, mesh: Mesh) -> None:
    program, optimizer = open_program(config, runtime, plan, _zeros, mesh=mesh)
    optimizer.state_tensors()  # AdamW makes them here, where a run has them from a restore
    num = min(2, config.accumulation(mesh.layout.batch_ranks))
    batch = _batch(config, plan, runtime.device)
    count = torch.tensor(batch["targets"].numel() * num * mesh.layout.batch_ranks, device=runtime.device)
    program.run([batch] * num, count)
    optimizer.step(gradient_norm(program.records(), mesh.pp_group))


@torch.no_grad()
def _zeros(named: dict[str, torch.Tensor]) -> None:
    for tensor in named.values():
        tensor.zero_()


def _batch(config: RunConfig, plan: ModelPlan, device: torch.device) -> Batch:
    """A micro-batch of one token. Where documents are isolated each row is one, which has the most scores."""
    shape_BT = (config.micro_batch, config.data.sequence_length)
    names = ["input_ids", "targets"]
    batch = {name: torch.zeros(shape_BT, dtype=torch.int64, device=device) for name in names}
    if plan.architecture.dropout:
        batch["keys"] = torch.zeros(shape_BT[0], dtype=torch.int64, device=device)
    if config.data.isolate:
        batch["documents"] = torch.zeros((shape_BT[0], 1), dtype=torch.int64, device=device)
    return batch


def _clean(config: RunConfig, runtime: Runtime) -> None:
    """Nothing of a trial is left: what points to itself, memory that the allocator holds, the peak; and graphs of other sizes,
    after which torch would compile the next for any size."""
    gc.collect()
    if config.parallel.compiles or runtime.device.type == "cuda":
        torch.compiler.reset()
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(runtime.device)
