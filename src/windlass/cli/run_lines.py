"""`train --quiet` and `--json`: what a run prints in place of its lines. `logs/` of the run directory keeps them all the same.

And the line at the end of a run: what to do next.
"""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from windlass.errors import UserError
from windlass.safe_text import say

if TYPE_CHECKING:  # it takes a second to load
    from windlass.config import RunConfig

Event = dict[str, Any]


@contextlib.contextmanager
def printing(is_quiet: bool, is_json: bool) -> Iterator[Callable[[Event], None] | None]:
    """Inside, stdout is silent (`is_quiet`), or what would be printed goes to stderr (`is_json`). Yields what is called with
    every line of events.jsonl: it prints incidents to stderr, or the line to stdout. Raises UserError for both at once."""
    if is_quiet and is_json:
        raise UserError("--quiet and --json", "--quiet prints only problems, --json every event", "give one of them")
    if not (is_quiet or is_json):
        yield None
        return
    stdout = sys.stdout
    with contextlib.ExitStack() as opened:
        elsewhere: TextIO = opened.enter_context(open(os.devnull, "w")) if is_quiet else sys.stderr
        opened.enter_context(contextlib.redirect_stdout(elsewhere))
        yield _print_incident if is_quiet else lambda event: say(json.dumps(event), stdout)


def _print_incident(event: Event) -> None:
    if event["kind"] == "incident":
        say(f"step {event['step']}: incident: {event.get('what', '')}", sys.stderr)


def say_next(config: "RunConfig") -> None:
    """What a finished run is for. A rehearsal's directory goes away."""
    directory = config.run.directory
    if directory.parent.name.startswith(".smoke-"):
        return
    report, run = directory / "report.html", shlex.quote(str(directory))
    formats = {source.format for source in config.data.sources}
    asked = '--chat --prompt "..."' if formats == {"chat"} else '--prompt "..."'
    asked += " (--chat too, where prompts are messages)" if formats == {"preference"} else ""
    shown = f"report: {report}; " if report.is_file() else ""
    say(f"{shown}next: windlass generate {run} {asked}, or windlass export {run}")
