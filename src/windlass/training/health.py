"""Whether a run still learns: steps that are skipped, norms far from the usual, and updates that round to nothing.

Looked at on logging steps only.

A step whose gradient norm is not finite is skipped on the device, on all ranks alike, and nobody reads the norm for it. Here the
norms and losses of the steps since the last line are kept as they came (0-dim tensors) and read together when a line is due: late
is harmless, since a skipped step changes no weight. `optim.max_skips` of them in a row end the run. All ranks hold the same
numbers, so all come to the same end.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from windlass.config import RunConfig
from windlass.errors import Diverged
from windlass.optim.optimizer import Optimizer
from windlass.report.metrics import Recorder

MOST: Final = 0.5  # of a tensor's elements: above it more updates are lost to rounding than made
NAMED: Final = 3  # tensors that the alarm names
SPIKE: Final = 100.0  # times the median; our choice: clipped, such a batch still turns the whole update its way
MEDIAN_OF: Final = 100  # steps, of which at least MEDIAN_FROM have been taken; our choice
MEDIAN_FROM: Final = 10
SAMPLES_NAMED: Final = 16  # of a spike's batch, in its sentence; its event has them all


@dataclass(frozen=True)
class Spike:
    """A step whose gradient norm was over SPIKE times the `median` of the `count` finite ones before it."""

    step: int
    norm: float
    median: float
    count: int
    end: int
    """The position of the stream behind its global batch."""

    def fields(self, num_samples: int, samples: Sequence[str]) -> dict[str, Any]:
        """The fields of its incident; `samples`: `shard/row` of those of its global batch, which has `num_samples`."""
        start, more = self.end - num_samples, " ..." if len(samples) > SAMPLES_NAMED else ""
        what = (
            f"the gradient norm {self.norm:.4g} is {self.norm / self.median:.0f} times the median {self.median:.4g} of the "
            f"{self.count} steps before. Its batch: samples {start} to {self.end} of the stream"
        )
        if samples:
            ids = " ".join(samples[:SAMPLES_NAMED])
            what += f", shard/row {ids}{more}; `windlass data inspect RECIPE --sample {samples[0]}` shows the first"
        return {
            "what": what,
            "gradient_norm": self.norm,
            "median": self.median,
            "positions": [start, self.end],
            "samples": list(samples),
        }


@dataclass(frozen=True)
class Finite:
    """The last step whose norm was finite."""

    step: int
    loss: float
    norm: float


class Health:
    """`incident` is called with the step and a sentence, on every rank; `advice`: what to change where all steps are skipped.
    `skips_are_normal`: fp16's loss scale overflows now and then, which is no incident."""

    def __init__(
        self,
        max_skips: int,
        step: int,
        incident: Callable[[int, str], None],
        advice: str,
        skips_are_normal: bool = False,
        recent: Sequence[float] = (),
    ):
        """`recent`: of a run that goes on, the norms before `step`."""
        self._max_skips, self._incident, self._advice = max_skips, incident, advice
        self._skips_are_normal = skips_are_normal
        self._norms: list[torch.Tensor] = []
        self._ends: list[int] = []
        self._losses: list[torch.Tensor] = []
        self._step = step
        self._finite: Finite | None = None
        self._in_a_row, self._loss, self._norm = 0, 0.0, 0.0
        self._alarmed: set[str] = set()
        self._recent: deque[float] = deque(recent, maxlen=MEDIAN_OF)
        self._spikes: list[Spike] = []

    def add(self, loss: torch.Tensor, norm: torch.Tensor, end: int) -> None:
        """The loss and the gradient norm of the next step, whose global batch ends at position `end`; no tensor is read."""
        self._losses.append(loss)
        self._norms.append(norm)
        self._ends.append(end)

    def look(self) -> int:
        """-> how many steps were skipped since the last look."""
        norms, losses = (torch.stack(kept).tolist() for kept in (self._norms, self._losses))
        ends, self._norms, self._losses, self._ends = self._ends, [], [], []
        skipped = 0
        for loss, norm, end in zip(losses, norms, ends):
            self._step += 1
            if math.isfinite(norm):
                self._finite, self._in_a_row = Finite(self._step, loss, norm), 0
                self._look_for_spike(norm, end)
                continue
            skipped, self._in_a_row = skipped + 1, self._in_a_row + 1
        if skipped and not self._skips_are_normal:
            what = "the update was skipped" if len(norms) == 1 else f"{skipped} of {len(norms)} updates were skipped"
            self._incident(self._step, f"the gradient norm is not finite: {what}")
        self._loss, self._norm = losses[-1], norms[-1]
        return skipped

    def _look_for_spike(self, norm: float, end: int) -> None:
        if len(self._recent) >= MEDIAN_FROM and norm > SPIKE * (median := statistics.median(self._recent)) > 0:
            self._spikes.append(Spike(self._step, norm, median, len(self._recent), end))
        self._recent.append(norm)

    def recent(self) -> list[float]:
        """The finite norms of the last MEDIAN_OF steps. Reads those that were not looked at yet."""
        waiting = torch.stack(self._norms).tolist() if self._norms else []
        return [*self._recent, *filter(math.isfinite, waiting)][-MEDIAN_OF:]

    def spikes(self) -> list[Spike]:
        """The spikes that the last look found, each returned once."""
        found, self._spikes = self._spikes, []
        return found

    def end_if_diverged(self) -> None:
        """After a look. Raises Diverged where too many steps were skipped, one after the other."""
        if self._in_a_row < self._max_skips:
            return
        error = self._diverged(self._loss, self._norm)
        self._incident(self._step, error.given)
        raise error

    def _diverged(self, loss: float, norm: float) -> Diverged:
        first = self._step - self._in_a_row + 1
        what = (
            f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss:.4f} and the gradient norm {norm}"
        )
        last = self._finite
        before = f"the last finite ones: loss {last.loss:.4f}, norm {last.norm:.3g} at step {last.step}" if last else ""
        return Diverged(
            f"steps {first} to {self._step}: {self._in_a_row} updates in a row were skipped; {what}"
            + (f"; {before}" if before else "; no step since this start was finite"),
            "a step whose gradient is not finite changes nothing, and "
            f"optim.max_skips={self._max_skips} of them in a row end the run",
            self._advice,
        )

    def look_for_stagnation(self, optimizer: Optimizer) -> None:
        """One incident for tensors that do not change because their updates round to nothing. Collective."""
        shares = optimizer.lost_shares()
        stuck = {name: share for name, share in shares.items() if share > MOST and name not in self._alarmed}
        if not stuck:
            return
        self._alarmed |= set(stuck)
        worst = sorted(stuck, key=lambda name: -stuck[name])
        named = ", ".join(f"{name} ({stuck[name]:.0%})" for name in worst[:NAMED])
        more = f" and {len(worst) - NAMED} more tensors" if len(worst) > NAMED else ""
        self._incident(
            self._step,
            f"updates round to nothing in most of {named}{more}: bf16 cannot hold a change below 1/512 of a weight. Use "
            "precision.rounding=stochastic, precision.policy=bf16 (fp32 weights), or a larger optim.learning_rate",
        )


def open_health(config: RunConfig, recorder: Recorder, start_step: int, recent: Sequence[float] = ()) -> Health:
    advice = (
        "lower optim.learning_rate or raise optim.warmup_steps ('run.accept_drift=[optim.learning_rate]' goes on from the last "
        "checkpoint, which is of finite weights), or look at the data of the steps named"
    )
    is_scaled = config.precision.computed == "fp16"
    if is_scaled:
        advice += "; or use precision.policy=bf16, whose range is that of fp32"
    return Health(
        config.optim.max_skips,
        start_step,
        incident=lambda step, what: recorder.event("incident", step, what=what),
        advice=advice,
        skips_are_normal=is_scaled,
        recent=recent,
    )
