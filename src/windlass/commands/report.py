"""`windlass report`: the page of a run, written anew from its events; of several runs, one page of all; or served."""

from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.errors import UserError
from windlass.report.page.serve import serve_page
from windlass.report.page.write import write_comparison, write_report


def report(runs: Sequence[Path], output: Path | None) -> Path:
    """-> the page: `output`, or report.html of one run. Raises UserError where a directory holds no events, and for several runs
    without `output`."""
    if output is None and len(runs) > 1:
        raise UserError(
            f"{len(runs)} runs without --output",
            "the page of one run is report.html in its directory; that of several belongs to none of them",
            "say where it goes: --output comparison.html",
        )
    if output is not None and not output.parent.is_dir():
        raise UserError(f"--output {output}", f"there is no directory {output.parent}", "make it, or correct the path")
    return write_report(runs[0]) if output is None else write_comparison(runs, output)


def serve_reports(runs: Sequence[Path], output: Path | None, port: int, say: Callable[[str], None]) -> None:
    """Serves the page until a signal comes. Raises UserError."""
    if output is not None:
        raise UserError("--output with --serve", "--serve writes no file", "leave one of the two out")
    serve_page(runs, port, say)
