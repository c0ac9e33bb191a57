"""The charts of the page by name, in the order drawn: which quantities, in which unit, on which axis. page.js draws them.

A chart with nothing to show is left out. With several runs a chart has the lines of all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from windlass.report.page.buckets import COUNT, HIGH, LOW
from windlass.report.page.history import History
from windlass.units import GIB

LOG_RATIO: Final = 20  # a curve whose largest is this many times its smallest is drawn on a log axis
LEAST_WAIT_AXIS: Final = 0.01  # of a step's time: less waiting than this is shown as the little that it is
MAX_LEVELS: Final = 6
Baselines = Mapping[str, Mapping[str, float]]
Runs = Sequence[History]


@dataclass(frozen=True)
class Line:
    """`series`: a quantity of step lines; `points`: a validation set. One of them is given."""

    name: str
    series: str | None = None
    points: str | None = None


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    unit: str
    lines: list[Line]
    form: str = "number"
    """How values are written: number, percent, count (k, M, G) or exponent."""
    zero: bool = False
    """The axis begins at 0."""
    log: bool = False
    """The axis is logarithmic until the reader changes it."""
    smooth: bool = False
    """The page's smoothing applies; single steps stay visible behind it."""
    stack: bool = False
    least_top: float = 0.0
    """The axis reaches at least this far."""
    levels: list[dict[str, Any]] = field(default_factory=list)
    """Dashed lines across the chart: {"name", "y"}."""


def make_charts(runs: Runs, baselines: Baselines) -> list[dict[str, Any]]:
    makers: tuple[Callable[[Runs], Chart], ...] = (
        lambda runs: loss_chart(runs, baselines), source_loss_chart, learning_rate_chart, gradient_norm_chart,
        throughput_chart, mfu_chart, memory_chart, memory_parts_chart, data_wait_chart, rewards_chart, accuracy_chart,
        expert_load_chart, expert_share_chart, router_loss_chart,
    )  # fmt: skip
    charts = [make(runs) for make in makers]
    return [asdict(chart) for chart in charts if chart.lines]


def loss_chart(runs: Runs, baselines: Baselines) -> Chart:
    """Training loss, each validation set, the baselines that have a loss."""
    lines = _held(runs, Line("training", "loss"))
    lines += [Line(name, points=name) for name in dict.fromkeys(name for run in runs for name in run.validations)]
    levels = [
        {"name": f"{name} {row['loss']:.2f}", "y": row["loss"]} for name, row in baselines.items() if "loss" in row
    ]
    unit = "loss per pair" if any(_has(run, "pairs") for run in runs) else "nats per target token"
    return Chart("loss", "Loss", unit, lines, smooth=True, levels=levels[:MAX_LEVELS])


def source_loss_chart(runs: Runs) -> Chart:
    return Chart(
        "source_losses", "Loss per source", "nats per target token", _group(runs, "source_losses"), smooth=True
    )


def learning_rate_chart(runs: Runs) -> Chart:
    lines = _held(runs, Line("learning rate", "learning_rate"))
    return Chart("learning_rate", "Learning rate", "", lines, form="exponent", zero=True)


def gradient_norm_chart(runs: Runs) -> Chart:
    lines = _held(runs, Line("gradient norm", "gradient_norm"))
    is_wide = any(_is_wide(run, "gradient_norm") for run in runs)
    return Chart("gradient_norm", "Gradient norm", "", lines, zero=not is_wide, log=is_wide, smooth=True)


def throughput_chart(runs: Runs) -> Chart:
    lines = _held(runs, Line("tok/s", "tokens_per_s"))
    return Chart("throughput", "Throughput", "tok/s, all devices", lines, form="count", zero=True, smooth=True)


def mfu_chart(runs: Runs) -> Chart:
    lines = _held(runs, Line("MFU", "mfu"))
    return Chart("mfu", "MFU", "of the devices' peak", lines, form="percent", zero=True, smooth=True)


