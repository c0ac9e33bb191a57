"""What NVML says of this host's GPUs, and what of it is bad. The library (nvidia-ml-py) is NVIDIA's; it is loaded where a driver
is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from windlass.doctor.diagnosis import Diagnosis
from windlass.hardware import Accelerator, fastest_policy, find_device
from windlass.supervise.gpu_health import GpuHealth, answer, decoded, read_health
from windlass.supervise.kernel_log import DriverFault

FACTOR: Final = {
    "fp16": "bf16 there is emulated and several times slower",
    "fp32": "it has no matrix units for 16 bits",
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML describes it; None, or nothing, for what this GPU has not."""

    index: int
    name: str
    capability: tuple[int, int]
    is_divided: bool = False
    """Whether MIG is on."""
    links: tuple[bool, ...] = ()
    """Whether each NVLink is active."""
    lanes: tuple[int, int] | None = None
    """PCIe lanes: those in use now, and the most that GPU and slot can use."""
    health: GpuHealth = field(default_factory=GpuHealth)
    pids: tuple[int, ...] = ()
    """Processes that compute on it."""


@dataclass(frozen=True)
class Driver:
    """`version`: the driver's own. `cuda`: the newest CUDA that it runs, as (major, minor)."""

    version: str
    cuda: tuple[int, int]


