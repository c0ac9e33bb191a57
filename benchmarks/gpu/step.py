"""A training step on one GPU, timed: windlass's own program, optimizer, clip and schedule on synthetic tokens.

It is the loop of training/loop without what is around it (data, checkpoints, reports): the same calls in the same order. Two
things that are not windlass's can be put in, so that the ladder begins where people begin: variants.py.

Weights are normal numbers drawn on the device, since zeros draw less power; tokens are uniform over the vocabulary. The
first step (it compiles) and two more are not counted. A step ends at an event on the device; the median of the intervals is
the step's time, and nothing is read back in between. MFU is counted against the device's dense bf16 peak in three
conventions (model/flops.py); null where the peak is not known.
"""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import floor
import torch
import torch.distributed as dist
from primitives import reset_peak
from timed import Sensors
from torch import Tensor
from torch.distributed.tensor import DTensor
from variants import MultiTensorAdamW, make_dense, masked

from windlass.adapters.config import AdapterConfig
from windlass.data.batch_fields import Batch
from windlass.hardware import find_device
from windlass.model.architecture import Architecture
from windlass.model.config import ModelConfig
from windlass.model.flops import flops_per_token
from windlass.model.kernels import attention_kernel
from windlass.model.lora.adapter import CODES, SCALES, Adapter, adapter_of
from windlass.objectives.pretrain import Pretrain
from windlass.optim.clip import gradient_norm
from windlass.optim.config import OptimConfig
from windlass.optim.elementwise import Storage
from windlass.optim.optimizer import make_optimizer
from windlass.optim.schedule import learning_rate
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.program import ShardedProgram
from windlass.precision.config import POLICIES, PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.units import GIB

