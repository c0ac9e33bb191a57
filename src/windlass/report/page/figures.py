"""The charts of the page, as plotly's own JSON: {"data": traces, "layout": what differs from the page's base layout}.

Colours of text and grid are set by page.js from the page's style, so that light and dark both read well.
"""

import statistics
from collections.abc import Mapping
from typing import Any, Final

from windlass.report.page.history import Curve, History
from windlass.units import GIB

BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#3b82f6", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#94a3b8"
SETS: Final = (ORANGE, GREEN, PURPLE, RED, "#06b6d4", "#ec4899")
CAUSES: Final = {
    "training": BLUE,
    "warm_up": PURPLE,
    "data_wait": ORANGE,
    "evaluate": GREEN,
    "checkpoint": "#06b6d4",
    "redone": RED,
}
MAX_MARKS: Final = 40  # vertical lines of one kind in a chart
LOG_RATIO: Final = 20  # a curve whose largest is this many times its smallest is drawn on a log axis
LEAST_FOR_MEAN: Final = 50  # points; a running mean of fewer would bend the curve
LEAST_WAIT_AXIS: Final = 0.01  # of a step's time: less waiting than this is shown as the little that it is

Figure = dict[str, Any]


def make_figures(history: History, baselines: Mapping[str, Mapping[str, float]]) -> dict[str, Figure]:
    """Chart name -> figure; a chart with nothing to show is left out."""
    figures = {
        "loss": loss_figure(history, baselines),
        "bits": bits_figure(history, baselines),
        "throughput": throughput_figure(history),
        "learning_rate": _simple(history, "learning_rate", GREEN, {"tickformat": ".1e", "rangemode": "tozero"}),
        "gradient_norm": norm_figure(history),
        "memory": memory_figure(history),
        "data_wait": wait_figure(history),
        "rewards": rewards_figure(history),
        "experts": experts_figure(history),
        "ledger": ledger_figure(history.ledger),
    }
    return {name: figure for name, figure in figures.items() if figure["data"]}


def loss_figure(history: History, baselines: Mapping[str, Mapping[str, float]]) -> Figure:
    """Training loss of single steps and its running mean, each validation set, the baselines that have a loss."""
    curve = history.curve("loss")
    data = []
    if any(value is not None for value in curve.values):
        is_long = len(curve.steps) >= LEAST_FOR_MEAN
        data.append(_line(curve, "training, one step", BLUE, width=1 if is_long else 2, opacity=0.5 if is_long else 1))
        if is_long:
            data.append(_line(running_mean(curve), "training, running mean", BLUE, width=2))
    for index, (name, lines) in enumerate(history.validations.items()):
        points = Curve([line["step"] for line in lines], [line["loss"] for line in lines])
        data.append({**_line(points, name, SETS[index % len(SETS)], width=2.5), "mode": "lines+markers"})
    last = max((trace["x"][-1] for trace in data if trace["x"]), default=0)
    for name, baseline in baselines.items() if data else ():
        if "loss" in baseline:
            level = Curve([0, last], [baseline["loss"]] * 2)
            data.append(_line(level, f"{name} {baseline['loss']:.2f}", GREY, width=1.5, dash="dash"))
    unit = "loss per pair" if any("pairs" in line for line in history.steps) else "nats per token"
    layout = {**_titles("step", unit), "showlegend": True, **_marks(history, labelled=True)}
    return {"data": data, "layout": layout}


