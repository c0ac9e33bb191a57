"""events.jsonl: what happened in a run, one JSON object per line, appended and never rewritten.

Every line has `kind`, `time` (Unix seconds) and `step` (completed optimizer steps). Console, page and every other
view are made from these lines. Kinds: start, step, validation, checkpoint, resume, incident, sample, data (shards
that came while the run read them), profile, counts, end.

No line holds the secret of a URL or a control character: a log is shown on terminals.

JSON has no NaN: a non-finite number is written as null and named in the line's `non_finite` ({"loss": "nan"}), so
that a reader can distinguish "diverged" from "not measured".

A line is one write of an O_APPEND file, so a kill leaves at most the last line torn; it is cut off at the next opening.
After a `resume` at step s (or a second `start`, where no checkpoint was found), earlier lines with step > s are void:
those updates were lost with the process and are done again.
"""

import contextlib
import errno
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, get_args

from windlass.errors import UserError
from windlass.safe_text import escaped_json, say, without_secrets

Kind = Literal[
    "start", "step", "validation", "checkpoint", "resume", "incident", "sample", "data", "profile", "counts", "end"
]
KINDS: Final[tuple[str, ...]] = get_args(Kind)
CHUNK: Final = 4 << 20  # bytes read at a time
KEPT_LINES: Final = 10_000
"""Lines that wait for a disk, about 6 MB; the oldest go first."""
RESTARTS: Final = ("start", "resume")
SAVED: Final = b'{"kind": "checkpoint"'  # how the line of a committed checkpoint begins
FIGURES: Final = ("loss", "gradient_norm", "learning_rate", "tokens_per_s", "perplexity", "bits_per_byte")
"""What is a number, or null, in each line that has it."""
Event = dict[str, Any]


