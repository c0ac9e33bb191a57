"""The watchdog of ranks that another launcher started (srun, mpirun, torchrun, Flyte): a process beside them, one per host, which
the first rank of the host starts. A thread of a rank would not do: a rank may hang with the interpreter's lock held.

It names a rank that stalls and kills the ranks of its host. Their launcher then sees a failure and does what it does after one:
torchrun starts them again, SLURM's script requeues the job. It also names a rank that was killed, which those launchers do not;
it is not that rank's parent, so it knows no exit code. It ends with the rank that started it, and ignores the signals that ask
the ranks to stop.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from windlass.contract import environment_of_child
from windlass.report.events import EventLog
from windlass.safe_text import say
from windlass.signals import held_back
from windlass.supervise.across_hosts import WAIT_S, SharedWatch
from windlass.supervise.heartbeat import LastBeat, forget_beats, read_beats
from windlass.supervise.host_faults import HostFaults
from windlass.supervise.incident import Incident
from windlass.supervise.watchdog import POLL_S, Deadlines, Watchdog

if TYPE_CHECKING:  # a run on one host needs no store
    from torch.distributed import Store

DEAD_S: Final = 0.25
"""Between two looks at whether a rank died: a launcher ends the others within a second, and the first is to be named."""
LAST_LOOK_S: Final = 5.0
"""How long a rank that fails waits for the watchdog's last look: most fail because another rank has died."""
KILLS: Final = "windlass: the ranks of this host are killed; their launcher sees a failure"
SILENT: Final = (
    "windlass: what the ranks of other hosts do is unknown: the store of rank 0 does not answer, so rank 0 may be the one that "
    "hangs"
)


class Hosts(NamedTuple):
    """The hosts of a run, and the store where their watchdogs meet. `name`: of this start, which no other start has."""

    address: str
    port: int
    name: str
    hosts: int
    number: int
    joined: int = 0

    def connect(self) -> "Store":
        """Raises RuntimeError where nobody answers."""
        from torch.distributed import PrefixStore, TCPStore

        wait = timedelta(seconds=WAIT_S)
        found = TCPStore(self.address, self.port, is_master=False, timeout=wait, wait_for_workers=False)
        return PrefixStore(f"windlass/watch/{self.name}", found)


class Watch(NamedTuple):
    """What the process is given. `stall_s`, `data_s`: see Deadlines. `hosts`: None for a run on one host."""

    run_directory: str
    stall_s: float
    data_s: float
    hosts: Hosts | None = None


@contextlib.contextmanager
def watched_beside(watch: Watch) -> Iterator[None]:
    """Inside, a process looks after the ranks of this host."""
    # -m would import a random.py of the folder that the run is started in, which a script elsewhere does not
    alone = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *alone, "-m", "windlass.supervise.beside", json.dumps([os.getpid(), *watch])]
    environment = {**environment_of_child(), "TORCH_CPP_LOG_LEVEL": "FATAL"}  # a store that is gone is a page of C++
    with held_back():
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=LAST_LOOK_S)  # the end of its input
        raise
    finally:
        if process.poll() not in (None, 0):
            say(f"windlass: the watchdog of this host ended early, with {process.returncode}: nobody watched its ranks")
        process.kill()
        process.communicate()


class WatchBeside:
    """What that process does. `parent`: the rank that started it."""

    def __init__(self, watch: Watch, parent: int, faults: HostFaults, clock: Callable[[], float] = time.monotonic):
        self._run, self._parent, self._faults, self._hosts = Path(watch.run_directory), parent, faults, watch.hosts
        self._others = None if watch.hosts is None else SharedWatch(watch.hosts.connect, lambda: watch.hosts)
        deadlines = Deadlines(watch.stall_s, watch.data_s)
        self.watchdog = Watchdog(self._run, deadlines, lambda incident, pids: None, clock, self._others)
        self._seen: dict[int, int] = {}

    def run(self, leaves: Callable[[float], bool]) -> None:
        """Until a rank stalls, or the rank that started this process leaves. `leaves`: waits for that, for as many seconds."""
        is_last, self._seen = False, _alive(read_beats(self._run))
        while not is_last:
            if (stalled := self.watchdog.look()) is not None:
                self.report(stalled, SILENT if self._others and self._others.is_silent else "", KILLS)
                self._kill()
                return
            for _ in range(round(POLL_S / DEAD_S)):
                if is_last := leaves(DEAD_S) or os.getppid() != self._parent:
                    time.sleep(DEAD_S)  # a rank whose connections are gone may not have ended quite
                if (dead := self.died()) is not None:
                    self.report(dead)
                if is_last:
                    break

    def died(self) -> Incident | None:
        """Ranks that were alive at the last look and died since. A rank that leaves in good order removes its page."""
        beats, before = read_beats(self._run), self._seen
        self._seen = _alive(beats)
        gone = [beat for beat in beats if before.get(beat.rank) == beat.pid and beat.rank not in self._seen]
        if not gone:
            return None
        is_oom, has_begun = self._faults.is_out_of_memory(), gone[0].phase != "start"
        return Incident(
            "died",
            [beat.rank for beat in gone],
            gone[0].step if has_begun else None,
            gone[0].phase if has_begun else None,
            is_out_of_memory=is_oom,
            held=self.watchdog.held if is_oom else (),
            driver_faults=self._faults.of_gpus(),
        )

    def report(self, incident: Incident, *more: str) -> None:
        """On stderr, and in the events of the run: of a stall, which the watchdogs of all hosts report, that of rank 0's host."""
        say("\n".join([f"windlass: {incident.sentence}", *incident.details(), *filter(None, more)]), sys.stderr)
        is_first = incident.cause == "died" or self._hosts is None or self._hosts.number == 0
        if is_first and (file := self._run / "events.jsonl").is_file():
            EventLog(file).write("incident", incident.step or 0, {**incident.fields(), "restart": None})

    def _kill(self) -> None:
        for pid in _alive(read_beats(self._run)).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _alive(beats: Sequence[LastBeat]) -> dict[int, int]:
    """rank -> process."""
    return {beat.rank: beat.pid for beat in beats if beat.is_alive}


def watch_run(text: str) -> None:
    """`text`: the JSON of `watched_beside`."""
    parent, run_directory, stall_s, data_s, hosts = json.loads(text)
    watch = Watch(run_directory, stall_s, data_s, None if hosts is None else Hosts(*hosts))
    forget_beats(Path(watch.run_directory))  # of ranks that were killed before this start
    with HostFaults() as faults:
        WatchBeside(watch, parent, faults).run(lambda seconds: bool(select.select([sys.stdin], [], [], seconds)[0]))
    forget_beats(Path(watch.run_directory))


if __name__ == "__main__":
    watch_run(sys.argv[1])
