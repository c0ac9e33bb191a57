"""`write_report`: report.html from a run directory, at any moment of the run; `page_text`: the same page as text.

One file without a link to anything outside: script, style and data are in the page. What a run contains (sample text,
settings, paths) is data to this page and never markup: jinja2 escapes it, the charts' JSON has no `<`, and the page's own
content policy lets no script run but the one whose hash it names, and loads nothing.
"""

import base64
import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jinja2

from windlass.errors import UserError
from windlass.report.page.buckets import MAX_BUCKETS
from windlass.report.page.charts import Baselines, bits_rows, make_charts
from windlass.report.page.drawn_data import drawn_data
from windlass.report.page.history import History, evenly_spread, read_history
from windlass.report.page.tables import (
    clock,
    differing,
    facts,
    ledger_rows,
    profile_table,
    remark,
    run_rows,
    status_badge,
    tiles,
)

HERE: Final = Path(__file__).parent
MAX_PROMPTS: Final = 8
MAX_SAMPLES: Final = 6  # continuations shown per prompt, spread over the run
FRAGMENTS: Final = ("status", "tiles", "bars", "runs", "text")
"""The parts of the page that a page which follows a run replaces."""


@dataclass(frozen=True)
class Shown:
    """A run to show."""

    directory: Path
    history: History

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def settings(self) -> str:
        file = self.directory / "resolved.yaml"
        return file.read_text("utf-8") if file.is_file() else ""

    @property
    def levels(self) -> Baselines:
        """The baselines of the run's start, as in prepared.json: name -> bits_per_byte, loss."""
        found: Baselines = self.history.opening.get("baselines", {})
        return found


@dataclass(frozen=True)
class Detail:
    """How much of a run a page holds."""

    buckets: int = MAX_BUCKETS
    samples: bool = True
    settings: bool = True
    packages: bool = True
    notes: bool = True


SHED: Final[tuple[dict[str, Any], ...]] = (
    *({"buckets": most} for most in (1000, 500, 250, 120)),
    {"samples": False}, {"settings": False}, {"packages": False}, {"notes": False},
)  # fmt: skip
"""What a page that must be smaller gives up, in this order: each beside those before it."""


def write_report(run_directory: Path) -> Path:
    """Writes `run_directory`/report.html and returns its path.

    Raises UserError where the directory holds no events, they are not what windlass writes, or the page cannot be written.
    """
    return write_page(page_text(run_directory), run_directory / "report.html")


def write_comparison(run_directories: Sequence[Path], target: Path) -> Path:
    """One page of several runs, laid over each other. Raises UserError as `write_report`."""
    return write_page(render_page([open_run(directory) for directory in run_directories]), target)


def open_run(directory: Path) -> Shown:
    return Shown(directory, read_history(directory / "events.jsonl"))


def page_text(directory: Path, *, at_most_bytes: int | None = None) -> str:
    """The page of a run, in at most `at_most_bytes` bytes of UTF-8: a page that would be longer is thinned (see SHED) and says
    so. Raises UserError where no page is that short, and as `write_report`."""
    return thinned(open_run(directory), at_most_bytes)


def thinned(run: Shown, at_most_bytes: int | None = None) -> str:
    """The page of a run that was opened before, as far as it was read. Raises UserError where no page is that short."""
    detail, text, size = Detail(), "", 0
    for change in ({}, *SHED):
        detail = replace(detail, **change)
        text = render_page([run], detail)
        size = len(text.encode())
        if at_most_bytes is None or size <= at_most_bytes:
            return text
    raise UserError(
        given=f"at_most_bytes={at_most_bytes:,} for the page of {run.directory}",
        rule=f"with everything left out that can be, this page has {size:,} bytes",
        change=f"allow {size:,} bytes or more",
    )


def write_page(text: str, target: Path, command: str = "windlass report RUN") -> Path:
    """`command`: that writes it, for the message of a UserError."""
    if target.is_dir():
        raise UserError(f"{target} is a directory", "the page is a file", f"name a file: `{command} --output FILE`")
    partial = target.with_name(f".{target.name}.part")
    try:
        partial.write_text(text, "utf-8")
        os.replace(partial, target)  # a reader sees the old page or the new one, never half of one
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {error.strerror}",
            "the page is a file of its own, made beside its place",
            f"free the disk, or name another place: `{command} --output FILE`",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # where a full disk took half of it
    return target


