"""Which machine a benchmark ran on."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's name where Linux names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
