"""From events to what the page draws: valid curves, restarts, where the time of all sessions went, samples by prompt.

A session is one process's life, from its start or resume to the next. Its lines beyond the step that the next session
resumed from are void: those updates are not drawn, and their time counts as `redone`. Everything is bounded, so that a
run of a million steps makes a page of the same size as one of a thousand.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from windlass.report.events import RESTARTS, Event, without_void

MAX_POINTS: Final = 2000  # per curve; more than a screen has columns
MAX_NOTES: Final = 200  # rows of the list of events: the first and the latest
MAX_PROMPTS: Final = 8
MAX_SAMPLES: Final = 6  # continuations shown per prompt, spread over the run
MAX_TEXT: Final = 4000  # characters of one continuation


@dataclass(frozen=True)
class Curve:
    """y against optimizer steps; None is a gap."""

    steps: list[int]
    values: list[float | None]


@dataclass(frozen=True)
class History:
    """A run, from all lines of its events.jsonl."""

    steps: list[Event]
    validations: dict[str, list[Event]]
    """Per set, in the order of steps."""
    samples: dict[str, list[Event]]
    """Per prompt, in the order of steps."""
    resumed_at: list[int]
    notes: list[Event]
    """Starts, resumes, checkpoints, incidents and ends, void ones included: they happened."""
    ledger: dict[str, float]
    """Seconds per cause over all sessions; `redone`: spent on updates that were lost and done again."""
    opening: Event
    """The latest start or resume, which says what runs; empty if there is none."""
    end: Event | None
    """The last session's end; None while it runs, and when it was killed."""
    last_time: float

    def curve(self, name: str) -> Curve:
        return thin([line["step"] for line in self.steps], [line.get(name) for line in self.steps])


def read_history(lines: Sequence[Event]) -> History:
    """`lines`: every line of the log, void ones included, in the order written."""
    valid = without_void(lines)
    restarts = [line for line in lines if line["kind"] in RESTARTS]
    after_restart = lines[lines.index(restarts[-1]) :] if restarts else lines
    ends = [line for line in after_restart if line["kind"] == "end"]
    return History(
        steps=_latest_per_step(line for line in valid if line["kind"] == "step"),
        validations=_grouped(valid, "validation", "name"),
        samples=_samples(valid),
        resumed_at=[line["step"] for line in restarts[1:]],
        notes=_ends_of(
            [line for line in lines if line["kind"] not in ("step", "validation", "sample", "data")], MAX_NOTES
        ),
        ledger=total_ledger(lines),
        opening=restarts[-1] if restarts else {},
        end=ends[-1] if ends else None,
        last_time=max((line["time"] for line in lines), default=0.0),
    )


def thin(steps: list[int], values: list[float | None]) -> Curve:
    """At most MAX_POINTS points. Each bucket keeps its lowest, its highest and one gap, so spikes and NaNs stay
    seen."""
    if len(steps) <= MAX_POINTS:
        return Curve(steps, values)
    num_buckets = MAX_POINTS // 3 - 1
    kept = {0, len(steps) - 1}
    for bucket in range(num_buckets):
        indices = range(bucket * len(steps) // num_buckets, (bucket + 1) * len(steps) // num_buckets)
        measured = [(value, i) for i in indices if (value := values[i]) is not None]
        gaps = [i for i in indices if values[i] is None]
        kept.update([min(measured)[1], max(measured)[1]] if measured else [])
        kept.update(gaps[:1])
    order = sorted(kept)
    return Curve([steps[i] for i in order], [values[i] for i in order])


def total_ledger(lines: Iterable[Event]) -> dict[str, float]:
    """Seconds per cause, summed over sessions; a line's `ledger` is cumulative within its session."""
    total: dict[str, float] = {}
    marks: list[tuple[int, Mapping[str, float]]] = []  # (step, ledger) of the session so far
    for line in lines:
        if line["kind"] in RESTARTS:
            _close_session(total, marks, line["step"])
            marks = []
        elif "ledger" in line:
            marks.append((line["step"], line["ledger"]))
    _close_session(total, marks, None)
    return total


def _close_session(total: dict[str, float], marks: list[tuple[int, Mapping[str, float]]], valid_to: int | None) -> None:
    if not marks:
        return
    kept: Mapping[str, float] = {}
    for step, ledger in marks:
        if valid_to is None or step <= valid_to:
            kept = ledger
    for cause, seconds in kept.items():
        total[cause] = total.get(cause, 0.0) + (seconds or 0.0)
    redone = sum(filter(None, marks[-1][1].values())) - sum(filter(None, kept.values()))
    if redone > 0:
        total["redone"] = total.get("redone", 0.0) + redone


def _latest_per_step(lines: Iterable[Event]) -> list[Event]:
    by_step = {line["step"]: line for line in lines}
    return [by_step[step] for step in sorted(by_step)]


def _grouped(lines: Iterable[Event], kind: str, key: str) -> dict[str, list[Event]]:
    groups: dict[str, list[Event]] = {}
    for line in lines:
        if line["kind"] == kind:
            groups.setdefault(str(line[key]), []).append(line)
    return {name: _latest_per_step(group) for name, group in groups.items()}


def _samples(lines: Iterable[Event]) -> dict[str, list[Event]]:
    groups = _grouped(lines, "sample", "prompt")
    return {
        prompt: [{**sample, "text": sample["text"][:MAX_TEXT]} for sample in spread(samples, MAX_SAMPLES)]
        for prompt, samples in list(groups.items())[-MAX_PROMPTS:]
    }


def spread(items: list[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _ends_of(items: list[Event], most: int) -> list[Event]:
    return items if len(items) <= most else items[: most // 4] + items[-(most - most // 4) :]
