"""The live report of a training task: a page of a run, flushed by rank 0 when there is news, and not too often.

Each flush uploads the whole page. So it is at most MOST_BYTES long, and flushed at most once in
EVERY_S seconds, and once at the end. Flyte is not imported here.
"""

import html
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Final

from windlass.report.events import read_lines
from windlass.report.page.history import read_history
from windlass.report.page.write import status, tiles

EVERY_S: Final = 15.0
MOST_BYTES: Final = 300_000
EVENTS: Final = "events.jsonl"
SHOWN_NOTES: Final = 50


class LivePage:
    """Flushes the page of a run directory where its events have grown. `flush` gets the page; call `look` from one thread."""

    def __init__(self, directory: Path, flush: Callable[[str], None]):
        self._events, self._flush, self._seen = directory / EVENTS, flush, 0

    def look(self) -> None:
        """Flushes if there is news."""
        size = self._events.stat().st_size if self._events.is_file() else 0
        if size != self._seen:
            self._flush(page_of(self._events.parent))
            self._seen = size


def page_of(directory: Path) -> str:
    """The page of a run as HTML without a script, of at most MOST_BYTES bytes: figures, validations, and what happened last."""
    history = read_history(read_lines(directory / EVENTS))
    word, sentence = status(history)
    rows = [(what, figure, remark) for what, figure, remark in tiles(history)]
    rows += [(str(note["kind"]), f"step {note['step']}", "") for note in history.notes[-SHOWN_NOTES:]]
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    page = f"<h1>{html.escape(directory.name)}</h1><p><b>{html.escape(word)}</b> {html.escape(sentence)}</p>"
    return shortened(f"{page}<table>{cells}</table>", MOST_BYTES)


def shortened(page: str, most_bytes: int) -> str:
    """`page`, cut after its last whole row where it is longer."""
    data = page.encode()
    return (
        page if len(data) <= most_bytes else data[: data.rfind(b"</tr>", 0, most_bytes - 20) + 5].decode() + "</table>"
    )


@contextmanager
def reported(directory: Path, flush: Callable[[str], None], every_s: float = EVERY_S) -> Iterator[None]:
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
