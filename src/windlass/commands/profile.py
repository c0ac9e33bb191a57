"""`windlass profile RUN`: asks a rank of a run that goes on for a profile of its next steps, and says where their time goes.

No torch. The rank only records (windlass.profiling.recorder); the trace is read here, beside the run.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from windlass.errors import UserError
from windlass.profiling.summary import PROFILES, Summary, summarize
from windlass.supervise.heartbeat import LastBeat, ask_for_profile, is_profile_answered, read_beats
from windlass.units import format_bytes

POLL_S: Final = 0.2
MAX_STEPS: Final = 100
"""A trace of more could not be opened."""


def profile(
    run_directory: Path,
    steps: int,
    rank: int | None = None,
    in_json: bool = False,
    say: Callable[[str], None] = lambda _: None,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Lines to print. `rank`: None for the lowest on this host; `say` gets what is under way. Raises UserError where no such
    rank trains here, where another profile is under way, and where the run ends before."""
    if not 1 <= steps <= MAX_STEPS:
        raise UserError(f"--steps {steps}", f"a profile covers 1 to {MAX_STEPS} steps", "try --steps 5")
    beat = _rank_here(run_directory, rank)
    before = _profiles(run_directory, beat.rank)
    directory = _ask(run_directory, beat, steps, before, say, wait)
    summary = summarize(directory)
    summary.write(directory)
    yield from (
        [json.dumps({"directory": str(directory), **asdict(summary)})] if in_json else as_text(summary, directory)
    )


def _rank_here(run_directory: Path, rank: int | None) -> LastBeat:
    beats = [beat for beat in read_beats(run_directory) if beat.is_alive]
    if not beats:
        raise UserError(
            f"no rank of a run in {run_directory} runs on this host",
            "windlass profiles a running job, from a host that runs its ranks",
            "see `windlass status RUN`; of a run on several hosts, ask on one of them",
        )
    found = [beat for beat in beats if rank in (None, beat.rank)]
    if not found:
        here = ", ".join(str(beat.rank) for beat in beats)
        raise UserError(f"--rank {rank}", f"the ranks of this run on this host are {here}", "name one of them")
    return found[0]


def _ask(
    run_directory: Path,
    beat: LastBeat,
    steps: int,
    before: dict[Path, float],
    say: Callable[[str], None],
    wait: Callable[[float], None],
) -> Path:
    """-> the directory that the rank has written."""
    request = ask_for_profile(run_directory, beat.rank, steps) if _is_alive(run_directory, beat) else 0
    if request is None:
        raise UserError(
            f"another profile of rank {beat.rank} is under way",
            "a rank records one at a time",
            "wait for it, or name another rank by --rank",
        )
    say(f"rank {beat.rank} is at step {beat.step}: it records its next {steps} steps")
    while _is_alive(run_directory, beat) and not is_profile_answered(run_directory, beat.rank, request):
        wait(POLL_S)
    if written := _new(run_directory, beat.rank, before):
        return written
    if _is_alive(run_directory, beat):
        raise UserError(
            f"rank {beat.rank} could not write its profile",
            f"a profile is written into {run_directory / PROFILES}",
            "the run's log says why: most often the disk is full",
        )
    raise UserError(
        f"the run in {run_directory} ended before a profile was written",
        "a rank writes its profile after the last step asked for, or where the run ends well",
        "see `windlass status RUN`",
    )


def _is_alive(run_directory: Path, beat: LastBeat) -> bool:
    return any(now.pid == beat.pid and now.rank == beat.rank and now.is_alive for now in read_beats(run_directory))


def _profiles(run_directory: Path, rank: int) -> dict[Path, float]:
    """Directory -> when it was written; summaries that are written later do not count."""
    found = (run_directory / PROFILES).glob(f"step-*-rank-{rank}/facts.json")
    return {facts.parent: facts.stat().st_mtime for facts in found}


def _new(run_directory: Path, rank: int, before: dict[Path, float]) -> Path | None:
    now = _profiles(run_directory, rank)
    return next((directory for directory in sorted(now) if now[directory] != before.get(directory)), None)


def as_text(summary: Summary, directory: Path) -> list[str]:
    """The lines of a terminal."""
    step_s = summary.step_s
    exposed_s = summary.communicating_s - summary.hidden_s

    def share(seconds: float) -> str:
        return f"{1e3 * seconds:10.2f} ms {seconds / step_s:7.1%}"

    steps = summary.last_step - summary.first_step + 1
    lines = [
        f"rank {summary.rank} on {summary.device}, the mean of {steps} steps: {summary.first_step} to {summary.last_step}",
        f"  {'step':<34}{share(step_s)}",
        f"  {'  computing':<34}{share(summary.computing_s)}",
        f"  {'  communication, not hidden':<34}{share(exposed_s)}",
        f"  {'  idle: host, data, reads':<34}{share(summary.idle_s)}",
        "",
        "by kind",
        *(f"  {row.name:<34}{share(row.seconds)} {row.calls:9,.1f} calls" for row in summary.kinds),
        "",
        "longest operators",
        *(f"  {row.name[:33]:<34}{share(row.seconds)} {row.calls:9,.1f} calls" for row in summary.operators[:8]),
    ]
    if summary.traffic:
        hidden = summary.hidden_s / summary.communicating_s if summary.communicating_s else 0.0
        lines += [
            "",
            f"sent and received; {hidden:.0%} of communication is hidden behind computing",
            *(
                f"  {f'{row.kind} over {row.axis}':<34}{share(row.seconds)} {row.calls:9,.1f} calls {format_bytes(row.bytes):>12}"
                for row in summary.traffic
            ),
        ]
    memory = directory / "memory.pickle"
    opened = f"; {memory.name} by pytorch.org/memory_viz" if memory.is_file() else ""
    return [*lines, "", f"{directory / 'trace.json.gz'}: open it in ui.perfetto.dev{opened}"]
