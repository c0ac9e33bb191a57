"""What the page says in words and figures: state, tiles, ledger, facts of the start, what happened, and what runs differ in."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from windlass.profiling.summary import newest
from windlass.report.events import Event
from windlass.report.page.buckets import COUNT, HIGH, SUM
from windlass.report.page.history import History
from windlass.units import format_bytes, format_count, format_duration

CAUSES: Final = {"training": 0, "data_wait": 1, "evaluate": 2, "warm_up": 3, "redone": 4, "checkpoint": 5}
"""Cause -> its colour of the page's palette."""
OTHER: Final = 7
MAX_SET_TILES: Final = 4  # further validation sets are in the chart
BULKY: Final = ("packages",)  # tables that open on request
OF_ADVICE: Final = {
    "accumulation": "micro-batches of a rank per step",
    "elements": "parameters",
    "end_elements": "parameters outside the blocks",
    "trained_elements": "trained parameters",
    "units": "units that FSDP gathers",
    "end_units": "of them outside the blocks",
    "gathered_bytes": "bytes of a gathered element",
    "fp8_elements": "parameters gathered in fp8",
    "reduced_bytes": "bytes of a summed gradient",
    "buckets": "messages of gradients under zero 0",
    "usual_buckets": "messages with the usual bucket_mib",
    "flops_per_token": "FLOPs per token",
    "recomputed_flops": "recomputed FLOPs per token",
    "peak_flops": "peak FLOP/s of a device",
    "filled": "share of positions that hold a token",
}
"""What the numbers of advice/facts.py are called."""
NOT_SHOWN: Final = ("kind", "time", "step", "ledger", "non_finite", "drift")  # of a note; drift is sentences
USEFUL: Final = ("training",)  # causes that goodput counts
Tile = tuple[str, str, str]  # what, figure, remark


def status_badge(history: History) -> tuple[str, str]:
    """(a word for the badge, a sentence)"""
    step = int(history.buckets.last_step) if len(history.buckets) else history.opening.get("step", 0)
    if history.end is not None:
        by = f"by {_signal(history.end)} " if "signal" in history.end else ""
        return str(history.end["reason"]), f"{by}at step {history.end['step']:,}, {clock(history.end['time'])}"
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
    if not len(history.buckets):
        return found
    last = history.last_line
    found.append(("training loss", number(last.get("loss"), ".4f"), f"step {last['step']:,}"))
    if last.get("tokens"):
        found.append(("tokens trained", format_count(last["tokens"]), f"{last['tokens']:,}"))
    found += _speed_tiles(history)
    memory = history.buckets.series.get("memory_bytes")
    if memory is not None and memory[COUNT].any():
        found.append(("peak memory", format_bytes(float(np.nanmax(memory[HIGH]))), "largest rank"))
    if ledger := history.ledger:
        resumed, total_s = len(history.resumed_at), sum(ledger.values())
        found.append(("time", format_duration(total_s), f"{resumed + 1} session{'s' * (resumed > 0)}"))
        if total_s > 0:
            share = sum(ledger.get(cause, 0.0) for cause in USEFUL) / total_s
            found.append(("goodput", f"{share:.1%}", "of all time: steps that count, without waiting"))
    return found


def _speed_tiles(history: History) -> list[Tile]:
    found: list[Tile] = []
    middle = median(history, "tokens_per_s")
    if middle is not None:
        per_device = median(history, "tokens_per_s_per_gpu")
        beside = f"{format_count(per_device)} per device, median" if per_device is not None else "median"
        found.append(("tokens per second", format_count(middle), beside))
        utilisation = median(history, "mfu")
        mfu = f"{utilisation:.1%}" if utilisation is not None else "n/a"
        found.append(("MFU", mfu, "median" if utilisation is not None else "peak of this device unknown"))
    return found


def median(history: History, series: str) -> float | None:
    """The median of the buckets' means, each as often as it has lines: the median of lines while a bucket holds one."""
    rows = history.buckets.series.get(series)
    if rows is None or not rows[COUNT].any():
        return None
    means, counts = (rows[SUM] / np.maximum(rows[COUNT], 1))[rows[COUNT] > 0], rows[COUNT][rows[COUNT] > 0]
    order = np.argsort(means)
    at = np.searchsorted(np.cumsum(counts[order]), counts.sum() / 2, side="right")
    return float(means[order][min(at, len(means) - 1)])


def ledger_rows(ledger: Mapping[str, float]) -> list[tuple[str, int, str, float]]:
    """(cause, colour, duration, share), the largest first."""
    total_s = sum(ledger.values())
    largest_first = sorted(ledger.items(), key=lambda item: -item[1])
    return [
        (cause.replace("_", " "), CAUSES.get(cause, OTHER), format_duration(seconds), seconds / total_s)
        for cause, seconds in largest_first
        if seconds > 0
    ]


