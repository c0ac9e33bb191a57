"""One start of the ranks on this machine, watched, and how they failed. Who starts their processes is the caller's: launch/spawn
for one host, launch/elastic for one of several.

Workers die with their agent (a killed torchrun leaves them training).
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from windlass.errors import EXIT_BUG, EXIT_SIGNAL, EXIT_STOPPED
from windlass.launch.restarts import Failure
from windlass.launch.spawn import Exit, end_children
from windlass.output import TAIL_LINES
from windlass.safe_text import say
from windlass.signals import held_back, on_second_ctrl_c
from windlass.supervise.heartbeat import LastBeat, forget_beats, read_beats
from windlass.supervise.host_faults import HostFaults
from windlass.supervise.incident import Incident
from windlass.supervise.resident import HostMemory
from windlass.supervise.watchdog import Deadlines, OtherHosts, Watchdog

SHUTDOWN_S: Final = 600
"""After a signal: how long workers may take for their last step and checkpoint before they are killed."""
SHUTDOWN: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
ERRORS: Final = "WINDLASS_ERRORS"
"""A directory where each of our workers leaves the error that it ends with: the exit code, and what the user is to read."""


def start_ranks(
    run: Callable[[], Mapping[int, Exit]],
    run_directory: Path,
    deadlines: Deadlines | None,
    others: OtherHosts | None = None,
) -> Failure | None:
    """Calls `run`, which starts ranks of this host and waits until all are gone -> how they failed, which has been printed; None
    where they ended well. What `run` raises passes: a signal to this process, after which ranks save. A second Ctrl-C kills
    them. `deadlines`: None watches nothing. `others`: the watchdogs of other hosts."""
    start_s, stalls = time.time(), _Stalls()
    forget_beats(run_directory)
    with _folder_of_errors() as directory, HostFaults() as faults:
        # signals are held back until a worker has installed its own handlers, in its first line
        watchdog = Watchdog(run_directory, deadlines, stalls.end, others=others) if deadlines else None
        with held_back(), on_second_ctrl_c(end_children), watchdog or contextlib.nullcontext():
            try:
                failed = run()
            except BaseException:  # a signal, which may have come while the ranks ended by an error of one
                _print(_errors_in(directory))
                raise
        if not failed:
            return None
        beats = read_beats(run_directory)
        if stalls.found is not None:
            seen = [rank.beat for rank in stalls.found.stacks]
            return _failure(EXIT_SIGNAL + signal.SIGKILL, stalls.found, seen)
        held = watchdog.held if watchdog else []
        incident = _death(*_first(failed), beats, faults.is_out_of_memory(), faults.of_gpus(), held)
        if incident.exit_code == EXIT_STOPPED:  # it stopped for the sake of another rank, which was signalled
            return _failure(EXIT_STOPPED, incident, beats)
        errors = _errors_in(directory)
        _print(errors)
        code = errors[0].code if errors else _explain(incident, run_directory, start_s)
        return _failure(code, incident, beats)


def patience_s() -> float:
    """How long ranks may take to end after a signal. The name in the environment is torchelastic's."""
    return float(os.environ.setdefault(SHUTDOWN, str(SHUTDOWN_S)))


class _Stalls:
    """What the watchdog found, which is printed. All ranks are killed: those that wait for the one that stalls would wait for
    minutes."""

    def __init__(self) -> None:
        self.found: Incident | None = None

    def end(self, incident: Incident, pids: Sequence[int]) -> None:
        self.found = incident
        say("\n".join([f"windlass: {incident.sentence}", *incident.details()]), sys.stderr)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _folder_of_errors() -> Iterator[Path]:
    """Where workers leave their errors, which is in the environment meanwhile."""
    with tempfile.TemporaryDirectory(prefix="windlass-launch-") as folder:
        os.environ[ERRORS] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[ERRORS]


def _first(failures: Mapping[int, Exit]) -> tuple[int, int]:
    """The rank that failed first, and its exit code. Of ranks that ended together, one that was killed comes before those that
    failed because it went silent. SIGTERM is what the others are ended with, and SIGABRT what NCCL ends a rank with whose peer is
    gone."""

    def order(rank: int) -> tuple[bool, float, bool, int]:
        code, timestamp = failures[rank]
        is_killed = code < 0 and code != -signal.SIGABRT
        return code == -signal.SIGTERM, timestamp, not is_killed, rank

    rank = min(failures, key=order)
    return rank, failures[rank].exitcode


def _death(
    rank: int,
    exit_code: int,
    beats: Sequence[LastBeat],
    is_oom: bool,
    gpu_faults: Sequence[str] = (),
    held: Sequence[HostMemory] = (),
) -> Incident:
    """`is_oom`: the kernel has killed some process for want of memory meanwhile. `gpu_faults`: sentences. `held`: what ranks
    held of host memory when they were last seen."""
    beat = next((beat for beat in beats if beat.rank == rank and beat.phase != "start"), None)
    step, phase = (beat.step, beat.phase) if beat else (None, None)
    is_oom = is_oom and exit_code == -signal.SIGKILL
    kept = held if is_oom else ()
    return Incident("died", [rank], step, phase, exit_code, None, is_oom, kept, driver_faults=list(gpu_faults))


def _failure(code: int, incident: Incident, beats: Sequence[LastBeat]) -> Failure:
    """With the position of the stream where the batch of the failed step ends."""
    positions = [beat.position for beat in beats if beat.rank in incident.ranks and beat.step == incident.step]
    return Failure(code, incident, max(positions, default=0))


class _WorkerError(NamedTuple):
    code: int
    text: str


def _errors_in(directory: Path) -> list[_WorkerError]:
    """What workers left in `directory`, the same text once; the first is of the least rank."""
    contents = dict.fromkeys(file.read_text("utf-8") for file in sorted(directory.iterdir()))
    return [_WorkerError(int(code), text) for code, _, text in (content.partition("\n") for content in contents)]


def _print(errors: Sequence[_WorkerError]) -> None:
    for error in errors:
        say(f"windlass: {error.text}", sys.stderr)


def _explain(incident: Incident, run_directory: Path, since_s: float) -> int:
    """Names the rank that failed first, and shows the end of its log if it wrote one (rank 0's is on the terminal already, but
    for the traceback that it ended by) -> the exit code."""
    rank, exit_code = incident.ranks[0], incident.exit_code or EXIT_BUG
    say(f"windlass: {incident.sentence}", sys.stderr)
    log = run_directory / "logs" / f"rank-{rank}.log"
    is_written = (rank or exit_code > 0) and log.is_file() and log.stat().st_mtime >= since_s
    if is_written and (tail := log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]):
        say("\n".join([*tail, f"(the end of {log})"]), sys.stderr)
    return EXIT_SIGNAL - exit_code if exit_code < 0 else exit_code