class EventLog:
    """The writing end. One process (rank 0) holds it.

    A disk that is full, or a directory that was deleted, does not end a run: lines wait in memory, at most KEPT_LINES of them,
    and are written before the next one that can be. `say` gets a sentence when that begins and when it ends. `disk_filled`: the
    disk has filled; whoever acts on it sets it back. `on_event` is called with a copy of every line; where it raises, the run
    goes on without it."""

    def __init__(self, path: Path, say: Callable[[str], None] = say, on_event: Callable[[Event], None] | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(path)
        self._path, self._say, self._on_event = path, say, on_event
        self._waiting: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._is_failing = self.disk_filled = False

    def write(self, kind: Kind, step: int, fields: Mapping[str, Any]) -> None:
        """Append one line; it is in the kernel's hands, safe from a kill of this process, when the call returns, if it can be."""
        assert kind in KINDS, kind
        if kind != "sample":  # what a model wrote is kept as it is
            fields = without_secrets(fields)
        line: Event = {"kind": kind, "time": time.time(), "step": step, **fields}
        non_finite: dict[str, str] = {}
        line = {name: _finite(value, name, non_finite) for name, value in line.items()}
        if non_finite:
            line["non_finite"] = non_finite
        text = escaped_json(json.dumps(line, ensure_ascii=False, allow_nan=False))
        self._waiting.append(text.encode() + b"\n")
        self._show(text)
        try:
            self._write_waiting()
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                self.disk_filled = error.errno in (errno.ENOSPC, errno.EDQUOT)
                self._say(
                    f"{self._path} cannot be written ({error.strerror}): training goes on, and the lines wait in memory"
                )
            return
        if self._is_failing:
            self._is_failing = False
            self._say(f"{self._path} is written again")

    def _show(self, line: str) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(json.loads(line))
        except Exception as error:
            self._on_event = None
            self._say(f"on_event raised {type(error).__name__}: {error}; the run goes on, and it is not called again")

    def _write_waiting(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted under the run
        with open(self._path, "ab", buffering=0) as file:  # unbuffered: one line is one write
            while self._waiting:
                end, data = file.seek(0, os.SEEK_END), self._waiting[0]
                if file.write(data) != len(data):
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
                self._waiting.popleft()


def _finite(value: Any, name: str, non_finite: dict[str, str]) -> Any:
    """`value` with every NaN and infinity replaced by None; each is noted in `non_finite` under its dotted name."""
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[name] = str(value)
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item, f"{name}.{key}", non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{name}.{index}", non_finite) for index, item in enumerate(value)]
    return value


def _mend_last_line(path: Path) -> None:
    """Cut what follows the last newline: the half-written line of a killed process."""
    if not path.is_file():  # EventLog says what is wrong with anything else
        return
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    if keep < len(data):
        os.truncate(path, keep)


def read_lines(path: Path) -> list[Event]:
    """Every whole line, void ones included. A torn last line is left out; any other bad line is a UserError."""
    check_exists(path)
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn, or nothing
    return [parse_line(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]


def check_exists(path: Path) -> None:
    """Raises UserError where there is no log."""
    if not path.is_file():
        raise UserError(
            given=f"{path} does not exist",
            rule="a run directory holds events.jsonl from its first moment on",
            change="name the directory that the recipe calls run.directory",
        )


def parse_line(line: bytes, number: int, path: Path) -> Event:
    """Raises UserError, with the line's number, where it is no event."""
    event = event_of(line)
    if event is None:
        raise UserError(
            given=f"{path}, line {number}: {line[:60]!r}",
            rule="every line is a JSON object with kind, time and step, and its figures are numbers",
            change=f"delete line {number}; windlass itself never writes such a line",
        )
    return event


def event_of(line: bytes) -> Event | None:
    """None where the line is no event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not {"kind", "time", "step"} <= event.keys():
        return None
    figures = [event["time"], event["step"], *(event[name] for name in FIGURES if event.get(name) is not None)]
    return event if all(isinstance(one, int | float) for one in figures) else None


def without_void(lines: Iterable[Event]) -> list[Event]:
    """The lines that still count: at each start or resume at step s, earlier lines with step > s are dropped."""
    valid: list[Event] = []
    for line in lines:
        if line["kind"] in RESTARTS:
            valid = [earlier for earlier in valid if earlier["step"] <= line["step"]]
        valid.append(line)
    return valid


def read_events(path: Path) -> list[Event]:
    """The lines of events.jsonl that still count, in the order written."""
    return without_void(read_lines(path))


def last_saved_step(path: Path) -> int:
    """The last step whose checkpoint was committed; 0 where none was, and where the file cannot be read."""
    step = 0
    if path.is_file():  # to read a pipe may take for ever
        with contextlib.suppress(OSError), path.open("rb") as lines:
            for line in lines:
                if line.startswith(SAVED):
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        step = int(json.loads(line)["step"])
    return step


def past_validations(path: Path) -> dict[str, list[Event]]:
    """The first, the lowest and the last of each set's validations that still count; empty where the file cannot be read, which
    ends no run. A line without a name or a loss is left out."""
    past: dict[str, list[Event]] = {}
    with contextlib.suppress(UserError, OSError):
        for line in read_events(path):
            if line["kind"] == "validation" and {"name", "loss"} <= line.keys():
                past[line["name"]] = first_lowest_last([*past.get(line["name"], ()), line])
    return past


def first_lowest_last(results: list[Event]) -> list[Event]:
    """The results of one set that show how a run went, in order: the first, the lowest in loss and the last."""
    lowest = min(results, key=loss_of)
    return [one for at, one in enumerate(results) if at in (0, len(results) - 1) or one is lowest]


def loss_of(result: Event) -> float:
    """The loss of a validation; infinite where it was not finite."""
    loss = result["loss"]
    return float(loss) if loss is not None and math.isfinite(loss) else math.inf


def whole_lines(file: BinaryIO, offset: int) -> list[bytes]:
    """About CHUNK bytes from `offset`, up to a line's end; empty where no line has ended since."""
    file.seek(offset)
    data = b""
    while more := file.read(CHUNK):
        data += more
        if (end := data.rfind(b"\n")) >= 0:
            return data[:end].split(b"\n")
    return []