def run_rows(runs: Sequence[tuple[str, History]]) -> list[tuple[str, ...]]:
    """A row of titles, then of each run: name, state, step, tokens, training loss, latest loss of each validation set, median
    tok/s."""
    sets = list(dict.fromkeys(name for _, history in runs for name in history.validations))[:MAX_SET_TILES]
    losses = (f"{name} loss" for name in ("training", *sets))
    rows = [("run", "state", "step", "tokens", *losses, "tok/s, median")]
    for name, history in runs:
        last, speed = history.last_line, median(history, "tokens_per_s")
        latest = [history.validations[one][-1] if one in history.validations else {} for one in sets]
        rows.append(
            (
                name,
                status_badge(history)[0],
                f"{last.get('step', 0):,}",
                format_count(last["tokens"]) if last.get("tokens") else "n/a",
                *(number(one.get("loss"), ".4f") if one else "n/a" for one in (last, *latest)),
                format_count(speed) if speed is not None else "n/a",
            )
        )
    return rows


def differing(settings: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) where runs differ. `settings`: each run's resolved.yaml, empty where there is none."""
    flat = [_settings(text) for text in settings]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [one.get(key, "") for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(text: str) -> dict[str, str]:
    try:
        return _flat(yaml.safe_load(text))
    except yaml.YAMLError:
        return {"resolved.yaml": "cannot be read"}


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: value_in_words(value)} if prefix else {}


def facts(opening: Event) -> list[tuple[str, bool, list[tuple[str, str]]]]:
    """What the latest start or resume recorded: (title, opens on request, rows); nested tables become tables of their
    own."""
    tables: list[tuple[str, bool, list[tuple[str, str]]]] = []
    loose = {key: value for key, value in opening.items() if key not in ("kind", "time", "step")}
    if "drift" in loose:
        loose["since the checkpoint"] = "; ".join(loose.pop("drift"))
    waiting = [(str(key), value) for key, value in loose.items() if isinstance(value, Mapping)]
    rest = [(key, value) for key, value in loose.items() if not isinstance(value, Mapping)]
    if rest:
        tables.append(("run", False, [(str(key), value_in_words(value)) for key, value in rest]))
    while waiting:
        title, table = waiting.pop(0)
        deeper = [(str(key), value) for key, value in table.items() if isinstance(value, Mapping) and not is_row(value)]
        waiting = deeper + waiting
        names = OF_ADVICE if title == "facts" else {}
        rows = [
            (names.get(key, str(key)), value_in_words(value))
            for key, value in table.items()
            if value and (key, value) not in deeper
        ]
        tables.append((title.replace("_", " "), title in BULKY or len(rows) > 30, rows))
    return [table for table in tables if table[2]]


def is_row(table: Mapping[str, Any]) -> bool:
    """Whether a nested table is small enough for one line of its parent's."""
    return len(table) <= 3 and all(isinstance(value, int | float) for value in table.values())


def profile_table(run_directory: Path) -> dict[str, Any] | None:
    """The newest profile of a run: its caption, and (what, colour, share of a step, milliseconds, remark) by part of a step, by
    kind of operator and by axis. None where nobody asked for one."""
    summary = newest(run_directory)
    if summary is None:
        return None
    parts = (
        ("computing", 0, summary.computing_s),
        ("communication, not hidden", 3, summary.communicating_s - summary.hidden_s),
        ("idle: host, data, reads", OTHER, summary.idle_s),
    )
    step_s = summary.step_s
    return {
        "caption": f"rank {summary.rank}, steps {summary.first_step} to {summary.last_step}, {1e3 * step_s:.4g} ms each",
        "parts": [(name, colour, max(0.0, seconds) / step_s, 1e3 * seconds) for name, colour, seconds in parts],
        "kinds": [(row.name, row.seconds / step_s, 1e3 * row.seconds, row.calls) for row in summary.kinds],
        "traffic": [
            (f"{row.kind} over {row.axis}", row.seconds / step_s, 1e3 * row.seconds, row.calls, format_bytes(row.bytes))
            for row in summary.traffic
        ],
        "operators": [(row.name, row.seconds / step_s, 1e3 * row.seconds, row.calls) for row in summary.operators],
    }


def remark(note: Event) -> str:
    if note["kind"] == "end":
        by = f" by {_signal(note)}" if "signal" in note else ""
        return f"{note['reason']}{by}" + (f", {format_count(note['tokens'])} tokens" if "tokens" in note else "")
    if note["kind"] == "checkpoint" and {"bytes", "stall_s"} <= note.keys():
        return f"{format_bytes(note['bytes'])}, {format_duration(note['stall_s'])} of waiting"
    if note["kind"] == "profile" and {"steps", "directory"} <= note.keys():
        return f"of steps {note['steps'][0]:,} to {note['steps'][-1]:,}, in {note['directory']}"
    if note["kind"] == "incident" and "what" in note:  # its numbers are for programs
        return ", ".join(
            value_in_words(value) for key, value in note.items() if key != "kind" and isinstance(value, str)
        )
    plain = [(key, value) for key, value in note.items() if key not in NOT_SHOWN and not isinstance(value, Mapping)]
    figures = ", ".join(f"{key} {value_in_words(value)}" for key, value in plain)
    return "; ".join(filter(None, [figures, *note.get("drift", [])]))


def _signal(end: Event) -> str:
    return "Ctrl-C (SIGINT)" if end["signal"] == "SIGINT" else str(end["signal"])


def value_in_words(value: Any) -> str:
    """A value as YAML writes it; a list without its brackets."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value_in_words(item)}" for key, item in value.items())
    text = " ".join(map(value_in_words, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 1000 else text[:1000] + " ..."


def number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def clock(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
