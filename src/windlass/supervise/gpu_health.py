"""What NVML says of the health of this host's GPUs: memory errors, rows to be replaced, clocks that are lowered.

Read once when ranks start and again when one dies: what is new in between, beside the kernel's log, is named as what happened on
the host then. In most containers that log may not be read; NVML's events report Xids there. The library (nvidia-ml-py) is
NVIDIA's; it is loaded where a driver is.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from windlass.supervise.kernel_log import DriverFault

DEVICE: Final = Path("/dev/nvidiactl")
"""Where a driver is."""
SLOWED: Final = {
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "too hot (hardware)",
    "HwPowerBrakeSlowdown": "power brake",
    "SwThermalSlowdown": "too hot (driver)",
}
"""NVML's reasons for lower clocks that are no part of normal work; a power cap under load is."""
ROWS: Final = ("a row of memory waits to be replaced", "replacing a row of memory failed")


@dataclass(frozen=True)
class GpuHealth:
    """The health of one GPU; a field is None, or empty, where the GPU does not report it."""

    uncorrected: int | None = None
    """Memory errors since boot that ECC could not correct."""
    rows: tuple[bool, bool] | None = None
    """Whether each of ROWS is so."""
    slowed: tuple[str, ...] = ()
    """Why its clocks are lowered: words of SLOWED."""

    @property
    def bad_rows(self) -> list[str]:
        return [text for is_so, text in zip(self.rows or (), ROWS) if is_so]


def read_health(nvml: Any, gpu: Any) -> GpuHealth:
    """`nvml`: the module pynvml, initialised. `gpu`: its handle."""
    uncorrected = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    rows = answer(nvml, nvml.nvmlDeviceGetRemappedRows, gpu)
    reasons = answer(nvml, nvml.nvmlDeviceGetCurrentClocksEventReasons, gpu) or 0
    return GpuHealth(
        uncorrected=answer(nvml, nvml.nvmlDeviceGetTotalEccErrors, gpu, *uncorrected),
        rows=None if rows is None else (bool(rows[2]), bool(rows[3])),
        slowed=tuple(text for name, text in SLOWED.items() if reasons & getattr(nvml, f"nvmlClocksEventReason{name}")),
    )


def answer(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    """None where this GPU or driver has no such thing."""
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def read_all(device: Path = DEVICE, library: Any = None) -> list[GpuHealth | None]:
    """The health of every GPU of this host, by index; None for one that does not answer. Empty where no driver is, or it is
    silent."""
    if not device.exists():
        return []
    nvml = library or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = [
            answer(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            for index in range(answer(nvml, nvml.nvmlDeviceGetCount) or 0)
        ]
        return [None if gpu is None else read_health(nvml, gpu) for gpu in handles]
    finally:
        answer(nvml, nvml.nvmlShutdown)


class XidEvents:
    """Critical Xids of this host's GPUs since this object was made; none where there is no driver."""

    def __init__(self, device: Path = DEVICE, library: Any = None):
        self._nvml: Any = None
        if not device.exists():
            return
        nvml = library or importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return
        self._events = answer(nvml, nvml.nvmlEventSetCreate)
        if self._events is None:
            answer(nvml, nvml.nvmlShutdown)
            return
        self._nvml = nvml
        for index in range(answer(nvml, nvml.nvmlDeviceGetCount) or 0):
            if (gpu := answer(nvml, nvml.nvmlDeviceGetHandleByIndex, index)) is not None:
                answer(nvml, nvml.nvmlDeviceRegisterEvents, gpu, nvml.nvmlEventTypeXidCriticalError, self._events)

    def read(self) -> list[DriverFault]:
        """The faults since the last call, oldest first. NVML gives neither their second nor their text: `at_s` is 0."""
        found: list[DriverFault] = []
        if self._nvml is None:
            return found
        wait = partial(answer, self._nvml, self._nvml.nvmlEventSetWait_v2, self._events, 0)
        while (event := wait()) is not None:  # None: a timeout, since no more are waiting
            pci_info = answer(self._nvml, self._nvml.nvmlDeviceGetPciInfo, event.device)
            pci = "an unknown slot" if pci_info is None else decoded(pci_info.busId)
            found.append(DriverFault(0.0, "Xid", pci, int(event.eventData), ""))
        return found

    def close(self) -> None:
        if self._nvml is not None:
            answer(self._nvml, self._nvml.nvmlEventSetFree, self._events)
            answer(self._nvml, self._nvml.nvmlShutdown)


def decoded(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def new_faults(before: Sequence[GpuHealth | None], now: Sequence[GpuHealth | None]) -> list[str]:
    """A sentence for each thing that is bad `now` and was not `before`."""
    after = [*now, *[None] * len(before)]
    return [f"GPU {index}{text}" for index, pair in enumerate(zip(before, after)) for text in _new(*pair)]


def _new(was: GpuHealth | None, now: GpuHealth | None) -> Iterator[str]:
    if was is None:
        return
    if now is None:
        yield " does not answer any more"
        return
    if (errors := (now.uncorrected or 0) - (was.uncorrected or 0)) > 0:
        yield f" has {errors} more memory error{'s' * (errors > 1)} that ECC could not correct"
    yield from (f": {text}" for text in now.bad_rows if text not in was.bad_rows)
    if slowed := [text for text in now.slowed if text not in was.slowed]:
        yield f" lowers its clocks: {', '.join(slowed)}"
