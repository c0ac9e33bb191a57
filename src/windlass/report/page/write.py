"""`write_report`: report.html from a run directory, at any moment of the run.

One file without a link to anything outside: plotly's script, style and data are in the page. What a run contains
(sample text, settings, paths) is data to this page and never markup: jinja2 escapes it, the charts' JSON has no `<`,
and the page's own content policy lets no script run but the two whose hashes it names, and loads nothing.
"""

import base64
import datetime
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from windlass.report.events import Event, read_lines
from windlass.report.page.figures import CAUSES, GREY, make_figures
from windlass.report.page.history import History, read_history
from windlass.units import format_bytes, format_count, format_duration

HERE: Final = Path(__file__).parent
CAPTIONS: Final = {
    "loss": "Loss",
    "bits": "Against other predictors of the same text",
    "throughput": "Throughput",
    "learning_rate": "Learning rate",
    "gradient_norm": "Gradient norm",
    "memory": "Memory",
    "data_wait": "Waiting for data",
    "rewards": "Rewards of pairs",
    "experts": "Experts' load",
}
MAX_SET_TILES: Final = 4  # further validation sets are in the chart
BULKY: Final = ("packages",)  # tables that open on request
Tile = tuple[str, str, str]  # what, figure, remark


def write_report(run_directory: Path, baselines: Mapping[str, Mapping[str, float]] | None = None) -> Path:
    """Writes `run_directory`/report.html and returns its path. `baselines`: as in prepared.json, name ->
    bits_per_byte, loss.

    Raises UserError where the directory holds no events, or they are not what windlass writes.
    """
    lines = read_lines(run_directory / "events.jsonl")
    settings = run_directory / "resolved.yaml"
    history = read_history(lines)
    page = render(
        run_directory.resolve().name,
        history,
        settings.read_text("utf-8") if settings.is_file() else "",
        history.opening.get("baselines", {}) if baselines is None else baselines,
    )
    target = run_directory / "report.html"
    partial = run_directory / ".report.html.part"
    try:
        partial.write_text(page.replace("\0", "\ufffd"), "utf-8")  # HTML knows no NUL; a young model writes some
        os.replace(partial, target)  # a reader sees the old page or the new one, never half of one
    finally:
        partial.unlink(missing_ok=True)  # where a full disk took half of it
    return target


def render(name: str, history: History, settings: str, baselines: Mapping[str, Mapping[str, float]]) -> str:
    """The whole page as text."""
    import jinja2
    from plotly.offline import get_plotlyjs

    scripts = {"plotly": get_plotlyjs(), "page": (HERE / "page.js").read_text("utf-8")}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    figures = make_figures(history, baselines)
    return environment.get_template("page.html.j2").render(
        name=name,
        status=status(history),
        tiles=tiles(history),
        figures=json_for_html(figures),
        charts=[(key, caption) for key, caption in CAPTIONS.items() if key in figures],
        ledger=ledger_rows(history.ledger),
        samples=history.samples,
        facts=facts(history.opening),
        settings=settings,
        notes=[(clock(note["time"]), note["step"], note["kind"], remark(note)) for note in reversed(history.notes)],
        style=(HERE / "page.css").read_text("utf-8"),
        scripts=scripts,
        hashes=[script_hash(text) for text in scripts.values()],
    )


