"""`Recorder`: the loop's only metrics call.

The idea: reading a scalar from a GPU makes the host wait for it, so `step` keeps what it is handed and reads it on
logging steps only (every `every_steps`, the first and the last). The time between two such reads is a *window*;
because both ends wait for the device, its length is true without further synchronisation:

    tokens/s = tokens of the window / (its seconds - the seconds paused in it)
    MFU      = tokens/s per device * FLOPs per token / peak FLOP/s of the device        (None where the peak is unknown)

Evaluation, checkpoints and other work that is not a step run inside `pause(cause)`. Windows that end within the first
WARM_UP_STEPS steps of a process hold compilation and allocation; their lines say `warm_up: true` and no average
counts them. `log_s`: what the line before took to make and to write, which is in this window. The time ledger splits the
process's whole time: preparation, warm_up, training, data_wait, and one entry per cause.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol, SupportsFloat

from windlass.errors import UserError
from windlass.report.console import Console
from windlass.report.events import EventLog, Kind, first_lowest_last
from windlass.report.recorded_run import Gauges, ModelFlops, RecordedRun
from windlass.units import bits_per_byte, perplexity

WARM_UP_STEPS: Final = 3  # the first compiles and builds optimizer states; the allocator's pools settle by the third
LINES_OF_PACE: Final = 20  # of which the ETA is made
SHOWN_EXPERTS: Final = 32  # as many lines as a chart of the page has
NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class Scalar(SupportsFloat, Protocol):
    """A number, or a 0-dim tensor on any device: `float` of it waits for the device."""


@dataclass
class _Ledger:
    """Where this process's time went, in seconds, and what its steady windows produced."""

    seconds: dict[str, float] = field(default_factory=lambda: {"warm_up": 0.0, "training": 0.0, "data_wait": 0.0})
    steady_steps: int = 0
    steady_s: float = 0.0

    def add(self, cause: str, seconds: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds


class Recorder:
    """Made on every rank; `log` and `console` are None on all ranks but the first."""

    def __init__(
        self,
        log: EventLog | None,
        console: Console | None,
        run: RecordedRun,
        flops: ModelFlops,
        gauges: Gauges,
        *,
        every_steps: int,
        past_validations: Mapping[str, list[dict[str, Any]]] = NONE,
    ):
        self.flops = flops
        self._log, self._console, self._run, self._gauges = log, console, run, gauges
        self._every_steps = every_steps
        self._ledger = _Ledger()
        # per set: the run's first and lowest, which may be of an earlier process, and the latest
        self._validations = dict(past_validations)
        self._pending: Scalar | None = None  # the newest number of the device that nobody has waited for
        self._step = self._window_step = run.start_step
        self._window_start_s = time.perf_counter()
        if run.begun_s is not None:
            self._ledger.add("preparation", self._window_start_s - run.begun_s)
        self._window_paused_s = self._window_wait_s = 0.0
        self._paces: deque[tuple[int, float]] = deque(maxlen=LINES_OF_PACE)
        self._paused_s = 0.0
        self._log_s: float | None = None

    def step(
        self,
        step: int,
        loss: Scalar,
        norm: Scalar,
        learning_rate: float,
        count: Scalar,
        data_wait_s: float,
        skipped: int = 0,
        figures: Mapping[str, Any] = NONE,
    ) -> None:
        """After update `step` (1 is the first). `loss`, `norm`, `count`: of this step, over all ranks; read when
        logged. `skipped`: updates that were skipped since the last line. `figures`: more fields of the line, on logging steps."""
        self._step, self._pending = step, norm
        self._window_wait_s += data_wait_s
        if self.is_due(step):
            self._log_step(step, loss, norm, learning_rate, count, skipped, figures)

    def is_due(self, step: int) -> bool:
        """Whether `step` is a logging step."""
        return step % self._every_steps == 0 or step in (self._run.start_step + 1, self._run.total_steps)

    def _log_step(
        self,
        step: int,
        loss: Scalar,
        norm: Scalar,
        learning_rate: float,
        count: Scalar,
        skipped: int,
        figures: Mapping[str, Any],
    ) -> None:
        num_steps = step - self._window_step
        wait_s = self._gauges.gather_max(self._window_wait_s) / num_steps
        start_s = time.perf_counter()  # the ranks have met
        memory_bytes = self._gauges.gather_max(self._gauges.memory())
        memory_parts = dict(self._gauges.memory_parts(memory_bytes))
        if self._log is None and self._console is None:
            self._window_step, self._window_wait_s = step, 0.0
            return
        counted, unit = float(count), self._run.unit
        if counted == 0:
            raise UserError(
                f"the global batch of step {step} counts no {unit.removesuffix('s')}",
                f"a step is an average over counted {unit}",
                "look at the labels of the data: all of this batch are -100",
            )
        values = {"loss": float(loss), "gradient_norm": float(norm), "learning_rate": learning_rate}
        warm_up, seconds = self._close_window()
        line = {
            **values,
            **_by_expert(figures),
            "skipped": skipped,
            unit: int(counted) if counted.is_integer() else round(counted, 2),  # weights are in hundredths
            "tokens": step * self._run.tokens_per_step,
            **self._rates(num_steps, seconds),
            "memory_bytes": int(memory_bytes),
            **({"memory_parts": memory_parts} if memory_parts else {}),
            "data_wait_s": wait_s,
            "step_s": seconds / num_steps,
            "log_s": self._log_s,
            "warm_up": warm_up,
            "ledger": dict(self._ledger.seconds),
        }
        self._write("step", step, line)
        if self._console is not None:
            self._console.step(step, line, eta_s=self._eta(num_steps, seconds))
        self._log_s = time.perf_counter() - start_s

    def _close_window(self) -> tuple[bool, float]:
        """End the window at this moment -> (was it warm-up, its seconds without pauses)."""
        now_s = time.perf_counter()
        seconds = max(now_s - self._window_start_s - self._window_paused_s, 1e-9)
        num_steps = self._step - self._window_step
        warm_up = self._step <= self._run.start_step + WARM_UP_STEPS
        wait_s = min(self._window_wait_s, seconds)
        self._ledger.add("data_wait", wait_s)
        self._ledger.add("warm_up" if warm_up else "training", seconds - wait_s)
        if not warm_up:
            self._ledger.steady_steps += num_steps
            self._ledger.steady_s += seconds
        self._pending, self._window_step, self._window_start_s = None, self._step, now_s
        self._window_paused_s = self._window_wait_s = 0.0
        return warm_up, seconds

    def _rates(self, num_steps: int, seconds: float) -> dict[str, float | None]:
        if seconds == 0:  # no window was steady
            return dict.fromkeys(("tokens_per_s", "tokens_per_s_per_gpu", "mfu"))
        tokens_per_s = num_steps * self._run.tokens_per_step / seconds
        per_device = tokens_per_s / self._run.num_devices
        return {
            "tokens_per_s": tokens_per_s,
            "tokens_per_s_per_gpu": per_device,
            "mfu": self.flops.utilization(per_device),
        }

    def _eta(self, num_steps: int, seconds: float) -> float | None:
        """Seconds to the last step: at the pace of the last lines, so that a stall is soon forgotten, with the pauses that a step
        of this session had on average. None at the first line, which is a warm-up. num_steps, seconds: of this line."""
        if self._step == self._run.start_step + 1:
            self._paused_s = 0.0
            return None
        self._paces.append((num_steps, seconds))
        recent = sum(one[1] for one in self._paces) / sum(one[0] for one in self._paces)
        paused = self._paused_s / (self._step - self._run.start_step - 1)
        return (recent + paused) * (self._run.total_steps - self._step)

    @contextmanager
    def pause(self, cause: str) -> Iterator[None]:
        """Time inside counts for `cause` ("evaluate", "checkpoint", ...) and not for the throughput. Pauses do not
        nest."""
        if self._pending is not None:
            float(self._pending)  # the device finishes its steps first, or they would count for the pause
            self._pending = None
        start_s = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start_s
            self._ledger.add(cause, seconds)
            self._window_paused_s += seconds
            self._paused_s += seconds

    def validation(
        self, step: int, name: str, total: float, count: int, num_bytes: int, figures: Mapping[str, Any] = NONE
    ) -> None:
        """One set's result: `total` summed over `count` of the objective's unit, made of `num_bytes` bytes of text; nats of
        targets have a perplexity. `figures`: more fields of the line."""
        assert count > 0, f"validation set {name} counts nothing"
        in_nats = self._run.unit == "targets"
        line = {
            "name": name,
            "loss": total / count,
            "perplexity": perplexity(total / count) if in_nats else None,
            "bits_per_byte": bits_per_byte(total, num_bytes) if in_nats else None,
            **figures,
            self._run.unit: count,
            "bytes": num_bytes,
        }
        self._validations[name] = first_lowest_last([*self._validations.get(name, ()), {"step": step, **line}])
        self._write("validation", step, line)
        if self._console is not None:
            self._console.validation(step, line, self._validations[name][0])

    def event(self, kind: Kind, step: int, **fields: Any) -> None:
        """Any other line: start, resume, checkpoint, incident, sample."""
        self._write(kind, step, fields)
        if self._console is not None:
            self._console.event(kind, step, fields)

    def disk_filled(self) -> bool:
        """Whether the disk of the log has filled since the last call. Rank 0 alone knows."""
        if self._log is None:
            return False
        filled, self._log.disk_filled = self._log.disk_filled, False
        return filled

    def end(
        self,
        step: int,
        reason: str,
        baselines: Mapping[str, Mapping[str, float]] | None = None,
        signal: str | None = None,
    ) -> None:
        """The last line and the final table. `reason`: "finished", "stopped", ..., by `signal` where one asked for it;
        `baselines`: see Console.summary."""
        if self._log is None and self._console is None:
            return
        if self._step > self._window_step:
            self._close_window()
        line = {
            "reason": reason,
            **({} if signal is None else {"signal": signal}),
            "tokens": step * self._run.tokens_per_step,
            **self._rates(self._ledger.steady_steps, self._ledger.steady_s),
            "ledger": dict(self._ledger.seconds),
        }
        self._write("end", step, line)
        if self._console is not None:
            self._console.summary(step, line, self._validations, baselines or {})

    def _write(self, kind: Kind, step: int, fields: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.write(kind, step, fields)


def _by_expert(figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """With names for the shares of the experts; of more experts than a chart can show, without the shares."""
    shares = figures.get("expert_shares")
    if shares is None:
        return figures
    width = len(str(len(shares) - 1))
    named = {f"{expert:0{width}d}": share for expert, share in enumerate(shares)}
    return {**figures, "expert_shares": named if len(shares) <= SHOWN_EXPERTS else None}
