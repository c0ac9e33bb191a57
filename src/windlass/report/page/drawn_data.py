"""What page.js draws of a run: plain JSON, numbers of five digits.

    {"name", "offset", "revision", "from",
     "grid":   {"first", "step", "tokens", "time"},            per bucket; time in seconds since the run's first line
     "series": {quantity: {"y", "low", "high", "low_at", "high_at", "gaps"}},
     "points": {validation set: {"step", "y"}},
     "marks":  [[step, kind, text], ..., [first step, "not finite", text, quantity, last step]]}

`low`, `high` and their steps (counted from the bucket's first) are left out where each bucket holds one line. "gaps" lists the
buckets after which a curve is interrupted. A page that follows a run sends back `revision` and how many buckets it has; as long
as the revision is the same, only the buckets from its last one on are sent: "from" is the first of them.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from windlass.report.events import Event
from windlass.report.page.buckets import COUNT, GAPS, HIGH, HIGH_AT, LOW, LOW_AT, MAX_BUCKETS, SUM, Buckets
from windlass.report.page.charts import chart_scale
from windlass.report.page.history import History, evenly_spread
from windlass.report.page.step_lines import Floats

MAX_MARKS: Final = 60  # of one kind
UNDRAWN: Final = ("tokens_per_s_per_gpu", "pairs")  # proportional to another, or no curve
DIGITS: Final = 5


def drawn_data(
    history: History, name: str, *, most: int = MAX_BUCKETS, revision: int = -1, rows: int = 0
) -> dict[str, Any]:
    """`revision`, `rows`: what the page has. Whole where it has nothing that still holds."""
    buckets = history.buckets if len(history.buckets) <= most else history.buckets.thinned(most)
    begin = max(0, rows - 1) if revision == buckets.revision else 0
    seconds = buckets.time[begin:] - (history.first_time or 0.0)
    return {
        "name": name,
        "offset": history.offset,
        "revision": buckets.revision,
        "from": begin,
        "grid": {
            "first": _whole(buckets.first[begin:]),
            "step": _whole(buckets.last[begin:]),
            "tokens": _whole(buckets.tokens[begin:]),
            "time": [None if math.isnan(one) else round(one, 1) for one in seconds.tolist()],
        },
        "series": {
            series: _curve(buckets, series, begin)
            for series, held in sorted(buckets.series.items())
            if series not in UNDRAWN and held[COUNT].any()
        },
        "points": {name: _points(events) for name, events in history.validations.items()},
        "marks": marks_of(history),
    }


def marks_of(history: History) -> list[list[Any]]:
    """[step, kind, text], of each kind at most MAX_MARKS: of what happened, what counts."""
    notes = history.valid_notes
    found: list[list[Any]] = [[step, "resumed", "resumed"] for step in history.resumed_at[-MAX_MARKS:]]
    found += _lost(history)
    for kind in ("checkpoint", "incident"):
        found += [[note["step"], kind, kind] for note in notes if note["kind"] == kind][-MAX_MARKS:]
    found += [[note["step"], "end", str(note.get("reason", "end"))] for note in notes if note["kind"] == "end"][
        -MAX_MARKS:
    ]
    steps = sorted({event["step"] for events in history.validations.values() for event in events})
    return found + [[step, "validation", "validation"] for step in evenly_spread(steps, MAX_MARKS)]


def _lost(history: History) -> list[list[Any]]:
    """The stretches in which each quantity was not finite; a quantity's last one says so where there are more."""
    found: list[list[Any]] = []
    for name, stretches in history.lost.items():
        for first, last in stretches:
            until = f" until step {last}" if last > first else ""
            found.append([first, "not finite", f"{name.replace('_', ' ')} not finite{until}", name, last])
        if name in history.lost_beyond:
            found[-1][2] += "; later ones are not marked"
    return found


def _curve(buckets: Buckets, series: str, begin: int) -> dict[str, Any]:
    rows, first = buckets.series[series][:, begin:], buckets.first[begin:]
    scale = chart_scale(series)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: dict[str, Any] = {"y": _short(rows[SUM] / rows[COUNT] * scale)}
    if (buckets.series[series][COUNT] > 1).any():
        found |= {"low": _short(rows[LOW] * scale), "high": _short(rows[HIGH] * scale)}
        found |= {"low_at": _whole(rows[LOW_AT] - first), "high_at": _whole(rows[HIGH_AT] - first)}
    return {**found, "gaps": (np.flatnonzero(rows[GAPS]) + begin).tolist()}


def _points(events: Sequence[Event]) -> dict[str, Any]:
    """At most MAX_BUCKETS validations of a set; the best and the worst among them."""
    if len(events) > MAX_BUCKETS:
        known = sorted((event for event in events if event["loss"] is not None), key=lambda event: event["loss"])
        kept = evenly_spread(events, MAX_BUCKETS - 2) + known[:1] + known[-1:]
        events = sorted({event["step"]: event for event in kept}.values(), key=lambda event: event["step"])
    return {"step": [event["step"] for event in events], "y": _short([event["loss"] for event in events])}


def _short(values: Sequence[float | None] | Floats) -> list[float | None]:
    numbers = values.tolist() if isinstance(values, np.ndarray) else values
    return [None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}") for value in numbers]


def _whole(values: Floats) -> list[int | None]:
    return [None if math.isnan(value) else int(value) for value in values.tolist()]
