"""What a sink is: three calls. A sink of your own has these."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Where numbers go."""

    def numbers(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """`values` by name, after optimizer step `step`; `time_s`: Unix seconds."""

    def flush(self) -> None:
        """What was given so far survives a kill of this process."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class SentRun:
    """What a sink knows of the run."""

    directory: Path
    run_id: str
    settings: dict[str, Any]
    project: str