def read_gpus(nvml: Any) -> tuple[Driver, list[Gpu]]:
    """`nvml`: the module pynvml. Raises its NVMLError where the driver does not answer."""
    nvml.nvmlInit()
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = Driver(decoded(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))
        return driver, [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Gpu:
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    ask = partial(answer, nvml)
    lanes = ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, gpu), ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, gpu)
    links = [ask(nvml.nvmlDeviceGetNvLinkState, gpu, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
    divided = ask(nvml.nvmlDeviceGetMigMode, gpu)
    return Gpu(
        index,
        decoded(nvml.nvmlDeviceGetName(gpu)),
        tuple(nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
        is_divided=bool(divided and divided[0] == nvml.NVML_DEVICE_MIG_ENABLE),
        links=tuple(bool(state) for state in links if state is not None),
        lanes=None if None in lanes else lanes,
        health=read_health(nvml, gpu),
        pids=tuple(process.pid for process in ask(nvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()),
    )


def check_torch(has_device: bool, driver: Driver | None, torch_cuda: str | None) -> Iterator[Diagnosis]:
    """`torch_cuda`: the CUDA that torch was built for; None for a build without."""
    if torch_cuda is None:
        if has_device:
            yield Diagnosis(
                "torch-without-cuda",
                "this host has an NVIDIA GPU, and the installed torch was built for CPUs alone",
                "torch uses a GPU only if it was built for CUDA",
                "install the build for CUDA (on Linux: pip install torch, from the default index)",
            )
        return
    major = int(torch_cuda.partition(".")[0])
    if driver is not None and driver.cuda[0] < major:
        yield Diagnosis(
            "driver-too-old",
            f"driver {driver.version} runs CUDA {driver.cuda[0]}.{driver.cuda[1]}, and torch was built for {torch_cuda}",
            "a driver runs programs of its own major version of CUDA and of older ones",
            f"install a driver for CUDA {major}, or the build of torch for CUDA {driver.cuda[0]}",
        )


def check_gpus(gpus: Sequence[Gpu]) -> Iterator[Diagnosis]:
    """What is bad about each GPU, and about one beside the others."""
    for gpu in gpus:
        yield from _check_kind(gpu)
        yield from _check_links(gpu, max(len([link for link in other.links if link]) for other in gpus))
        yield from _check_health(gpu)
        if gpu.pids:
            yield Diagnosis(
                "gpu-in-use",
                f"GPU {gpu.index}: process {', '.join(map(str, gpu.pids))} computes on it",
                "a run counts on the whole memory and time of its GPUs",
                f"end it (ps -fp {gpu.pids[0]}), or leave this GPU out with CUDA_VISIBLE_DEVICES",
            )


def _check_kind(gpu: Gpu) -> Iterator[Diagnosis]:
    given = f"GPU {gpu.index} is {gpu.name}"
    if gpu.is_divided:
        yield Diagnosis(
            "gpu-divided",
            f"{given}, divided by MIG",
            "NCCL does not connect slices of one GPU, and the peak of a slice is not in windlass's table: MFU is n/a",
            f"train on one slice with one process, or turn MIG off (nvidia-smi -i {gpu.index} -mig 0)",
        )
    elif "Laptop GPU" in gpu.name:
        yield Diagnosis(
            "laptop-gpu",
            given,
            "a laptop's GPU has less power than the card of its name, and its clocks follow its heat: MFU is n/a",
            "expect less than the card's figures; train long runs elsewhere",
        )
    elif find_device(gpu.name) is None:
        yield Diagnosis(
            "gpu-unknown",
            f"{given}, which is not in windlass's table of peaks",
            "MFU needs the peak of the device; without it, it is n/a",
            "train all the same; to see MFU, add the device and its data sheet to src/windlass/hardware.py",
        )
    policy = fastest_policy([Accelerator(gpu.name, gpu.capability)])
    if policy != "bf16":
        yield Diagnosis(
            "no-bf16",
            f"{given}, compute capability {gpu.capability[0]}.{gpu.capability[1]}",
            f"matrix units have bf16 from capability 8.0 on; {FACTOR[policy]}",
            f"precision.policy=auto or {policy}",
        )


def _check_links(gpu: Gpu, most: int) -> Iterator[Diagnosis]:
    """`most`: active links of the GPU here that has most."""
    active = len([link for link in gpu.links if link])
    if active < most:
        down = [str(number) for number, link in enumerate(gpu.links) if not link]
        yield Diagnosis(
            "nvlink-down",
            f"GPU {gpu.index}: {active} NVLinks are active, {most} on another GPU of this host"
            + (f" (down: {', '.join(down)})" if down else ""),
            "all GPUs of a host have the same links: a collective is as fast as the slowest",
            "nvidia-smi nvlink -s; reset the GPU or reboot; on a host with NVSwitch look at nvidia-fabricmanager",
        )
    if gpu.lanes is not None and gpu.lanes[0] < gpu.lanes[1]:
        yield Diagnosis(
            "pcie-narrow",
            f"GPU {gpu.index}: PCIe runs with {gpu.lanes[0]} lanes of {gpu.lanes[1]}",
            "copies to and from the host, and collectives without NVLink, get slower in proportion",
            "see whether it stays so under load (nvidia-smi -q -d PCIE); then reseat the card or look at its riser",
        )


def _check_health(gpu: Gpu) -> Iterator[Diagnosis]:
    errors, faults = gpu.health.uncorrected, gpu.health.bad_rows
    if errors:
        faults = [f"{errors} memory errors since boot that ECC could not correct", *faults]
    if faults:
        yield Diagnosis(
            "gpu-memory",
            f"GPU {gpu.index}: {'; '.join(faults)}",
            "an uncorrected error ends the process that meets it; a row is replaced at a reset of the GPU",
            f"nvidia-smi --gpu-reset -i {gpu.index}, or reboot; if it comes back, have the card replaced",
        )
    if gpu.health.slowed:
        yield Diagnosis(
            "gpu-slowed",
            f"GPU {gpu.index} lowers its clocks: {', '.join(gpu.health.slowed)}",
            "all ranks wait for the slowest",
            "look at cooling, fans and power supply (nvidia-smi -q -d TEMPERATURE,POWER); leave the host out until then",
        )


def check_log(faults: Sequence[DriverFault]) -> Iterator[Diagnosis]:
    """The hardware's faults since boot, one per GPU and number; those of programs are no fault of the machine, and what a switch
    calls non-fatal it has fixed itself."""
    of_machine = {
        (fault.kind, fault.pci, fault.number): fault
        for fault in faults
        if not fault.is_of_program and not (fault.kind == "SXid" and fault.is_notice)
    }
    for fault in of_machine.values():
        times = sum(other[1:4] == fault[1:4] for other in faults)
        yield Diagnosis(
            "driver-fault",
            f"{fault.sentence}, {times} time{'s' * (times > 1)} since boot",
            "the driver reports faults of a GPU or a switch to the kernel's log; a run on it may fail again",
            "reset or reboot; if it comes back, leave this host out and have the hardware looked at",
        )
