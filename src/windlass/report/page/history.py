"""From events.jsonl to what the page draws: valid curves, restarts, where the time of all sessions went, samples by prompt.

A session is one process's life, from its start or resume to the next. Its lines beyond the step that the next session
resumed from are void: those updates are not drawn, and their time counts as `redone`. A step line whose step is not beyond
the one before makes void what it repeats. Reading goes on where it ended, so a page that follows a run reads only what is
new; step lines go into buckets, so a run of a million steps makes a page of the same size as one of ten thousand.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from windlass.report.events import RESTARTS, Event, check_exists, event_of, parse_line, whole_lines
from windlass.report.page.buckets import MAX_BUCKETS, Buckets, Stretch
from windlass.report.page.step_lines import Columns, read_columns

MAX_NOTES: Final = 200  # rows of the list of events: the first and the latest
WATCHED: Final = ("loss", "gradient_norm")  # where they are not finite, there is a mark
MAX_LOST: Final = 40  # marks of a quantity
MAX_TEXT: Final = 4000  # characters of one continuation
STEP_LINE: Final = b'{"kind": "step"'  # as windlass writes it; another writer's lines are parsed to see
KEPT_OF_VALIDATION: Final = ("step", "time", "name", "loss", "perplexity", "bits_per_byte")


class History:
    """A run, as far as it was read. `read_new` reads on."""

    def __init__(self, path: Path, most: int = MAX_BUCKETS):
        """Raises UserError where `path` is not there."""
        check_exists(path)
        self.path, self._most = path, most
        self._reset()

    def _reset(self) -> None:
        self.offset = 0
        self.buckets = Buckets(self._most)
        self.validations: dict[str, list[Event]] = {}
        """Per set, in the order of steps; the latest of a step counts."""
        self.samples: dict[str, list[Event]] = {}
        """Per prompt, in the order of steps."""
        self.resumed_at: list[int] = []
        self.lost: dict[str, list[tuple[int, int]]] = {name: [] for name in WATCHED}
        """Where a quantity was not finite: first and last step of neighbouring lines, the first MAX_LOST stretches."""
        self.lost_beyond: set[str] = set()
        """Quantities of which there were more."""
        self.opening: Event = {}
        """The latest start or resume, which says what runs; empty if there is none."""
        self.end: Event | None = None
        """The last session's end; None while it runs, and when it was killed."""
        self.first_time: float | None = None
        self.last_time = 0.0
        self._notes: list[tuple[Event, bool]] = []  # with whether it is void
        self._num_restarts = self._session_start = 0
        self._closed: dict[str, float] = {}
        self._newest: bytes | Event | None = None  # the session's latest line with a ledger

    @property
    def notes(self) -> list[Event]:
        """Starts, resumes, checkpoints, incidents and ends, void ones included: they happened."""
        return [note for note, _ in self._notes]

    @property
    def valid_notes(self) -> list[Event]:
        return [note for note, is_void in self._notes if not is_void]

    @property
    def last_line(self) -> Event:
        """The latest step line that counts, whole; empty before the first."""
        return self._line_at(int(self.buckets.last_offset[-1])) if len(self.buckets) else {}

    @property
    def ledger(self) -> dict[str, float]:
        """Seconds per cause over all sessions; `redone`: spent on updates that were lost and done again."""
        total = dict(self._closed)
        _add(total, _ledger_of(self._newest))
        return total

    def read_new(self) -> bool:
        """Every whole line that was written since the last call -> whether there was any. A torn last line waits for its
        rest. Raises UserError, with the line's number, where a line is no event."""
        if self.path.stat().st_size < self.offset:  # another file, or one that was cut
            self._reset()
        found = False
        with open(self.path, "rb") as file:
            while lines := whole_lines(file, self.offset):
                self._take(lines)
                found = True
        return found

    def _take(self, lines: Sequence[bytes]) -> None:
        """Lines in the order written: runs of step lines as one, everything else one by one."""
        steps: list[bytes] = []
        starts: list[int] = []
        for line in lines:
            event = None if line.startswith(STEP_LINE) else self._event(line)
            if event is None or event["kind"] == "step":
                steps.append(line)
                starts.append(self.offset)
            elif event["kind"]:
                if event["kind"] in (*RESTARTS, "end"):
                    self._take_steps(steps, starts)
                    steps, starts = [], []
                self._take_event(event)
            self.offset += len(line) + 1
        self._take_steps(steps, starts)

    def _event(self, line: bytes) -> Event:
        return self._parse(line, self.offset) if line.strip() else {"kind": ""}

    def _parse(self, line: bytes, offset: int) -> Event:
        event = event_of(line)
        if event is not None:
            return event
        with open(self.path, "rb") as file:
            number = file.read(offset).count(b"\n") + 1
        return parse_line(line, number, self.path)

    def _take_steps(self, lines: Sequence[bytes], starts: Sequence[int]) -> None:
        if not lines:
            return
        columns = read_columns(lines, lambda line, index: self._parse(line, starts[index]))
        self._see(float(columns.time[0]), float(columns.time.max()))
        later = np.append(np.minimum.accumulate(columns.step[::-1])[::-1][1:], np.inf)
        keep = columns.step < later  # not what is done again, nor what was beyond it
        self._truncate_steps(float(columns.step.min()) - 1)
        self._newest = lines[-1]
        kept = np.flatnonzero(keep).tolist()
        columns = columns if keep.all() else columns.take(keep)
        self._take_lost(columns)
        ends = [starts[index] + len(lines[index]) for index in kept]
        self.buckets.append(columns, [starts[index] for index in kept], ends)

    def _take_lost(self, columns: Columns) -> None:
        """Before the buckets have these lines: a stretch may go on from the last one that they have."""
        before = self.buckets.last_step
        for name, stretches in self.lost.items():
            flags = columns.gaps.get(name, np.zeros(len(columns.step), bool))
            edges = np.flatnonzero(np.diff(flags, prepend=False, append=False)).tolist()
            for begin, end in zip(edges[::2], edges[1::2]):
                first, last = int(columns.step[begin]), int(columns.step[end - 1])
                if begin == 0 and stretches and stretches[-1][1] == before:
                    stretches[-1] = (stretches[-1][0], last)
                elif len(stretches) == MAX_LOST:
                    self.lost_beyond.add(name)
                    break
                else:
                    stretches.append((first, last))

    def _take_event(self, event: Event) -> None:
        kind = event["kind"]
        self._see(event["time"], event["time"])
        if kind == "validation":
            kept: Event = {key: event[key] for key in KEPT_OF_VALIDATION if key in event}
            _insert(self.validations.setdefault(str(event["name"]), []), kept)
            for label, loss in event.get("source_losses", {}).items():
                one = {"step": event["step"], "time": event["time"], "loss": loss}
                _insert(self.validations.setdefault(f"{event['name']}, {label}", []), one)
        elif kind == "sample":
            _insert(self.samples.setdefault(str(event["prompt"]), []), {**event, "text": event["text"][:MAX_TEXT]})
        elif kind not in ("data", "counts"):
            if kind in RESTARTS:
                self._restart(event)
            elif kind == "end":
                self.end = event
            if "ledger" in event:
                self._newest = event
            self._notes.append((event, False))
            if len(self._notes) > MAX_NOTES:
                del self._notes[MAX_NOTES // 4]

    def _restart(self, event: Event) -> None:
        """What the session before did beyond this step is void, and its time was spent for nothing."""
        step = event["step"]
        all_of_it = _ledger_of(self._newest)
        self._truncate(step)
        kept = all_of_it if _step_of(self._newest) <= step else self._kept_ledger()
        _add(self._closed, kept)
        redone = sum(all_of_it.values()) - sum(kept.values())
        _add(self._closed, {"redone": redone} if redone > 0 else {})
        self._newest, self._session_start, self.end, self.opening = None, self.offset, None, event
        if self._num_restarts:
            self.resumed_at = [*self.resumed_at, step][-MAX_NOTES:]
        self._num_restarts += 1

    def _kept_ledger(self) -> dict[str, float]:
        """The ledger of the last line that counts, where the session that ends wrote it; else empty."""
        if not len(self.buckets) or self.buckets.last_offset[-1] < self._session_start:
            return {}
        return _ledger_of(self.last_line)

    def _truncate_steps(self, step: float) -> None:
        if step < self.buckets.last_step:
            self.buckets.truncate(step, self._read_again)
            for name, stretches in self.lost.items():
                self.lost[name] = [(first, min(last, int(step))) for first, last in stretches if first <= step]

    def _truncate(self, step: float) -> None:
        self._truncate_steps(step)
        for groups in (self.validations, self.samples):
            for name, events in list(groups.items()):
                groups[name] = [event for event in events if event["step"] <= step]
                if not groups[name]:
                    del groups[name]
        self._notes = [(note, is_void or note["step"] > step) for note, is_void in self._notes]

    def _read_again(self, stretches: Sequence[Stretch]) -> tuple[Columns, list[int], list[int]]:
        lines: list[bytes] = []
        starts: list[int] = []
        with open(self.path, "rb") as file:
            for stretch in stretches:
                file.seek(stretch.start)
                at = stretch.start
                for line in file.read(stretch.end - stretch.start).split(b"\n"):
                    if line.strip() and (line.startswith(STEP_LINE) or self._parse(line, at)["kind"] == "step"):
                        lines.append(line)
                        starts.append(at)
                    at += len(line) + 1
        columns = read_columns(lines, lambda line, index: self._parse(line, starts[index]))
        return columns, starts, [start + len(line) for start, line in zip(starts, lines)]

    def _line_at(self, offset: int) -> Event:
        with open(self.path, "rb") as file:
            file.seek(offset)
            return self._parse(file.readline().rstrip(b"\n"), offset)

    def _see(self, first: float, last: float) -> None:
        self.first_time = first if self.first_time is None else self.first_time
        self.last_time = max(self.last_time, last)


def read_history(path: Path, most: int = MAX_BUCKETS) -> History:
    """All of a log. Raises UserError where it is not there, or a line is no event."""
    history = History(path, most)
    history.read_new()
    return history


def evenly_spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _insert(events: list[Event], event: Event) -> None:
    """In the order of steps; an event of a step replaces the one before."""
    if events and events[-1]["step"] >= event["step"]:
        events[:] = [earlier for earlier in events if earlier["step"] != event["step"]]
    events.append(event)
    if len(events) > 1 and events[-2]["step"] > event["step"]:
        events.sort(key=lambda one: float(one["step"]))


def _ledger_of(line: bytes | Event | None) -> dict[str, float]:
    event = json.loads(line) if isinstance(line, bytes) else line or {}
    ledger: Mapping[str, float | None] = event.get("ledger") or {}
    return {cause: seconds for cause, seconds in ledger.items() if seconds is not None}


def _step_of(line: bytes | Event | None) -> float:
    event = json.loads(line) if isinstance(line, bytes) else line or {}
    return float(event.get("step", 0))


def _add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for cause, value in seconds.items():
        total[cause] = total.get(cause, 0.0) + value
