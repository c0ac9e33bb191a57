"""What to say where a step of a run has run out of memory: what filled the device, and what each change to the recipe frees."""

from windlass.errors import UserError
from windlass.model.lora.adapter import adapter_of
from windlass.parallel.activations import Workload, count_kept
from windlass.precision.policy import precision_of
from windlass.training.run import Run
from windlass.training.sizing.out_of_memory import DeviceBytes, asked, device_bytes, remedies
from windlass.units import format_bytes


def out_of_memory(run: Run, error: BaseException) -> UserError:
    """What filled this rank's device in a step, and what each change to the recipe frees. Rank 0 logs it as an incident."""
    config, runtime = run.config, run.runtime
    is_plain_adapter = config.adapter.kind == "lora" and config.adapter.base == "plain"
    can_quantize = is_plain_adapter and run.architecture.num_experts == 0
    states = run.optimizer.state_tensors().values()
    held = device_bytes(run.program.records(), states, runtime.memory_bytes(), runtime.device, can_quantize)
    step = run.source.consumed // config.samples_per_step
    explained = UserError(
        f"rank {runtime.rank} ran out of memory on {runtime.device_name()} in step {step}{asked(error)}; of its peak of "
        f"{format_bytes(held.peak)}, {held}",
        "what a step holds at once fits into the memory of its device",
        "; ".join(_freeing(run, held)),
    )
    run.recorder.event("incident", step, what=explained.given, change=explained.change)
    return explained


def _freeing(run: Run, held: DeviceBytes) -> list[str]:
    config, device = run.config, run.runtime.device
    adapter = adapter_of(config.adapter, run.architecture)
    precision, shape_BT = precision_of(config.precision), (config.micro_batch, config.data.sequence_length)
    work = Workload(run.architecture, config.parallel, precision, device.type, shape_BT, adapter=adapter)
    return remedies(
        held,
        config.parallel,
        config.parallel.layout(run.runtime.world),
        count_kept(work),
        micro_batch=config.micro_batch,
        least=config.data.sequences_per_sample,
        can_adapt=config.adapter.kind == "none" and config.model.from_ is not None,
        can_offload=device.type == "cuda",
    )