def render_page(runs: Sequence[Shown], detail: Detail = Detail(), *, live: dict[str, Any] | None = None) -> str:
    """The whole page as text. `live`: where a page that is served asks for what is new; None: the page asks nobody."""
    script = (HERE / "page.js").read_text("utf-8")
    content = contents(runs, detail)
    return filled(
        "page.html.j2",
        **content,
        data=json_for_html({**page_data(runs, detail), "live": live}),
        style=style(),
        script=script,
        hash=script_hash(script),
        is_live=live is not None,
        fragments=FRAGMENTS,
    )


def page_data(runs: Sequence[Shown], detail: Detail = Detail()) -> dict[str, Any]:
    """What page.js draws."""
    return {
        "charts": charts_of(runs),
        "runs": [drawn_data(run.history, name, most=detail.buckets) for run, name in zip(runs, run_names(runs))],
    }


def charts_of(runs: Sequence[Shown]) -> list[dict[str, Any]]:
    """The charts of the page; of several runs the first one's baselines are drawn."""
    return make_charts([run.history for run in runs], runs[0].levels if runs else {})


def run_names(runs: Sequence[Shown]) -> list[str]:
    """Each run's directory name; with as much of its path as sets it apart from the others."""
    for depth in range(1, 20):
        names = ["/".join(run.directory.resolve().parts[-depth:]) for run in runs]
        if len(set(names)) == len(runs):
            return names
    return [str(run.directory) for run in runs]


def fragments(runs: Sequence[Shown]) -> dict[str, str]:
    """Name -> HTML of the parts that follow a run."""
    content = contents(runs, Detail())
    return {name: filled("parts.html.j2", **content, part=name) for name in FRAGMENTS}


def contents(runs: Sequence[Shown], detail: Detail) -> dict[str, Any]:
    """What the templates show beside the charts: of one run all of it, of several where they differ."""
    names = run_names(runs)
    nothing: dict[str, Any] = {
        "profile": None,
        "status": None, "tiles": [], "bits": [], "ledger": [], "samples": {}, "facts": [], "settings": "", "notes": [],
        "rows": [], "differing": [], "left_out": [],
    }  # fmt: skip
    if len(runs) == 1:
        return nothing | {"name": runs[0].name, "names": names} | _contents_of_one(runs[0], detail)
    rows = run_rows([(name, run.history) for name, run in zip(names, runs)])
    found = {"rows": rows, "differing": differing([run.settings for run in runs])}
    return nothing | {"name": f"{len(runs)} runs", "names": names} | found


def _contents_of_one(run: Shown, detail: Detail) -> dict[str, Any]:
    history = run.history
    samples = list(history.samples.items())[-MAX_PROMPTS:] if detail.samples else []
    notes = [(clock(note["time"]), note["step"], note["kind"], remark(note)) for note in reversed(history.notes)]
    return {
        "status": status_badge(history),
        "tiles": tiles(history),
        "bits": bits_rows(history, run.levels),
        "ledger": ledger_rows(history.ledger),
        "profile": profile_table(run.directory),
        "samples": {prompt: evenly_spread(texts, MAX_SAMPLES) for prompt, texts in samples},
        "facts": [table for table in facts(history.opening) if detail.packages or table[0] != "packages"],
        "settings": run.settings if detail.settings else "",
        "notes": notes if detail.notes else [],
        "left_out": [name for name in ("samples", "settings", "packages", "notes") if not getattr(detail, name)],
    }


def json_for_html(value: Any) -> str:
    """JSON that fits into a script element: no `<`, `>` or `&`, so that no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def style() -> str:
    """The style sheet of every page."""
    return (HERE / "page.css").read_text("utf-8")


def filled(template: str, **content: Any) -> str:
    """The template with `content`, which is escaped."""
    return _template(template).render(**content).replace("\0", "\ufffd")  # HTML knows no NUL; a young model writes some


@functools.cache  # a page that follows a run renders its parts every other second
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template(name)


if __name__ == "__main__":  # `write_in_child` starts it: the command line takes longer to load than a short run's page
    try:
        write_report(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(error.given)
