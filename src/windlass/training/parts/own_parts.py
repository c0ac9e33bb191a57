"""What a script brings in place of windlass's own: the arguments of `train` besides the recipe."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, SupportsFloat

from windlass.config import RunConfig
from windlass.data.stream.batch_source import BatchSource
from windlass.errors import UserError
from windlass.model.families.family import Family
from windlass.objectives.objective import Objective, objective_of
from windlass.optim.schedule import learning_rate
from windlass.report.sinks.sink import Sink
from windlass.training.parts.device_memory import FindRoom, device_room

SINKS: Final = (
    "a list of objects with numbers(), flush() and close(); tensorboard, wandb and trackio are names in report.sinks"
)
PAGES: Final = {"sinks": "sink", "on_event": "sink"}


def _has(part: Any, *methods: str) -> bool:
    return all(callable(getattr(part, name, None)) for name in methods) and not isinstance(part, type)


@dataclass(frozen=True)
class OwnParts:
    """Each as `train` takes it; what is None is the recipe's."""

    objective: Objective | None = None
    source: Callable[[BatchSource], BatchSource] | None = None
    schedule: Callable[[int, int], float] | None = None
    family: type[Family] | None = None
    sinks: Sequence[Sink] = ()
    on_event: Callable[[dict[str, Any]], None] | None = None
    room: FindRoom = device_room
    """What sizes are chosen by, where the recipe leaves them open: no part of the run either."""

    def __post_init__(self) -> None:
        """Raises UserError for what is no such part, before anything is made."""
        is_family = self.family is None or (isinstance(self.family, type) and issubclass(self.family, Family))
        sinks = (
            list(self.sinks) if isinstance(self.sinks, Sequence) and not isinstance(self.sinks, str) else [self.sinks]
        )
        found = (
            (
                "objective",
                self.objective,
                _has(self.objective, "weigh", "figures"),
                "an object with weigh() and figures()",
            ),
            ("source", self.source, callable(self.source), "a function of the stream of batches"),
            ("schedule", self.schedule, callable(self.schedule), "a function of the completed steps and all steps"),
            ("family", self.family, is_family, "a class that is derived from windlass.model.families.family.Family"),
            ("on_event", self.on_event, callable(self.on_event), "a function of a line of events.jsonl"),
            *(("sinks", one, _has(one, "numbers", "flush", "close"), SINKS) for one in sinks),
        )
        for name, part, is_one, wanted in found:
            if part is not None and not is_one:
                raise UserError(
                    f"train({name}={part!r:.80})",
                    f"{name} is {wanted}",
                    f"give one (docs/howto/own-{PAGES.get(name, name)}.md shows one), or leave it out for what the recipe says",
                )

    def names(self) -> dict[str, str]:
        """The names of the parts that are not windlass's, by what they are; on_event sees the run, and is no part of it."""
        parts = {"objective": self.objective, "source": self.source, "schedule": self.schedule, "family": self.family}
        names = {kind: _name(part) for kind, part in parts.items() if part is not None}
        return names | ({"sinks": ", ".join(map(_name, self.sinks))} if self.sinks else {})

    def stream(self, source: BatchSource) -> BatchSource:
        if self.source is None:
            return source
        found = self.source(source)
        if not _has(found, "next", "state", "entry", "drain_events", "close"):
            raise UserError(
                f"the source {_name(self.source)} returns {found!r:.80}",
                "a source needs the methods of the stream of batches: next, state, entry, drain_events, close",
                "return the stream that it was called with, or an object around it (docs/howto/own-source.md)",
            )
        return found

    def objective_of(self, config: RunConfig) -> Objective:
        return self.objective or objective_of(config.objective)

    def schedule_of(self, config: RunConfig) -> Callable[[int, int], float]:
        """(completed steps, all steps) -> the learning rate of the next update."""
        return self._rate if self.schedule else partial(learning_rate, config=config.optim)

    def _rate(self, step: int, total_steps: int) -> float:
        """Raises UserError for a number that cannot be a learning rate."""
        assert self.schedule is not None
        rate = self.schedule(step, total_steps)
        if not isinstance(rate, SupportsFloat) or not 0 <= float(rate) < math.inf:
            raise UserError(
                f"the schedule {_name(self.schedule)} gives {rate!r:.80} after {step} of {total_steps} steps",
                "a learning rate is a number from 0",
                "correct the function that train(schedule=...) is called with",
            )
        return float(rate)


def _name(part: object) -> str:
    return getattr(part, "__name__", type(part).__name__)


OURS: Final = OwnParts()
"""A run without parts of a script."""
