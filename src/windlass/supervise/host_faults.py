"""What went wrong on this host since ranks were started: processes killed for want of memory, faults of GPUs."""

import time
from typing import Final, Self

from windlass.supervise.gpu_health import XidEvents, new_faults, read_all
from windlass.supervise.kernel_log import causes, read_faults
from windlass.supervise.resident import oom_kills

FAULTS_S: Final = 60
"""Faults of a GPU's driver that are older than this are not why a rank died."""


class HostFaults:
    """Since this object was made."""

    def __init__(self) -> None:
        self._kills, self._health, self._xids = oom_kills(), read_all(), XidEvents()

    def is_out_of_memory(self) -> bool:
        """Whether the kernel has killed some process for want of memory."""
        return oom_kills() > self._kills

    def of_gpus(self) -> list[str]:
        """Sentences: what the driver has reported in the last minute, or NVML's events where the kernel's log may not be read;
        and what NVML says that it did not say before."""
        logged = read_faults(time.monotonic() - FAULTS_S)
        reported = [fault.sentence for fault in causes(self._xids.read() if logged is None else logged)]
        return [*reported, *new_faults(self._health, read_all())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._xids.close()