def memory_chart(runs: Runs) -> Chart:
    return Chart("memory", "Memory", "GiB, largest rank", _held(runs, Line("memory", "memory_bytes")), zero=True)


def memory_parts_chart(runs: Runs) -> Chart:
    """What fills memory, one on top of the other; lines where several runs are compared."""
    lines = _group(runs, "memory_parts")
    return Chart("memory_parts", "What fills memory", "GiB, largest rank", lines, zero=True, stack=len(runs) == 1)


def data_wait_chart(runs: Runs) -> Chart:
    lines = _held(runs, Line("data wait", "wait_share"))
    unit, least = "of step time, slowest rank", LEAST_WAIT_AXIS
    return Chart("data_wait", "Waiting for data", unit, lines, form="percent", zero=True, smooth=True, least_top=least)


def rewards_chart(runs: Runs) -> Chart:
    """The chart of pairs: by how much the chosen answer is rewarded over the rejected one."""
    named = (Line("chosen", "reward_chosen"), Line("rejected", "reward_rejected"), Line("margin", "margin"))
    return Chart("rewards", "Rewards of pairs", "reward", _held(runs, *named), smooth=True)


def accuracy_chart(runs: Runs) -> Chart:
    lines = _held(runs, Line("accuracy", "accuracy"))
    return Chart("accuracy", "Pairs ranked right", "of pairs", lines, form="percent", zero=True, smooth=True)


def expert_load_chart(runs: Runs) -> Chart:
    """How many tokens the busiest expert of a layer gets, over the mean of all: of the worst layer, and of the middle one."""
    lines = _held(runs, Line("worst layer", "worst_load"), Line("median", "median_load"))
    return Chart("experts", "Experts' load", "busiest expert, times the mean", lines, zero=True)


def expert_share_chart(runs: Runs) -> Chart:
    lines = _group(runs, "expert_shares")
    return Chart("expert_shares", "Share of tokens per expert", "of tokens", lines, form="percent", zero=True)


def router_loss_chart(runs: Runs) -> Chart:
    lines = _held(runs, Line("router loss", "router_loss"))
    return Chart("router_loss", "Load-balancing loss of the routers", "", lines, smooth=True)


def bits_rows(run: History, baselines: Baselines) -> list[tuple[str, float, bool]]:
    """(name, bits per byte, whether it is the model): the latest of each validation set among the baselines, the best first."""
    ours = [
        (f"{name}, step {lines[-1]['step']:,}", lines[-1]["bits_per_byte"], True)
        for name, lines in run.validations.items()
        if lines[-1].get("bits_per_byte") is not None
    ]
    others = [(name, row["bits_per_byte"], False) for name, row in baselines.items() if "bits_per_byte" in row]
    return sorted(ours + others, key=lambda row: row[1]) if ours and others else []


def chart_scale(series: str) -> float:
    """What a value is multiplied by before it is drawn."""
    return 1 / GIB if series == "memory_bytes" or series.startswith("memory_parts.") else 1.0


def _held(runs: Runs, *lines: Line) -> list[Line]:
    """The lines that have a number in some run."""
    return [line for line in lines if any(_has(run, line.series or "") for run in runs)]


def _group(runs: Runs, group: str) -> list[Line]:
    names = sorted({name for run in runs for name in run.buckets.series if name.startswith(f"{group}.")})
    return _held(runs, *(Line(name.partition(".")[2], name) for name in names))


def _has(run: History, series: str) -> bool:
    rows = run.buckets.series.get(series)
    return rows is not None and bool(rows[COUNT].any())


def _is_wide(run: History, series: str) -> bool:
    rows = run.buckets.series.get(series)
    if rows is None or not (rows[LOW] > 0).any():
        return False
    return bool(np.nanmax(rows[HIGH]) > LOG_RATIO * rows[LOW][rows[LOW] > 0].min())