def json_for_html(value: Any) -> str:
    """JSON that fits into a script element: no `<`, `>` or `&`, so that no text in it can end the element."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def status(history: History) -> tuple[str, str]:
    """(a word for the badge, a sentence)"""
    step = history.steps[-1]["step"] if history.steps else history.opening.get("step", 0)
    if history.end is not None:
        return str(history.end["reason"]), f"at step {history.end['step']:,}, {clock(history.end['time'])}"
    return "no end yet", f"step {step:,}, last line {clock(history.last_time)}: still running, or killed"


def tiles(history: History) -> list[Tile]:
    """The figures on top of the page; those that nobody measured are left out."""
    found: list[Tile] = []
    for name, lines in list(history.validations.items())[:MAX_SET_TILES]:
        first, last = lines[0], lines[-1]
        parts = [f"{number(first['loss'], '.2f')} at step {first['step']}"] if len(lines) > 1 else []
        parts += [f"perplexity {last['perplexity']:.4g}"] if last.get("perplexity") is not None else []
        parts += [f"{last['bits_per_byte']:.3f} bits per byte"] if last.get("bits_per_byte") is not None else []
        found.append((f"{name} loss", number(last["loss"], ".4f"), ", ".join(parts)))
    if not history.steps:
        return found
    last = history.steps[-1]
    steady = [line for line in history.steps if not line.get("warm_up") and line.get("tokens_per_s")]
    found.append(("training loss", number(last.get("loss"), ".4f"), f"step {last['step']:,}"))
    if last.get("tokens"):
        found.append(("tokens trained", format_count(last["tokens"]), f"{last['tokens']:,}"))
    if steady:
        rates = sorted(line["tokens_per_s"] for line in steady)
        middle = rates[len(rates) // 2]
        per_device = sorted(line["tokens_per_s_per_gpu"] for line in steady if line.get("tokens_per_s_per_gpu"))
        beside = f"{format_count(per_device[len(per_device) // 2])} per device, median" if per_device else "median"
        found.append(("tokens per second", format_count(middle), beside))
        utilisation = sorted(line["mfu"] for line in steady if line.get("mfu") is not None)
        mfu = f"{utilisation[len(utilisation) // 2]:.1%}" if utilisation else "n/a"
        found.append(("MFU", mfu, "median" if utilisation else "peak of this device unknown"))
    memory = max((line["memory_bytes"] for line in history.steps if line.get("memory_bytes")), default=None)
    if memory is not None:
        found.append(("peak memory", format_bytes(memory), "largest rank"))
    if history.ledger:
        resumed = len(history.resumed_at)
        found.append(
            ("time", format_duration(sum(history.ledger.values())), f"{resumed + 1} session{'s' * (resumed > 0)}")
        )
    return found


def ledger_rows(ledger: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    """(cause, colour, duration, share), the largest first."""
    total_s = sum(ledger.values())
    largest_first = sorted(ledger.items(), key=lambda item: -item[1])
    return [
        (cause.replace("_", " "), CAUSES.get(cause, GREY), format_duration(seconds), f"{seconds / total_s:.1%}")
        for cause, seconds in largest_first
        if seconds > 0
    ]


def facts(opening: Event) -> list[tuple[str, bool, list[tuple[str, str]]]]:
    """What the latest start or resume recorded: (title, opens on request, rows); nested tables become tables of their
    own."""
    tables: list[tuple[str, bool, list[tuple[str, str]]]] = []
    loose = {key: value for key, value in opening.items() if key not in ("kind", "time", "step")}
    waiting = [(str(key), value) for key, value in loose.items() if isinstance(value, Mapping)]
    rest = [(key, value) for key, value in loose.items() if not isinstance(value, Mapping)]
    if rest:
        tables.append(("run", False, [(str(key), words(value)) for key, value in rest]))
    while waiting:
        title, table = waiting.pop(0)
        deeper = [(str(key), value) for key, value in table.items() if isinstance(value, Mapping) and not is_row(value)]
        waiting = deeper + waiting
        rows = [(str(key), words(value)) for key, value in table.items() if value and (key, value) not in deeper]
        tables.append((title.replace("_", " "), title in BULKY or len(rows) > 30, rows))
    return [table for table in tables if table[2]]


def is_row(table: Mapping[str, Any]) -> bool:
    """Whether a nested table is small enough for one line of its parent's."""
    return len(table) <= 3 and all(isinstance(value, int | float) for value in table.values())


def remark(note: Event) -> str:
    if note["kind"] == "end":
        return f"{note['reason']}, {format_count(note['tokens'])} tokens" if "tokens" in note else str(note["reason"])
    plain = [(key, value) for key, value in note.items() if key not in ("kind", "time", "step", "ledger", "non_finite")]
    return ", ".join(f"{key} {words(value)}" for key, value in plain if not isinstance(value, Mapping))


def words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words(item)}" for key, item in value.items())
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 1000 else text[:1000] + " ..."


def number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def clock(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
