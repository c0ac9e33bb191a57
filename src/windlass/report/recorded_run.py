"""What the Recorder is given of a run: how long it is, what makes its MFU, and what is read on a logging step."""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class RecordedRun(NamedTuple):
    """The run whose steps are recorded."""

    total_steps: int
    tokens_per_step: int
    num_devices: int
    start_step: int = 0
    unit: str = "targets"
    """What a loss is a mean over."""
    begun_s: float | None = None
    """When its preparation began, by time.perf_counter()."""


class ModelFlops(NamedTuple):
    """What makes the MFU."""

    per_token: float
    peak: float | None
    """FLOP/s of one device; None = unknown."""

    def utilization(self, tokens_per_s_per_device: float) -> float | None:
        return None if self.peak is None else tokens_per_s_per_device * self.per_token / self.peak


class Gauges(NamedTuple):
    """Read on logging steps only, by all ranks together."""

    gather_max: Callable[[float], float]
    """The largest of a number over all ranks; called twice."""
    memory: Callable[[], float]
    """This rank's peak, in bytes."""
    memory_parts: Callable[[float], Mapping[str, int]] = lambda _peak: {}
    """What fills the largest peak of all ranks: bytes by kind."""