WARM_UP_STEPS = 2  # after the first, which compiles
MIN_STEPS, MAX_STEPS = 4, 30
NOT_COUNTABLE_MFU = 0.73  # of a whole step in bf16; above it the measurement is wrong (floor.py's LIMIT is under it)
SOURCES = (
    "benchmarks/gpu/step.py",
    "benchmarks/gpu/variants.py",
    "src/windlass/model",
    "src/windlass/parallel",
    "src/windlass/optim",
    "src/windlass/precision",
    "src/windlass/adapters",
)
TINY_MODEL = {
    "family": "smollm3",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Setup:
    """One step's settings. Its sequences are cut into micro-batches of `micro_batch`, which must divide them."""

    preset: str
    sequence_length: int
    sequences_per_step: int
    micro_batch: int
    recompute: str = "none"
    compile: bool = True
    kernel: str = "fused"
    policy: str = "bf16"
    states: str = "fp32"
    rounding: str | None = None
    loss: str = "chunked"
    attention: str = "causal"
    scaling: str | None = None
    """Of products in fp8."""
    gradients: str | None = None
    """What the gradients of micro-batches are added up in; None: fp32."""
    adapter: str | None = None
    """`lora` or `qlora` (the base in NF4): rank 16, on all linear layers. None: all parameters are trained."""
    layers: int | None = None
    """Fewer than the preset has, where all of them do not fit."""

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.sequence_length

    def architecture(self) -> Architecture:
        given = TINY_MODEL if self.preset == "tiny" else {"preset": self.preset}
        if self.layers is not None:
            given = given | {"num_hidden_layers": self.layers}
        return ModelConfig.model_validate(given).architecture()

    def factors(self, architecture: Architecture) -> Adapter | None:
        if self.adapter is None:
            return None
        base = "nf4" if self.adapter == "qlora" else "plain"
        return adapter_of(AdapterConfig(kind="lora", base=base), architecture)

    def work(self) -> floor.Work:
        """The same in the floor model's terms."""
        return floor.Work(
            self.sequence_length,
            self.tokens_per_step,
            self.micro_batch * self.sequence_length,
            self.recompute,
            self.compile,
            self.loss,
            self.kernel,
            "bf16" if self.policy == "fp8" else self.policy,  # of which the memory is asked
            self.states,
            self.attention,
            more_bytes=2 * (self.policy in ("bf16", "fp8")) - 2 * (self.gradients == "bf16"),
        )

    def precision(self) -> PrecisionConfig:
        own = POLICIES[self.policy][3]
        states = None if self.states == own else self.states
        given = {"states": states, "rounding": self.rounding, "scaling": self.scaling, "gradients": self.gradients}
        return PrecisionConfig.model_validate({"policy": self.policy} | given)

    def storage(self) -> Storage:
        """How the optimizer stores, compiled where the blocks are."""
        given = self.precision()
        precision = precision_of(given)
        states = precision.states if given.is_rounded else None
        return Storage(states, given.is_stochastic, compiled=self.compile, gradients=precision.gradients)


def measure_setup(setup: Setup, device: torch.device, seconds: float) -> dict[str, Any]:
    """Trains for about `seconds` after the warm-up. -> the figures, the floor's beside them."""
    architecture = setup.architecture()
    masking = masked(setup.sequence_length, device) if setup.attention == "masked" else contextlib.nullcontext()
    with one_rank(device), masking, Sensors(device) as sensors:
        start_s = time.monotonic()
        step = Step(setup, architecture, device)
        reset_peak(device)
        loss_first = float(step.run())
        first_step_s = time.monotonic() - start_s
        times = step.timed(seconds)
        loss_last = float(step.run())
    if not math.isfinite(loss_first) or not math.isfinite(loss_last):
        raise ValueError(f"the loss is {loss_first}, then {loss_last}")
    step_s = statistics.median(times)
    return {
        "setup": asdict(setup),
        "attention_kernel": kernel_of(setup, architecture, device),
        "tokens_per_s": round(setup.tokens_per_step / step_s, 1),
        "step_ms": round(step_s * 1e3, 2),
        "steps": len(times),
        "slowest_ms": round(max(times) * 1e3, 2),
        "host_ms": round(step.host_s * 1e3, 2),
        "build_and_first_step_s": round(first_step_s, 1),
        "loss": [round(loss_first, 4), round(loss_last, 4)],
        **memory_peak(device),
        **judged(setup, architecture, setup.tokens_per_step / step_s, device),
        "sensors": sensors.medians(),
    }


def kernel_of(setup: Setup, architecture: Architecture, device: torch.device) -> str:
    """In words, by asking torch for the same attention once more."""
    if setup.attention == "masked":
        return "with a dense mask"
    rows, length = setup.micro_batch, setup.sequence_length
    return attention_kernel(architecture, rows=rows, length=length, dtype=torch.bfloat16, device=device)


def judged(setup: Setup, architecture: Architecture, tokens_per_s: float, device: torch.device) -> dict[str, Any]:
    """MFU in three conventions, and what the floor model says of this device; nulls where its peak is not known, and for an
    adapter."""
    flops = flops_per_token(architecture, setup.sequence_length)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    known = find_device(name) if setup.adapter is None else None  # both count gradients of all weights
    found: dict[str, Any] = {"tflops_causal": round(flops.causal * tokens_per_s / 1e12, 2)}
    for convention in ("causal", "palm", "six_n"):
        mfu = getattr(flops, convention) * tokens_per_s / known.peak_flops if known else None
        found[f"mfu_{convention}"] = round(mfu, 4) if mfu is not None else None
    for words, rates in (("practical", floor.PRACTICAL), ("limit", floor.LIMIT)):
        is_counted = known is not None and not architecture.num_experts and setup.policy != "fp8"
        should = floor.tokens_per_s(architecture, setup.work(), floor.on(known, rates)) if is_counted else None
        found[f"floor_{words}_tokens_per_s"] = round(should, 1) if should else None
    practical = found["floor_practical_tokens_per_s"]
    found["over_practical"] = round(tokens_per_s / practical - 1, 4) if practical else None
    if known and found["mfu_causal"] > NOT_COUNTABLE_MFU * (2 if setup.policy == "fp8" else 1):
        found["mark"] = f"measuring error? {100 * found['mfu_causal']:.0f} % MFU of a whole step cannot be"
    return found


class Step:
    """A built model with its optimizer, and batches that stay on the device."""

    def __init__(self, setup: Setup, architecture: Architecture, device: torch.device):
        assert setup.sequences_per_step % setup.micro_batch == 0, setup
        parallel = ParallelConfig(recompute=setup.recompute, compile=setup.compile)
        mesh = make_mesh(parallel.layout(1), device.type)
        precision = precision_of(setup.precision())
        adapter = setup.factors(architecture)
        parallelism = Parallelism(parallel, precision, mesh, device)
        program = build_program(architecture, parallelism, fill, adapter=adapter)
        assert isinstance(program, ShardedProgram)
        self.program = program
        if setup.loss == "dense":
            make_dense(self.program.model)
        self._config = OptimConfig(warmup_steps=5)
        records = self.program.records()
        if setup.kernel == "foreach":
            self._optimizer: Any = MultiTensorAdamW(records, self._config)
        else:
            self._optimizer = make_optimizer(records, self._config, storage=setup.storage())
        self._objective, self._device, self._steps = Pretrain(), device, 0
        self._batches = synthetic(setup, architecture.vocab_size, device)
        self.host_s = 0.0

    def backward(self) -> Tensor:
        """Forward and backward of a step's micro-batches. -> the loss, on the device."""
        batches, count = self._objective.weigh(self._batches, self.program)
        return self.program.run(batches, count)

    def run(self) -> Tensor:
        """One step, as training/loop makes it. -> the loss, on the device."""
        self._optimizer.set_learning_rate(learning_rate(self._steps, 1000, self._config))
        loss = self.backward()
        norm = gradient_norm(self.program.records(), self.program.mesh.pp_group)
        self._optimizer.step(norm)
        self.program.adapt(norm)
        self._steps += 1
        return loss

    def timed(self, seconds: float) -> list[float]:
        """Seconds per step, over as many as fill `seconds`. `host_s`: what the host needed to issue one."""
        self._interval(WARM_UP_STEPS - 1)
        (once_s,) = self._interval(1)
        return self._interval(min(MAX_STEPS, max(MIN_STEPS, int(seconds / once_s))))

    def _interval(self, steps: int) -> list[float]:
        if self._device.type == "cuda":
            ends = [_recorded()]
            start_s = time.perf_counter()
            for _ in range(steps):
                self.run()
                ends.append(_recorded())
            self.host_s = (time.perf_counter() - start_s) / max(1, steps)
            torch.cuda.synchronize()
            return [one.elapsed_time(two) / 1000 for one, two in itertools.pairwise(ends)]
        found = []
        for _ in range(steps):
            start_s = time.perf_counter()
            self.run()
            found.append(time.perf_counter() - start_s)
        self.host_s = statistics.median(found) if found else 0.0
        return found


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@torch.no_grad()
def fill(named: dict[str, Tensor]) -> None:
    """Norms 1, biases 0, matrices N(0, 0.02), drawn in place; in NF4 any codes, of about that size."""
    generator: torch.Generator | None = None
    for name, parameter in named.items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith(".bias"):
            local.zero_()
        elif name.endswith(f".{CODES}"):
            local.random_(0, 256)
        elif name.endswith(f".{SCALES}"):
            local.fill_(0.04)
        elif local.dim() < 2:
            local.fill_(1.0)
        else:
            generator = generator or torch.Generator(local.device).manual_seed(17)
            local.normal_(0.0, 0.02, generator=generator)


def synthetic(setup: Setup, vocab_size: int, device: torch.device) -> list[Batch]:
    """The micro-batches of one step: uniform tokens, targets shifted by one."""
    generator = torch.Generator(device).manual_seed(17)
    sizes = (setup.sequences_per_step, setup.sequence_length + 1)
    ids = torch.randint(0, vocab_size, sizes, generator=generator, device=device)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    starts = range(0, setup.sequences_per_step, setup.micro_batch)
    cuts = [slice(start, start + setup.micro_batch) for start in starts]
    return [{"input_ids": inputs[cut], "targets": targets[cut]} for cut in cuts]


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A world of one process, for the mesh."""
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def memory_of(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else math.inf


def memory_peak(device: torch.device) -> dict[str, float | None]:
    """The peak of the steps: what tensors held, and what the allocator held for them."""
    if device.type != "cuda":
        return {"allocated_gib": None, "reserved_gib": None}
    return {
        "allocated_gib": round(torch.cuda.max_memory_allocated(device) / GIB, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved(device) / GIB, 2),
    }
