"""A reader's view of a dataset that is still being prepared: the list of shards grows, and every listed shard is complete.

A reader that needs a shard that is not written yet waits for as long as the preparation works. A preparation works while its
journal grows or its beat changes, which it does every second in which documents are read or encoded. Clocks of two hosts are
never compared; only change counts. No change within the deadline is an error that names the preparation; so is a failure that
the preparation reports itself. So a wait ends in shards, in the end of the set, or in an error, never in a short epoch.

Ranks wait alike: each asks for the whole global batch, not for its own part, so all find it at nearly the same moment, and no
collective is under way while they wait. The deadline is far below the time after which a collective fails.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from windlass.data.shards.index import Shard
from windlass.data.shards.journal import Journal, open_journal, read_beat
from windlass.data.shards.mds import Folder
from windlass.errors import Unavailable, UserError
from windlass.units import format_duration

POLL_S: Final = 0.2
MAPPED: Final = 1 << 30  # files of a disk: as many as the reader wants


class GrowingFolder(Folder):
    """The shards that the journal of a local directory lists. `read` extends `shards`; sizes and hashes are checked when a file
    is first loaded."""

    def __init__(self, directory: Path, journal: Journal, max_silence_s: float):
        self.directory, self.where = directory, str(directory)
        self.max_mapped = MAPPED
        self.journal, self._max_silence_s = journal, max_silence_s
        self._verified = set()
        self._closed = threading.Event()

    @property
    def shards(self) -> list[Shard]:  # type: ignore[override]
        return self.journal.shards

    @property
    def is_complete(self) -> bool:
        return self.journal.end is not None

    def close(self) -> None:
        """Ends a wait that is under way, with an error."""
        self._closed.set()

    def wait_for(self, is_enough: Callable[[], bool]) -> None:
        """Returns once `is_enough()` or the set is complete; asks again whenever shards are added. Raises UserError, BadShard."""
        sign, since_s = "", time.monotonic()
        while True:
            self.read()
            if self.is_complete or is_enough():
                return
            beat, failure = read_beat(self.directory.parent)
            now_s = time.monotonic()
            if (found := f"{self.journal.num_bytes} {beat}") != sign:
                sign, since_s = found, now_s
            if failure is not None:
                raise self._failed(failure)
            if now_s - since_s > self._max_silence_s:
                raise self._silent(now_s - since_s)
            if self._closed.wait(POLL_S):
                raise RuntimeError("the loader was closed while it waited")

    def read(self) -> None:
        """Takes in new shards. Raises UserError where the preparation is gone, BadShard where it is another one."""
        try:
            self.journal.read()
        except FileNotFoundError:
            given = f"{self.journal.path} is gone; {len(self.shards)} shards were read or could be"
            rule = "prepared data stays while a run reads it"
            raise UserError(
                given, rule, "see who removed it; then start this run again, which prepares and goes on"
            ) from None

    def _failed(self, failure: UserError) -> UserError:
        given = f"the preparation of {self.directory.parent} failed behind shard {len(self.shards)}: {failure.given}"
        change = f"{failure.change}; then start this run again: both go on where they were"
        return (Unavailable if failure.retry else UserError)(given, failure.rule, change)

    def _silent(self, waited_s: float) -> UserError:
        return Unavailable(
            f"{self.directory.parent} holds {len(self.shards)} shards of an unfinished preparation, which gave no sign of life "
            f"for {format_duration(waited_s)}",
            f"a preparation that is being read works on; data.order.deadline_s={self._max_silence_s:g}",
            "start this run again: it goes on with the preparation too; or raise data.order.deadline_s, where its host is slow",
        )


def open_growing(directory: Path, name: str, max_silence_s: float) -> GrowingFolder | None:
    """The training set below `directory` by its journal, finished or not; None where it has none. Raises BadShard."""
    journal = open_journal(directory)
    return None if journal is None else GrowingFolder(directory / name, journal, max_silence_s)
