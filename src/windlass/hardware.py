"""Devices by the name torch reports: peak FLOP/s, memory, bandwidth, and the data sheet each figure comes from.

The peak is the dense matrix rate in bf16 with fp32 accumulation, because that is what training runs. Data sheets often
print twice that ("with sparsity"), and for GeForce cards also twice that again (fp16 accumulation): an MFU against such
a figure, or against a default for an unknown card, is wrong by that factor. A name therefore matches as a whole
("... Laptop GPU" and a MIG slice are other devices), and an unknown name gives None: the MFU is then n/a.

Of the host: its processor's name, the control groups that this process is in, which limit a container or a job of SLURM, and
how busy it is.
"""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal, NamedTuple

from windlass.units import GIB

TERA: Final = 1e12
BF16_SINCE: Final = (8, 0)  # Ampere: CUDA C++ Programming Guide, "Compute Capabilities", tensor core data types
FP8_SINCE: Final = (8, 9)  # Ada: the same table
FP16_SINCE: Final = (7, 0)  # Volta, the first tensor cores: the same table
FP16_GAIN: Final = 8  # of their fp16 cores over fp32, data sheets: T4 65 / 8.1 TFLOP/s, V100 SXM2 125 / 15.7


class Accelerator(NamedTuple):
    """What torch says of a rank's device. `capability`: CUDA's compute capability; None for a CPU."""

    name: str
    capability: tuple[int, int] | None

    @property
    def lacks_bf16(self) -> bool:
        """A GPU whose matrix units have no bf16."""
        return self.capability is not None and self.capability < BF16_SINCE

    @property
    def lacks_fp8(self) -> bool:
        """A GPU whose matrix units have no fp8."""
        return self.capability is not None and self.capability < FP8_SINCE


def fastest_policy(devices: Sequence[Accelerator]) -> Literal["bf16", "fp16", "fp32"]:
    """The mixed precision that the matrix units of all `devices` have; fp32 where one has none, and on CPUs."""
    lowest = min((device.capability or (0, 0) for device in devices), default=(0, 0))
    return "bf16" if lowest >= BF16_SINCE else "fp16" if lowest >= FP16_SINCE else "fp32"


@dataclass(frozen=True)
class Device:
    """One kind of GPU. `pattern` must match the whole of `torch.cuda.get_device_name()`."""

    name: str
    pattern: str
    peak_flops: float
    """Dense bf16 matrix FLOP/s with fp32 accumulation; fp16 where `peak_dtype` is fp16."""
    fp8_flops: float | None
    """Dense fp8 matrix FLOP/s with fp32 accumulation; None where the device has no fp8."""
    memory_bytes: int
    """Memory as it is sold, and NVIDIA's GB are GiB; programs see 1 to 3 % less."""
    bandwidth: float
    """Bytes per second between the device's memory and its cores."""
    source: str
    peak_dtype: str = "bf16"


def _device(
    name: str, pattern: str, peak: float, fp8: float | None, gib: int, gb_per_s: float, source: str, dtype: str = "bf16"
) -> Device:
    fp8_flops = None if fp8 is None else fp8 * TERA
    return Device(name, pattern, peak * TERA, fp8_flops, gib * GIB, gb_per_s * 1e9, source, dtype)


_BLACKWELL = "NVIDIA Blackwell data sheet (GB200 NVL72, HGX B200): sparse figures, halved"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet: sparse figures, halved"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet: sparse figures, halved"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A: fp16/bf16 with fp32 accumulate"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, appendix A: with fp32 accumulate"
_GB202 = "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A: with fp32 accumulate"
_VOLTA = "NVIDIA V100 Tensor Core GPU data sheet; Volta has no bf16 cores"
_CDNA3 = "AMD Instinct MI300X and MI325X data sheets: figures without sparsity"

