"""The live report of a training task: a page of a run, flushed by rank 0 when there is news, and not too often.

Each flush uploads the whole page. So it is at most MOST_BYTES long, and flushed at most once in
EVERY_S seconds, and once at the end. Flyte is not imported here.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Final

from windlass.report.page.write import Shown, open_run, thinned
from windlass.safe_text import say

EVERY_S: Final = 15.0
MOST_BYTES: Final = 300_000
EVENTS: Final = "events.jsonl"


class LivePage:
    """Flushes the page of a run directory where its events have grown. `flush` gets the page; call `look` from one thread."""

    def __init__(self, directory: Path, flush: Callable[[str], None]):
        self._directory, self._flush = directory, flush
        self._run: Shown | None = None
        self._flushed = -1  # how far the flushed page had read
        self._failure = ""

    def look(self) -> None:
        """Flushes if there is news. A page that cannot be made or uploaded ends no training: that is reported once, and it is
        tried again."""
        try:
            if not (self._directory / EVENTS).is_file():
                return
            if self._run is None:
                self._run = open_run(self._directory)
            self._run.history.read_new()
            if self._run.history.offset != self._flushed:
                self._flush(thinned(self._run, MOST_BYTES))
                self._flushed = self._run.history.offset
            self._failure = ""
        except Exception as error:  # of the upload, whatever Flyte raises
            if str(error) != self._failure:
                say(f"the live report is not flushed, and tried again: {type(error).__name__}: {error}", sys.stderr)
            self._failure = str(error)


@contextmanager
def flushed_page(directory: Path, flush: Callable[[str], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Inside, a thread flushes the page of a run where there is news; when it is left, however that is, the last of it."""
    live, done = LivePage(directory, flush), threading.Event()

    def work() -> None:
        while not done.wait(every_s):
            live.look()
        live.look()

    inside = copy_context()  # by which Flyte finds the report of its task
    thread = threading.Thread(target=inside.run, args=(work,), name="flyte-report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
