"""What a recipe may say about the order of the first epoch, and about training while data is still prepared. No torch."""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from pydantic import Field

from windlass.settings import Settings, Violation

DEADLINE_S: Final = 300.0


class OrderConfig(Settings):
    """The order of the first epoch, and training that begins before all is prepared. Later epochs are shuffled always."""

    first_epoch: Literal["shuffled", "written"] = "shuffled"
    """shuffled: shards are shuffled, so all are prepared first. written: shards in the order they are written, samples permuted
    inside windows of `shuffle_window` of them. `train` then begins when the other sets and the first window are there; what it
    reads is what a finished preparation gives under the same setting."""
    held_out_of: int | None = Field(default=None, ge=1)
    """With `written` and a share for `validation`: the share is of the first `held_out_of` documents of each source. Later ones
    are trained on, but for copies of what is held out. Needed where a source is streamed or still growing."""
    deadline_s: float = Field(default=DEADLINE_S, ge=1.0, le=86400.0)
    """With `written`: longest silence in seconds of a preparation that is waited for, and of a source that still grows; then the
    run ends with an error. May change on resume."""

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (self._needs_written(),)

    def _needs_written(self) -> Iterator[ValueError]:
        if self.first_epoch != "written":
            given = [f"`held_out_of: {self.held_out_of}`"] if self.held_out_of is not None else []
            given += [f"`deadline_s: {self.deadline_s:g}`"] if self.deadline_s != DEADLINE_S else []
            rule = "is for training that begins before all is prepared"
            yield from (ValueError(f"{one} {rule}: set `first_epoch: written`, or leave it out") for one in given)
