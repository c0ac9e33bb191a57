"""What a run's own files say of its steps: events.jsonl, resolved.yaml, and the newest profile where somebody asked for one."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from windlass.advice.facts import RunFacts
from windlass.errors import UserError
from windlass.profiling.summary import PROFILES, Summary
from windlass.report.events import RESTARTS, Event, read_events

SCRIPT: Final = "of the script"


@dataclass(frozen=True)
class Observed:
    """The newest session of a run. Times are means per step over the windows behind the warm-up."""

    settings: Mapping[str, Any]
    """resolved.yaml."""
    facts: RunFacts
    script: str
    """Parts that the caller of `train` brought; empty where none."""
    steps: int
    """That the means are of."""
    last_step: int
    step_s: float
    wait_s: float
    """For data, of the rank that waits longest."""
    log_s: float
    """Making and writing lines."""
    tokens_per_s: float
    mfu: float | None
    memory_bytes: int
    operators: int | None
    """Operators in one step; None where the run ended before they were counted."""
    reads: int | None
    """Numbers that the host read back from the device in one step, before it is logged."""
    ledger: Mapping[str, float]
    """Where the time of the whole session went, in seconds."""
    profile: Summary | None

    def setting(self, section: str, key: str) -> Any:
        return (self.settings.get(section) or {}).get(key)

    @property
    def tokens_per_micro_batch(self) -> int:
        return int(self.setting("run", "micro_batch") * self.setting("data", "sequence_length"))

    @property
    def on_gpu(self) -> bool:
        return self.facts.device != "CPU"


def observe(run_directory: Path) -> Observed:
    """Raises UserError where there is no run, and where no step of it is behind the warm-up."""
    events = read_events(run_directory / "events.jsonl")
    begin = max((at for at, event in enumerate(events) if event["kind"] in RESTARTS), default=None)
    session = events[begin:] if begin is not None else []
    facts = RunFacts.of_event(session[0].get("facts")) if session else None
    if facts is None:
        raise UserError(
            f"{run_directory / 'events.jsonl'} holds no start with its facts",
            "advise needs a run that this version started or resumed",
            "resume the run for a few steps, then ask again",
        )
    windows = _steady(session)
    if not windows:
        raise UserError(
            f"the run in {run_directory} has no step after its warm-up",
            "the first three steps of a start compile and allocate, and say nothing about later steps",
            "try again after some more logged steps (report.every_steps)",
        )
    return _observed(run_directory, session, windows, facts)


def _steady(session: Sequence[Event]) -> list[tuple[int, Event]]:
    """(steps of its window, line) of every step line behind the warm-up."""
    found, before = [], session[0]["step"]
    for line in (event for event in session if event["kind"] == "step"):
        if not line["warm_up"]:
            found.append((line["step"] - before, line))
        before = line["step"]
    return found


def _observed(
    run_directory: Path, session: Sequence[Event], windows: Sequence[tuple[int, Event]], facts: RunFacts
) -> Observed:
    steps, (_, last) = sum(number for number, _ in windows), windows[-1]
    settings = _settings(run_directory)
    counts = next((event for event in session if event["kind"] == "counts"), {})
    step_s = sum(number * line["step_s"] for number, line in windows) / steps
    tokens_per_step = settings["run"]["tokens_per_step"]
    return Observed(
        settings=settings,
        facts=facts,
        script=str(session[0].get("derived", {}).get(SCRIPT, "")),
        steps=steps,
        last_step=last["step"],
        step_s=step_s,
        wait_s=sum(number * line["data_wait_s"] for number, line in windows) / steps,
        log_s=sum(line.get("log_s") or 0.0 for _, line in windows) / steps,
        tokens_per_s=tokens_per_step / step_s,
        mfu=None
        if facts.peak_flops is None
        else tokens_per_step / step_s * facts.flops_per_token / (facts.ranks * facts.peak_flops),
        memory_bytes=last["memory_bytes"],
        operators=counts.get("operators"),
        reads=counts.get("reads"),
        ledger=next(event["ledger"] for event in reversed(session) if "ledger" in event),
        profile=_newest_profile(run_directory),
    )


def _settings(run_directory: Path) -> Mapping[str, Any]:
    path = run_directory / "resolved.yaml"
    with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        found = yaml.safe_load(path.read_text("utf-8"))
        if isinstance(found, dict) and {"run", "data", "parallel", "report"} <= found.keys():
            return found
    raise UserError(
        f"{path} is missing or is not a recipe",
        "a run writes its settings there before its first step",
        "name the directory that the recipe calls run.directory, or resume the run, which writes the file again",
    )


def _newest_profile(run_directory: Path) -> Summary | None:
    """The newest profile that `windlass profile` has summed up; None where none can be read."""
    folders = sorted((run_directory / PROFILES).glob("step-*-rank-*"), reverse=True)
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return Summary.read(folder)
    return None