# name, pattern, dense bf16 TFLOP/s, dense fp8 TFLOP/s, memory GiB, GB/s, source
DEVICES: Final = (
    _device("B200", r"NVIDIA B200", 2250, 4500, 180, 7700, _BLACKWELL),
    _device("GB200", r"NVIDIA GB200", 2500, 5000, 186, 8000, _BLACKWELL),
    _device("H200", r"NVIDIA H200", 989.4, 1978.9, 141, 4800, _H200),
    _device("H200 NVL", r"NVIDIA H200 NVL", 835.5, 1670.5, 141, 4800, _H200),
    _device("H100 SXM", r"NVIDIA H100 80GB HBM3", 989.4, 1978.9, 80, 3350, _HOPPER),
    _device("H100 PCIe", r"NVIDIA H100 PCIe", 756.5, 1513, 80, 2000, _HOPPER),
    _device("H100 NVL", r"NVIDIA H100 NVL", 835.5, 1670.5, 94, 3900, _HOPPER),
    _device("GH200", r"NVIDIA GH200 480GB", 989.4, 1978.9, 96, 4000, "NVIDIA GH200 Superchip data sheet: halved"),
    _device("GH200 144GB", r"NVIDIA GH200 144G HBM3e", 989.4, 1978.9, 144, 4900, "NVIDIA GH200 data sheet: halved"),
    _device("A100 80GB SXM", r"NVIDIA A100-SXM4-80GB", 312, None, 80, 2039, _A100),
    _device("A100 40GB SXM", r"(NVIDIA )?A100-SXM4-40GB", 312, None, 40, 1555, _A100),
    _device("A100 80GB PCIe", r"NVIDIA A100 80GB PCIe", 312, None, 80, 1935, _A100),
    _device("A100 40GB PCIe", r"(NVIDIA )?A100-(PCIE|PCIe)-40GB", 312, None, 40, 1555, _A100),
    _device("A30", r"NVIDIA A30", 165, None, 24, 933, "NVIDIA A30 data sheet"),
    _device("A40", r"NVIDIA A40", 149.7, None, 48, 696, "NVIDIA A40 data sheet"),
    _device("A10", r"NVIDIA A10", 125, None, 24, 600, "NVIDIA A10 data sheet"),
    _device("A10G", r"NVIDIA A10G", 70, None, 24, 600, "NVIDIA A10G data sheet"),
    _device("L4", r"NVIDIA L4", 121, 242.5, 24, 300, "NVIDIA L4 data sheet: sparse figures, halved"),
    _device("L40", r"NVIDIA L40", 181.05, 362, 48, 864, "NVIDIA L40 data sheet"),
    _device("L40S", r"NVIDIA L40S", 362.05, 733, 48, 864, "NVIDIA L40S data sheet"),
    _device(
        "RTX 6000 Ada", r"NVIDIA RTX 6000 Ada Generation", 364.25, 728.5, 48, 960, "its data sheet: 1457 fp8 sparse"
    ),
    _device("RTX A6000", r"(NVIDIA )?RTX A6000", 154.85, None, 48, 768, "NVIDIA RTX A6000 data sheet: 309.7 sparse"),
    _device("V100 SXM2 16GB", r"Tesla V100-SXM2-16GB", 125, None, 16, 900, _VOLTA, "fp16"),
    _device("V100 SXM2 32GB", r"Tesla V100-SXM2-32GB", 125, None, 32, 900, _VOLTA, "fp16"),
    _device("V100 PCIe 16GB", r"Tesla V100-PCIE-16GB", 112, None, 16, 900, _VOLTA, "fp16"),
    _device("V100 PCIe 32GB", r"Tesla V100-PCIE-32GB", 112, None, 32, 900, _VOLTA, "fp16"),
    _device("T4", r"(Tesla|NVIDIA) T4", 65, None, 16, 320, "NVIDIA T4 data sheet; Turing has no bf16 cores", "fp16"),
    _device("RTX 3090", r"NVIDIA GeForce RTX 3090", 71, None, 24, 936, _GA102),
    _device("RTX 4080", r"NVIDIA GeForce RTX 4080", 97.5, 194.9, 16, 716.8, _ADA),
    _device("RTX 4090", r"NVIDIA GeForce RTX 4090", 165.2, 330.3, 24, 1008, _ADA),
    _device("RTX 5080", r"NVIDIA GeForce RTX 5080", 112.6, 225.1, 16, 960, _GB202),
    _device("RTX 5090", r"NVIDIA GeForce RTX 5090", 209.5, 419, 32, 1792, _GB202),
    _device("MI300X", r"AMD Instinct MI300X", 1307.4, 2614.9, 192, 5300, _CDNA3),
    _device("MI325X", r"AMD Instinct MI325X", 1307.4, 2614.9, 256, 6000, _CDNA3),
)


def find_device(name: str) -> Device | None:
    """The device of this name, as torch.cuda.get_device_name() gives it; None for a CPU and for any unknown device."""
    return next((device for device in DEVICES if re.fullmatch(device.pattern, name)), None)


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name where Linux gives it, with family and model, since a virtual machine's name may be "AMD EPYC" for
    each of them; else its kind."""
    info = root / "proc/cpuinfo"
    lines = [line.partition(":") for line in info.read_text().splitlines()] if info.exists() else []
    given = {key.strip(): value.strip() for key, _, value in reversed(lines)}  # of the first processor
    if "model name" not in given:
        return platform.processor() or platform.machine()
    numbers = [
        f"{key} {given[f'{prefix}{key}']}"
        for prefix, key in (("cpu ", "family"), ("", "model"))
        if f"{prefix}{key}" in given
    ]
    return given["model name"] + (f" ({', '.join(numbers)})" if numbers else "")


def own_groups(root: Path = Path("/"), controller: str = "") -> list[Path]:
    """Folders of this process's control group and of those around it, innermost first; empty where there is none. `controller`:
    of cgroup version 1, such as memory; empty for version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:  # hierarchy:controllers:path, without controllers in version 2
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            return [root / "sys/fs/cgroup" / controller / one for one in (group, *group.parents)]
    return []


def read_load() -> float | None:
    """Threads of this host that compute or wait for a core, over the last minute; None where the kernel does not say it."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
