"""Which lines of a run go to a sink, and how many of them have gone.

`sinks/NAME.json` of the run directory keeps that: the bytes of events.jsonl that were sent, and the last step of each kind of
line. A run that resumed does some steps again: a step that was sent is not sent a second time. State is written after the sink
has flushed, so a kill in between repeats what came since the last flush.
"""

import contextlib
import fcntl
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import yaml

from windlass.errors import UserError
from windlass.report.config import SinkName
from windlass.report.events import whole_lines
from windlass.report.sinks.sink import SentRun, Sink

SINKS: Final[tuple[SinkName, ...]] = get_args(SinkName)
EVERY_S: Final = 1.0
WAITS_S: Final = 60.0  # for the follower of an earlier process of the run, which sends its last lines
PREFIXES: Final = {"step": "train", "validation": "validation"}
DEFAULT_SET: Final = "validation"
UNSENT: Final = {"kind", "time", "step", "name", "non_finite"}


def check_packages(sinks: Sequence[SinkName]) -> None:
    """Raises UserError for a sink whose package is not installed."""
    missing = [name for name in sinks if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} as a sink, and {' and '.join(missing)} is not installed",
            "a sink is written by its own package",
            f"pip install 'windlass-lm[{','.join(missing)}]', or leave it out of report.sinks",
        )


def open_sink(name: SinkName, run: SentRun) -> Sink:
    """Raises UserError where the package is missing, or refuses the login."""
    check_packages([name])
    if name == "tensorboard":
        from windlass.report.sinks.to_tensorboard import TensorBoard

        return TensorBoard(run)
    if name == "trackio":
        from windlass.report.sinks.to_trackio import Trackio

        return Trackio(run)
    from windlass.report.sinks.to_wandb import WeightsAndBiases

    return WeightsAndBiases(run)


def sent_run(run_directory: Path, project: str | None = None) -> SentRun:
    """Raises UserError where no run has begun."""
    try:
        run_id = json.loads((run_directory / "run.json").read_text("utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{run_directory} holds no run.json of a run",
            "a sink identifies a run by its id",
            "name the directory that the recipe calls run.directory",
        ) from None
    with contextlib.suppress(OSError, yaml.YAMLError):
        settings = yaml.safe_load((run_directory / "resolved.yaml").read_text("utf-8"))
        given = (settings.get("report") or {}).get("project")
        return SentRun(run_directory, run_id, settings, project or given or "windlass")
    return SentRun(run_directory, run_id, {}, project or "windlass")


class Follower:
    """One sink of one run. `opens` is called when there is something to send."""

    def __init__(self, name: str, run: SentRun, opens: Callable[[SentRun], Sink]):
        self._run, self._opens = run, opens
        self._sink: Sink | None = None
        self._file = run.directory / "sinks" / f"{name}.json"
        self._offset, self._sent = self._state()

    def _state(self) -> tuple[int, dict[str, int]]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._file.read_text("utf-8"))
            if state["run_id"] == self._run.run_id:
                return int(state["offset"]), {str(kind): int(step) for kind, step in state["sent"].items()}
        return 0, {}

    def send_new(self) -> int:
        """Every whole line that was written since -> how many lines were sent."""
        count = 0
        with contextlib.suppress(FileNotFoundError), open(self._run.directory / "events.jsonl", "rb") as file:
            while lines := whole_lines(file, self._offset):
                count += sum(self._send(line) for line in lines)
                self._offset += sum(len(line) + 1 for line in lines)
        if self._sink is not None and count:
            self._sink.flush()
            state = {"run_id": self._run.run_id, "offset": self._offset, "sent": self._sent}
            draft = self._file.with_suffix(".draft")
            draft.write_text(json.dumps(state), "utf-8")
            draft.replace(self._file)
        return count

    def _send(self, line: bytes) -> bool:
        try:
            event = json.loads(line)
            kind, step, time_s = event["kind"], int(event["step"]), float(event["time"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False  # a damaged line: `windlass report` names it
        if kind not in PREFIXES:
            return False
        name = event.get("name", DEFAULT_SET)  # no validation/validation
        prefix = PREFIXES[kind] if name == DEFAULT_SET else f"{PREFIXES[kind]}/{name}"
        if step <= self._sent.get(prefix, -1):
            return False
        values = dict(numbers_of({key: value for key, value in event.items() if key not in UNSENT}, prefix))
        if self._sink is None:
            self._sink = self._opens(self._run)
        self._sink.numbers(step, time_s, values)
        self._sent[prefix] = step
        return True

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def numbers_of(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """(name, number) of all numbers in a line; what is null was not measured, or not finite."""
    for key, item in value.items():
        name = f"{prefix}/{key}"
        if isinstance(item, Mapping):
            yield from numbers_of(item, name)
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield name, float(item)


def send_until(follower: Follower, is_over: Callable[[float], bool]) -> int:
    """Sends until `is_over(seconds)`, which waits that long, and then what is left -> how many lines were sent."""
    count = 0
    try:
        while True:
            over = is_over(EVERY_S)
            count += follower.send_new()
            if over:
                return count
    finally:
        follower.close()


@contextlib.contextmanager
def locked_to_send(name: str, directory: Path, waits_s: float = WAITS_S) -> Iterator[None]:
    """One process sends a run to a sink at a time. Waits for another to end. Raises UserError."""
    folder = directory / "sinks"
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / f"{name}.lock").open("a")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror}",
            "this directory records how far each sink is",
            "make it writable",
        ) from None
    with lock:
        for attempt in range(int(waits_s * 10) + 1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == int(waits_s * 10):
                    raise UserError(
                        f"another process sends {directory} to {name}",
                        "one process sends a run to a sink at a time: no step is sent twice",
                        "wait until it has ended",
                    ) from None
                time.sleep(0.1)
        yield
