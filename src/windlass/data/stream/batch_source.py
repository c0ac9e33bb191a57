"""What the loop reads from: this rank's micro-batches of one global batch after another.

Whoever wants to see the batches of a run, or to change them, wraps its source: `next()` is all that the loop calls.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

from windlass.data.batch_fields import Batch
from windlass.data.shards.index import Shard

SOURCES: Final = "sources"
PERCENT: Final = "percent"


class Event(NamedTuple):
    """A line for the run's events."""

    kind: Literal["incident", "data"]
    fields: dict[str, Any]


class BatchSource(Protocol):
    """A stream of global batches, as one rank reads it. `open_stream` makes it; a wrapper passes on what it does not change."""

    @property
    def consumed(self) -> int:
        """Position in the stream of the next global batch's first sample, over all ranks."""

    @property
    def wait_s(self) -> float:
        """Seconds that the last `next()` took."""

    @property
    def shards(self) -> Sequence[Shard]:
        """What is read: sizes, hashes, numbers of samples. A growing set has more of them later."""

    def next(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch, on its device. Raises UserError, BadShard."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the stream: JSON, the same on all ranks, from which `open_stream` goes on."""

    def entry(self) -> dict[str, Any]:
        """What a start or resume writes under `data` in the run's events (see `ledger`)."""

    def drain_events(self, is_log_step: bool) -> list[Event]:
        """Events since the last call, each returned once. What may be logged later comes on logging steps only."""

    def close(self) -> None:
        """Stops reading ahead. A second call does nothing; `next()` must not follow."""
