"""The progress line and the final table.

On a terminal the progress line is rewritten in place; anywhere else (a CI log, SLURM's output file, a notebook) each logging
step is one plain line. Nothing runs in the background and the cursor is never hidden, so a killed run leaves the terminal
as it was.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

from rich.console import Console as Terminal
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from windlass.report.events import loss_of
from windlass.safe_text import shown
from windlass.units import format_bytes, format_count, format_duration, three_digits

BAR_WIDTH: Final = 16
LOG_WIDTH: Final = 120  # columns of a table that no terminal limits


class Console:
    """The terminal, or the log file, of a run on rank 0. `device`: what "per device" is called, "GPU" or "process"."""

    def __init__(self, stream: TextIO, *, total_steps: int, device: str):
        self._live = stream.isatty()
        width = None if self._live else LOG_WIDTH
        self._terminal = Terminal(  # rich would hand a notebook its lines past the stream
            file=stream, width=width, highlight=False, soft_wrap=not self._live, force_jupyter=False
        )
        self._total_steps, self._device = total_steps, device
        self._line_open = False

    def step(self, step: int, line: Mapping[str, Any], eta_s: float | None) -> None:
        fields = progress_fields(step, self._total_steps, line, eta_s, self._device)
        if not self._live:
            self._terminal.print(Text(" | ".join(fields)))
            return
        self._erase()
        text = " | ".join(shed(fields, self._terminal.width - 1))
        fits = len(text) + BAR_WIDTH + 1 < self._terminal.width
        drawn = Text.assemble(_bar(step, self._total_steps), " ", text) if fits else Text(text)
        self._terminal.print(drawn, end="", no_wrap=True, overflow="ellipsis")
        self._line_open = True

    def validation(self, step: int, line: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        text = f"step {step}: {line['name']} loss {_number(line['loss'], '.4f')}"
        if line["perplexity"] is not None or "accuracy" not in line:
            text += f", perplexity {_number(line['perplexity'], '.4g')}"
        if "accuracy" in line:
            text += f", accuracy {line['accuracy']:.1%}, margin {line['margin']:.4g}"
        if line["bits_per_byte"] is not None:
            text += f", {_number(line['bits_per_byte'], '.3f')} bits per byte"
        if first["step"] != step:
            text += f" (at step {first['step']}: loss {_number(first['loss'], '.4f')})"
        text += "".join(f"; {label} {loss:.4f}" for label, loss in line.get("source_losses", {}).items())
        self.say(text, style="cyan")

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """One plain line for what happened; a sample is set apart, because its text has lines of its own."""
        if kind == "sample":
            self.say(f"step {step}: sample", style="magenta")
            self.say("\n".join(f"    | {row}" for row in f"{fields['prompt']}{fields['text']}".split("\n")))
            return
        if kind in ("data", "counts"):  # for the ledger and for `windlass advise`; what is worth a line is an incident
            return
        if kind == "checkpoint":
            stall = format_duration(fields["stall_s"])
            self.say(f"step {step}: checkpoint, {format_bytes(fields['bytes'])}, {stall} of waiting", style="green")
            return
        if kind == "incident":
            words = [value for value in fields.values() if isinstance(value, str)]  # numbers are for events.jsonl
            self.say(f"step {step}: incident: {', '.join(words)}", style="bold red")
            return
        figures = ", ".join(
            f"{name} {_short(value)}" for name, value in fields.items() if not isinstance(value, Mapping | list)
        )
        self.say(f"step {step}: {kind}{' ' + figures if figures else ''}", style="green")

    def say(self, text: str, style: str = "") -> None:
        """A line above the progress line: nothing in `text` is markup, or drives the terminal."""
        self._erase()
        self._terminal.print(Text(shown(text), style=style))

    def summary(
        self,
        step: int,
        line: Mapping[str, Any],
        validations: Mapping[str, list[dict[str, Any]]],
        baselines: Mapping[str, Mapping[str, float]],
    ) -> None:
        """The table at the end. `baselines`: name -> {"bits_per_byte": ...} and, where it has one, {"loss": ...} in
        nats."""
        self._erase()
        by = f" by {line['signal']}" if "signal" in line else ""
        self._terminal.print(Text(f"{line['reason']}{by} at step {step} of {self._total_steps}", style="bold"))
        if validations or baselines:
            self._terminal.print(_quality_table(validations, baselines))
        rates = _rates(line, "{}, {} tok/s per {}", self._device)
        mfu = "" if line["mfu"] is None else f", MFU {line['mfu']:.1%}"
        self._terminal.print(Text(f"{rates}{mfu}, without warm-up and pauses"))
        total_s = sum(line["ledger"].values()) or 1.0
        parts = [
            f"{cause.replace('_', ' ')} {format_duration(seconds)} ({seconds / total_s:.0%})"
            for cause, seconds in line["ledger"].items()
            if seconds > 0
        ]
        if parts:  # a resume that had nothing left to do spent no time
            self._terminal.print(Text("time: " + ", ".join(parts)))

    def _erase(self) -> None:
        if self._line_open:
            self._terminal.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._line_open = False


def shed(fields: Sequence[str], width: int) -> list[str]:
    """The fields that a line of `width` columns holds, whole: those without a value go first, then the last; the first one
    stays."""
    kept = list(fields)
    while len(" | ".join(kept)) > width and len(kept) > 1:
        kept.remove(next((field for field in kept if field.endswith(" n/a")), kept[-1]))
    return kept


def progress_fields(
    step: int, total_steps: int, line: Mapping[str, Any], eta_s: float | None, device: str
) -> list[str]:
    """The figures of one logging step, most wanted first; as wide as in other steps, so that the bars are aligned."""
    width = len(str(total_steps))
    wait = line["data_wait_s"] / line["step_s"]
    return [
        f"step {step:>{width}}/{total_steps}",
        f"loss {_number(line['loss'], '.4f')}",
        *([f"accuracy {line['accuracy']:.1%} margin {line['margin']:.3g}"] if "accuracy" in line else []),
        *([f"skipped {line['skipped']}"] if line.get("skipped") else []),
        _rates(line, "{} ({} per {})", device),
        f"ETA {'n/a' if eta_s is None else format_duration(eta_s):>6}",
        f"norm {'n/a' if line['gradient_norm'] is None else three_digits(line['gradient_norm']):>5}",
        f"lr {line['learning_rate']:.2e}",
        *([f"MFU {line['mfu']:.1%}"] if line["mfu"] is not None else []),
        f"{format_bytes(line['memory_bytes']):>9}",
        f"wait {wait:>5.1%}",
        *([f"router {line['router_loss']:.3g}"] if line.get("router_loss") else []),
        *([f"busiest expert {max(line['expert_loads']):.2g}x"] if line.get("expert_loads") else []),
    ]


def _rates(line: Mapping[str, Any], form: str, device: str) -> str:
    """The rate of all devices and that of each; one figure where the two are equal, as on one device."""
    total, each = line["tokens_per_s"], line["tokens_per_s_per_gpu"]
    return _rate(total) if total == each else form.format(_rate(total), format_count(each, is_fixed=True), device)


def _quality_table(
    validations: Mapping[str, list[dict[str, Any]]], baselines: Mapping[str, Mapping[str, float]]
) -> Table:
    """A column for each figure that any row has. The lowest loss of a set is marked where it is not the last."""
    are_pairs = any("pairs" in result for results in validations.values() for result in results)
    rows: list[tuple[str, str, Mapping[str, Any]]] = []
    for name, results in validations.items():
        lowest = min(results, key=loss_of)
        for result in results:
            is_marked = result is lowest and loss_of(result) < loss_of(results[-1])
            rows.append((f"{name} (lowest)" if is_marked else name, str(result["step"]), result))
    rows += [(f"baseline: {name}", "", baseline) for name, baseline in baselines.items()]
    figures = {
        ("loss per pair" if are_pairs else "loss (nats)"): ("loss", ".4f"),
        "perplexity": ("perplexity", ".4g"),
        "bits per byte": ("bits_per_byte", ".3f"),
    }
    figures = {title: one for title, one in figures.items() if any(row.get(one[0]) is not None for *_, row in rows)}
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("set")
    for title in ("step", *figures):
        table.add_column(title, justify="right")
    for label, step, row in rows:
        cells = [_number(row[name], form) if name in row else "" for name, form in figures.values()]
        table.add_row(label, step, *cells, style="" if step else "dim")
    return table


def _bar(step: int, total_steps: int) -> Text:
    filled = round(BAR_WIDTH * step / total_steps)
    return Text.assemble(("━" * filled, "green"), ("━" * (BAR_WIDTH - filled), "bright_black"))


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _rate(tokens_per_s: float | None) -> str:
    return f"{'n/a' if tokens_per_s is None else format_count(tokens_per_s, is_fixed=True)} tok/s"


def _short(value: Any) -> str:
    return format(value, ".4g") if isinstance(value, float) else str(value)
