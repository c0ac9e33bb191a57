"""The name of a job in a cluster: as given, or made of the run directory's. No torch."""

import re
import sys
from pathlib import PurePath
from typing import Final

from windlass.errors import UserError
from windlass.safe_text import say

NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A label of RFC 1123 that begins with a letter, and short enough for the names that the controllers make of it (63 letters)."""
MOST: Final = 40


def job_name(given: str | None, run: PurePath) -> str:
    """`given`, or the name of the run directory with what no cluster takes replaced, which stderr says. Raises UserError."""
    if given is not None:
        return checked_job_name(given)
    name = re.sub(r"[^a-z0-9]+", "-", run.name.lower()).strip("-")
    name = checked_job_name((f"run-{name}" if name[:1].isdigit() else name)[:MOST].rstrip("-"))
    if name != run.name:
        say(f"the job is called {name}, after {run}; --job-name gives it another name", sys.stderr)
    return name


def checked_job_name(name: str) -> str:
    """`name`. Raises UserError where no cluster takes it."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"`{name}` as the name of a job",
            f"a name there is at most {MOST} small letters, digits and hyphens, begins with a letter and ends with no hyphen",
            "give another with --job-name",
        )
    return name
