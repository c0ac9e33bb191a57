"""The page written by a process of its own, at the end of a run: rank 0 neither holds what the page needs nor dies of it.

A page costs 150 MB and, for a million lines, 10 s of CPU. No library of the page is imported here.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

from windlass.contract import environment_of_child
from windlass.errors import UserError

LONGEST_S: Final = 120.0  # ten times what a million lines take; a run's end waits no longer


def write_in_child(run_directory: Path, longest_s: float = LONGEST_S) -> None:
    """report.html of `run_directory`, as by `windlass report`. Raises UserError where it is not written within `longest_s`."""
    # -P: no module of the working directory comes before those that this process has
    command = [sys.executable, "-P", "-m", "windlass.report.page.write", str(run_directory)]
    try:
        done = subprocess.run(
            command,
            env=environment_of_child(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=longest_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"it took more than {longest_s:.0f} s"
    except OSError as error:
        reason = f"no process could be started ({error.strerror})"
    else:
        if done.returncode == 0:
            return
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = lines[-1] if "Traceback" in done.stderr else lines[0]
    raise UserError(
        given=f"report.html of {run_directory} is not written: {reason}",
        rule="a run ends well without its page",
        change=f"write it with `windlass report {run_directory}`",
    )
