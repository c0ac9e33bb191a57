"""`windlass report`: the page of a run, written anew from its events."""

from pathlib import Path

from windlass.report.page.write import write_report


def report(run_directory: Path) -> Path:
    """-> the page. Raises UserError where the directory holds no events."""
    return write_report(run_directory)
