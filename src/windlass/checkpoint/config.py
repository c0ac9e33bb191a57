"""When checkpoints are written, how, and which are kept."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from windlass.errors import UserError
from windlass.settings import Count, Settings


class CheckpointConfig(Settings):
    every_steps: Annotated[Count, Field(ge=1)] | None = None
    """Save each time this many optimizer steps are done. null: not by step. The end of a run is always saved."""
    every_minutes: Annotated[float, Field(gt=0)] | None = 30.0
    """Save when this many minutes have passed since the last save, by rank 0's clock (checked on logging steps). null: not by
    time."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Keep this many of the newest checkpoints. At least 1, since a run must be able to resume."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Also keep this many checkpoints with the lowest validation loss (of the first validation set)."""
    keep_steps: list[Annotated[Count, Field(ge=0)]] = []
    """Save at these steps and keep those checkpoints for ever. 0 is the state before the first update."""
    remote: str | None = None
    """A URL (s3://bucket/run, gs://, file://) to which every checkpoint is copied after its commit, in the background, with the
    run's events. A run whose directory is empty, for example on another machine, resumes from there."""
    async_: Annotated[bool, Field(alias="async")] = True
    """Copy the state to host memory and write it in the background. The copy is kept between saves: 12 bytes per parameter with
    fp32 AdamW, divided among the ranks that hold it. false: no copy, and training waits until the files are on disk."""

    def rules(self) -> Sequence[Iterator[UserError]]:
        return (self._remote(),)

    def _remote(self) -> Iterator[UserError]:
        if self.remote is not None and "://" not in self.remote:
            yield UserError(
                f"checkpoint.remote={self.remote} is not a URL",
                "checkpoints are copied to a URL that fsspec can write to",
                "give s3://bucket/run, gs://bucket/run or file:///directory",
            )
