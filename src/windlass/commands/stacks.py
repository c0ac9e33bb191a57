"""`windlass stacks RUN`: where every rank of this host is. No torch."""

import json
from collections.abc import Iterator
from pathlib import Path

from windlass.errors import UserError
from windlass.supervise.heartbeat import read_beats
from windlass.supervise.rank_stacks import find_stacks


def stacks(run_directory: Path, in_json: bool = False) -> Iterator[str]:
    """Lines to print. Raises UserError where no rank of the run lives here."""
    stacks = find_stacks(run_directory, read_beats(run_directory))
    if not stacks:
        raise UserError(
            f"no rank of a run in {run_directory} runs on this host",
            "the ranks of a running job record where they are in the memory of their own host",
            "see `windlass status RUN`; of a run on several hosts, ask on each",
        )
    for stack in stacks:
        yield json.dumps(stack.fields()) if in_json else stack.text()
