"""One start of the ranks on this machine, under torchelastic (what torchrun is made of), and how they failed.

Known flaws of torchelastic are fenced: the rendezvous store is not shared between incarnations
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE: with gloo the first restart worked 3 of 8 times without it, 15 of 15 with), each start has
an agent of its own, so that nothing of the one before is left, and workers die with their agent (a killed torchrun leaves them
training).
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from windlass.errors import EXIT_BUG, EXIT_SIGNAL, EXIT_STOPPED
from windlass.launch.restarts import Failure
from windlass.output import TAIL_LINES
from windlass.safe_text import say
from windlass.signals import SIGNALS, held_back, on_second_ctrl_c
from windlass.supervise.gpu_health import new_faults, read_all
from windlass.supervise.heartbeat import LastBeat, forget_beats, read_beats
from windlass.supervise.incident import Incident, oom_kills
from windlass.supervise.kernel_log import read_faults
from windlass.supervise.watchdog import Deadlines, OtherHosts, Watchdog

SHUTDOWN_S: Final = 600
"""After a signal: how long workers may take for their last step and checkpoint before they are killed."""
FAULTS_S: Final = 60
"""Faults of a GPU's driver that are older than this are not why a rank died."""
SHUTDOWN: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
ALONE: Final = {
    "min_nodes": 1,
    "max_nodes": 1,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:0",
    "local_addr": "127.0.0.1",
}
"""A world of this host alone, whose own name need not resolve."""
ERRORS: Final = "WINDLASS_ERRORS"
"""A directory where each of our workers leaves the error that it ends with: the exit code, and what the user is to read."""


def start_ranks(
    command: list[str],
    num_ranks: int,
    run_directory: Path,
    deadlines: Deadlines | None,
    meeting: Mapping[str, Any] = MappingProxyType({}),
    others: OtherHosts | None = None,
) -> Failure | None:
    """Runs `command` on `num_ranks` workers of this host until all are gone -> how they failed, which has been printed; None
    where they ended well. Raises torchelastic's SignalException for a signal to this process, after which ranks save; a second
    Ctrl-C kills them. `deadlines`: None watches nothing. `meeting`: LaunchConfig's fields for a world of several hosts; its
    rendezvous raises RendezvousError. `others`: their watchdogs."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic")  # the launcher says what happened itself
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.setdefault(SHUTDOWN, str(SHUTDOWN_S))
    start_s, stalls, kills, health = time.time(), _Stalls(), oom_kills(), read_all()
    forget_beats(run_directory)
    with _folder_of_errors() as (errors, logs):
        config = LaunchConfig(
            nproc_per_node=num_ranks,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),  # its own directory would stay behind
            signals_to_handle=",".join(number.name for number in SIGNALS),
            **(meeting or {**ALONE, "run_id": f"windlass-{os.getpid()}"}),
        )
        try:
            # signals are held back until a worker has installed its own handlers, in its first line
            watchdog = Watchdog(run_directory, deadlines, stalls.end, others=others) if deadlines else None
            with held_back(), on_second_ctrl_c(end_children), watchdog or contextlib.nullcontext():
                elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as failed:
            beats = read_beats(run_directory)
            if stalls.found is not None:
                seen = [place.beat for place in stalls.found.places]
                return _failure(EXIT_SIGNAL + signal.SIGKILL, stalls.found, seen)
            incident = _death(*_first(failed.failures), beats, oom_kills() > kills, new_faults(health, read_all()))
            if incident.exit_code == EXIT_STOPPED:  # it stopped for the sake of another rank, which was signalled
                return _failure(EXIT_STOPPED, incident, beats)
            return _failure(_print_errors(errors) or _explain(incident, run_directory, start_s), incident, beats)
    return None


def end_children() -> None:
    """Kills the processes that this one has started: a rank that hangs at its end has no page among the heartbeats any more."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


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
def _folder_of_errors() -> Iterator[tuple[Path, Path]]:
    """Where workers leave their errors, which is in the environment meanwhile, and torchelastic its logs."""
    with tempfile.TemporaryDirectory(prefix="windlass-launch-") as folder:
        errors, logs = Path(folder, "errors"), Path(folder, "logs")
        errors.mkdir()
        os.environ[ERRORS] = str(errors)
        try:
            yield errors, logs
        finally:
            del os.environ[ERRORS]


def _silence(package: str) -> None:
    """No log lines of `package`, each of whose modules has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _first(failures: dict[int, Any]) -> tuple[int, int]:
    """The rank that failed first, and its exit code. torchelastic knows the second of an error that a rank has recorded; of any
    other rank it knows only when it looked, with all of them gone. So a rank that was killed comes before those that fail by
    its silence, unless torchelastic killed it itself, SHUTDOWN_S after the first; SIGTERM is what it ends the others with, and
    SIGABRT what NCCL ends a rank with whose peer is gone."""
    patience_s = float(os.environ.get(SHUTDOWN, SHUTDOWN_S))
    earliest = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, int, int]:
        code, late = failures[rank].exitcode, failures[rank].timestamp - earliest >= patience_s
        is_killed = code < 0 and code != -signal.SIGABRT
        return code == -signal.SIGTERM, late, not is_killed, failures[rank].timestamp, rank

    rank = min(failures, key=order)
    return rank, failures[rank].exitcode


def _death(
    rank: int, exit_code: int, beats: Sequence[LastBeat], is_oom: bool, gpu_faults: Sequence[str] = ()
) -> Incident:
    """`is_oom`: the kernel has killed some process for want of memory meanwhile. `gpu_faults`: what NVML says that is new."""
    beat = next((beat for beat in beats if beat.rank == rank and beat.phase != "start"), None)
    step, phase = (beat.step, beat.phase) if beat else (None, None)
    is_oom = is_oom and exit_code == -signal.SIGKILL
    faults = [*(fault.sentence for fault in read_faults(time.monotonic() - FAULTS_S) or ()), *gpu_faults]
    return Incident("died", [rank], step, phase, exit_code, is_out_of_memory=is_oom, driver_faults=faults)


def _failure(code: int, incident: Incident, beats: Sequence[LastBeat]) -> Failure:
    """With the place in the stream where the batch of the failed step ends."""
    places = [beat.place for beat in beats if beat.rank in incident.ranks and beat.step == incident.step]
    return Failure(code, incident, max(places, default=0))


def _print_errors(errors: Path) -> int:
    """Prints the errors that workers left there, the same text once -> the exit code of the first, 0 where there is none."""
    found = dict.fromkeys(file.read_text("utf-8") for file in sorted(errors.iterdir()))
    codes = []
    for code, _, text in (content.partition("\n") for content in found):
        say(f"windlass: {text}", sys.stderr)
        codes.append(int(code))
    return codes[0] if codes else 0


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