def running_mean(curve: Curve) -> Curve:
    """Over the neighbouring 5 points, or 2 % of all where that is more, half before and half after; gaps stay gaps."""
    reach = max(2, len(curve.values) // 100)
    values: list[float | None] = []
    for at, value in enumerate(curve.values):
        near = [one for one in curve.values[max(0, at - reach) : at + reach + 1] if one is not None]
        values.append(None if value is None else sum(near) / len(near))
    return Curve(curve.steps, values)


def bits_figure(history: History, baselines: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bars of bits per byte: the latest of each validation set among the baselines, the best on top."""
    rows = [
        (f"{name}, step {lines[-1]['step']}", lines[-1]["bits_per_byte"], BLUE)
        for name, lines in history.validations.items()
        if lines[-1].get("bits_per_byte") is not None
    ]
    others = [(name, row["bits_per_byte"], GREY) for name, row in baselines.items() if "bits_per_byte" in row]
    if not rows or not others:
        return {"data": [], "layout": {}}
    rows += others
    rows.sort(key=lambda row: -row[1])
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [row[0] for row in rows],
        "x": [row[1] for row in rows],
        "marker": {"color": [row[2] for row in rows]},
        "text": [f"{row[1]:.2f}" for row in rows],
        "textposition": "auto",
        "hoverinfo": "skip",
    }
    layout = {
        "xaxis": {"title": {"text": "bits per byte, less is better"}, "rangemode": "tozero"},
        "yaxis": {"automargin": True, "ticksuffix": "  "},
        "bargap": 0.35,
    }
    return {"data": [bar], "layout": layout}


def throughput_figure(history: History) -> Figure:
    """Tokens per second, warm-up left out; where the peak is known, a second scale reads the same curve as MFU."""
    steady = [line for line in history.steps if not line.get("warm_up")]
    shown = [{**line, "mfu": None, "tokens_per_s": None} if line.get("warm_up") else line for line in history.steps]
    if not any(line.get("tokens_per_s") for line in steady):
        return {"data": [], "layout": {}}
    thinned = _of(history, shown)
    curve = thinned.curve("tokens_per_s")
    data = [_line(curve, "tok/s", BLUE, width=2)]
    top = 1.1 * max(value for value in curve.values if value is not None)
    layout: dict[str, Any] = {"yaxis": {"title": {"text": "tok/s, all devices"}, "range": [0, top]}, **_marks(history)}
    mfu = next((line for line in steady if line.get("mfu") and line.get("tokens_per_s")), None)
    if mfu is not None:
        scale = {"overlaying": "y", "side": "right", "tickformat": ".0%", "showgrid": False}
        layout["yaxis2"] = {**scale, "title": {"text": "MFU"}, "range": [0, top * mfu["mfu"] / mfu["tokens_per_s"]]}
        data.append({**_line(thinned.curve("mfu"), "MFU", BLUE, width=0), "yaxis": "y2"})
    return {"data": data, "layout": layout}


def norm_figure(history: History) -> Figure:
    measured = [line["gradient_norm"] for line in history.steps if line.get("gradient_norm")]
    wide = bool(measured) and max(measured) > LOG_RATIO * min(measured)
    return _simple(history, "gradient_norm", PURPLE, {"type": "log"} if wide else {"rangemode": "tozero"})


def memory_figure(history: History) -> Figure:
    curve = history.curve("memory_bytes")
    in_gib = Curve(curve.steps, [None if value is None else value / GIB for value in curve.values])
    return _one(history, in_gib, "memory", ORANGE, {"title": {"text": "GiB, largest rank"}, "rangemode": "tozero"})


def wait_figure(history: History) -> Figure:
    lines = [
        {**line, "share": line["data_wait_s"] / line["step_s"] if line.get("step_s") else None}
        for line in history.steps
        if line.get("data_wait_s") is not None
    ]
    curve = _of(history, lines).curve("share")
    top = max(LEAST_WAIT_AXIS, *(1.1 * share for share in curve.values if share is not None), 0.0)
    axis = {"title": {"text": "of step time, slowest rank"}, "tickformat": ".1%", "range": [0, top]}
    return _one(history, curve, "data wait", RED, axis)


def experts_figure(history: History) -> Figure:
    """How many tokens the busiest expert of a layer gets, over the mean of all: of the worst layer, and of the middle one."""
    lines = [
        {**line, "worst": max(loads), "median": statistics.median(loads)}
        for line in history.steps
        if (loads := line.get("expert_loads"))
    ]
    shown = _of(history, lines)
    data = [
        _line(shown.curve("worst"), "worst layer", RED, width=2),
        _line(shown.curve("median"), "median", BLUE, width=2),
    ]
    axis = {"title": {"text": "busiest expert, times the mean"}, "rangemode": "tozero"}
    return {"data": data if lines else [], "layout": {"yaxis": axis, "showlegend": True, **_marks(history)}}


def rewards_figure(history: History) -> Figure:
    """Of pairs: by how much the chosen answer is rewarded over the rejected one, and in what share of pairs it is."""
    lines = [line for line in history.steps if line.get("margin") is not None]
    shown = _of(history, lines)
    named = (("reward_chosen", BLUE), ("reward_rejected", RED), ("margin", PURPLE))
    data = [_line(shown.curve(name), name.removeprefix("reward_"), colour, width=2) for name, colour in named]
    data.append({**_line(shown.curve("accuracy"), "accuracy", GREY, width=1, dash="dot"), "yaxis": "y2"})
    right = {"overlaying": "y", "side": "right", "tickformat": ".0%", "range": [0, 1.02], "showgrid": False}
    layout = {"yaxis": {"title": {"text": "reward"}}, "yaxis2": right, "showlegend": True, **_marks(history)}
    return {"data": data if lines else [], "layout": layout}


def ledger_figure(ledger: Mapping[str, float]) -> Figure:
    """One bar, a piece per cause."""
    total_s = sum(ledger.values())
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": cause.replace("_", " "),
            "x": [seconds / total_s],
            "y": [""],
            "marker": {"color": CAUSES.get(cause, GREY)},
            "hovertemplate": f"{cause.replace('_', ' ')}: {seconds:,.1f} s, %{{x:.1%}}<extra></extra>",
        }
        for cause, seconds in sorted(ledger.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    axis = {"tickformat": ".0%", "range": [0, 1]}
    return {"data": data, "layout": {"barmode": "stack", "xaxis": axis, "yaxis": {"visible": False}}}


def _titles(x: str, y: str) -> Figure:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}


def _simple(history: History, name: str, colour: str, axis: dict[str, Any]) -> Figure:
    return _one(history, history.curve(name), name.replace("_", " "), colour, axis)


def _one(history: History, curve: Curve, name: str, colour: str, axis: dict[str, Any]) -> Figure:
    if not any(value is not None for value in curve.values):
        return {"data": [], "layout": {}}
    return {"data": [_line(curve, name, colour, width=2)], "layout": {"yaxis": axis, **_marks(history)}}


def _of(history: History, lines: list[dict[str, Any]]) -> History:
    return History(**{**vars(history), "steps": lines})


def _line(curve: Curve, name: str, colour: str, *, width: float, opacity: float = 1.0, dash: str = "solid") -> Figure:
    return {
        "type": "scatter",
        "mode": "lines" if len(curve.steps) > 1 else "markers",
        "x": curve.steps,
        "y": curve.values,
        "name": name,
        "opacity": opacity,
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"color": colour, "size": 6},
        "connectgaps": False,
    }


def _marks(history: History, labelled: bool = False) -> Figure:
    """Vertical lines: grey where a session resumed, red where the loss or the norm was not finite."""
    bad = [line["step"] for line in history.steps if {"loss", "gradient_norm"} & set(line.get("non_finite", ()))]
    marks = [(step, GREY, "resumed") for step in history.resumed_at[-MAX_MARKS:]]
    marks += [(step, RED, "not finite") for step in bad[:MAX_MARKS]]
    shapes = [
        {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "layer": "below",
         "line": {"color": colour, "width": 1, "dash": "dot"}}
        for at, colour, _ in marks
    ]  # fmt: skip
    notes = [
        {"x": at, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": "left", "text": word, "showarrow": False,
         "textangle": 90, "font": {"size": 10, "color": colour}}
        for at, colour, word in marks
    ]  # fmt: skip
    return {"shapes": shapes, "annotations": notes if labelled and len(notes) <= 10 else []}
