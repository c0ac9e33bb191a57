"""Which ranks stall. A rank stalls where it has begun nothing new for ten times the longest that this run has needed for the same
phase, and for a least time; before a phase was seen to end, UNSEEN_S. What ends by a deadline of its own is left to that: the
start, whose rendezvous has one, and waiting for data.

Ranks measure their phases, and a watchdog that looks once a second believes them what is shorter than that. Forward, backward and
update wait for nothing but other ranks, so where they take milliseconds they need not be waited for as long as a disk.

All ranks of a layout wait for one that stalls, so all are late: the one to blame is behind the others, by step and phase, or
else by the number of its last collective, or else it is at work where the others wait for its word. While it is in time none of
them is late.
"""

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from windlass.status import read_status
from windlass.supervise.heartbeat import PHASES, LastBeat, Phase, read_beats
from windlass.supervise.incident import Incident
from windlass.supervise.rank_stacks import Collective, RankStack, find_stacks
from windlass.supervise.resident import HostMemory, held_by_process

UNSEEN_S: Final = 3600.0
"""For a phase that has not been seen to end: a first step that compiles, a first validation."""
TIMES: Final = 10.0
"""A phase may take this multiple of the longest seen. Chosen, not measured: a busy host or file system makes a phase
a few times as long, and a run that hangs loses ten of its longest phases at most."""
SHORT: Final[tuple[Phase, ...]] = ("step", "update")
SHORT_S, SHORT_TIMES = 60.0, 1000.0
"""Phases of SHORT touch no disk. On one host each may take SHORT_S, or SHORT_TIMES the longest seen if that is more, where this
is less than other phases may. Chosen, not measured."""
POLL_S: Final = 1.0
WAITING: Final = re.compile(r"windlass/ranks/(tree|host_page)\.py:")
"""A frame of a rank that waits for what another one says."""
LEAVE_S: Final = 300.0
"""How long a rank may take to leave once the run has ended: its sinks are sent the last lines, a minute each."""
PAUSE_S: Final = 10.0
"""Between two looks of a watchdog that was stopped itself: by Ctrl-Z, most likely with its ranks."""


class Deadlines:
    """How long a phase may take, learned from beats. `least_s`: what every phase that was seen may take. `data_s`: the deadline
    that waiting for data has by itself."""

    def __init__(self, least_s: float, data_s: float = 0.0):
        self._least_s: dict[Phase, float] = dict.fromkeys(PHASES, least_s)
        self._least_s |= {"start": math.inf, "data": max(least_s, data_s), "end": math.inf}
        self._since_s = -math.inf
        self._longest_s: dict[Phase, float] = {}
        self._last: dict[int, LastBeat] = {}

    def begin_anew(self, now_s: float) -> None:
        """What was begun before `now_s` counts from there on: nobody could go on meanwhile."""
        self._since_s = now_s

    def learn(self, beats: Sequence[LastBeat]) -> None:
        """From what ranks wrote since the last call: a phase has taken no longer than from its beat to the newest."""
        for beat in beats:
            before = self._last.get(beat.rank)
            if before is not None and before.pid == beat.pid and before.time_s < beat.time_s:
                took_s = beat.time_s - max(before.time_s, self._since_s)
                self._longest_s[before.phase] = max(self._longest_s.get(before.phase, 0.0), took_s)
            self._last[beat.rank] = beat
            # what a rank measures is longer where it was stopped: only what is too short to be seen is taken from it
            for phase, took_s in zip(PHASES, beat.longest_s):
                if 0 < took_s <= POLL_S:
                    self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), took_s)

    def of(self, phase: Phase, is_one_host: bool = False) -> float:
        """`is_one_host`: of a rank that waits for no rank that this watchdog cannot see."""
        longest_s, least_s = self._longest_s.get(phase), self._least_s[phase]
        if longest_s is None:
            return max(least_s, UNSEEN_S)
        if is_one_host and phase in SHORT:
            least_s = min(least_s, max(SHORT_S, SHORT_TIMES * longest_s))
        return max(least_s, TIMES * longest_s)

    def late(self, beats: Sequence[LastBeat], now_s: float, is_one_host: bool = False) -> list[LastBeat]:
        """The ranks that are beyond their deadlines, among those that the others wait for."""
        timed = [beat for beat in beats if self.of(beat.phase) < math.inf]
        least = min((beat.progress for beat in timed), default=None)
        behind = (beat for beat in timed if beat.progress == least)
        return [beat for beat in behind if now_s - max(beat.time_s, self._since_s) > self.of(beat.phase, is_one_host)]


def to_blame(stacks: Sequence[RankStack]) -> list[int]:
    """The ranks that the others wait for: stopped ones, else those behind by step and phase, else those that have not begun a
    collective of a group where others have, else those that do not wait for a word of another rank (ranks/tree, ranks/host_page);
    all of them where nothing distinguishes them."""
    if stopped := [stack.beat.rank for stack in stacks if stack.is_stopped]:
        return stopped
    least = min(stack.beat.progress for stack in stacks)
    behind = [stack.beat.rank for stack in stacks if stack.beat.progress == least]
    if len(behind) == len(stacks):
        at_work = [stack.beat.rank for stack in stacks if not any(map(WAITING.match, stack.frames))]
        behind = _behind_in_a_group(stacks) or at_work or behind
    return behind


def _behind_in_a_group(stacks: Sequence[RankStack]) -> list[int]:
    """A rank may be late in one group because it waits in another: such ones are left out, where others remain. Sends and
    receives are not counted by all ranks of a group alike, so they say nothing."""
    groups: dict[str, dict[int, Collective]] = {}
    for stack in stacks:
        for one in stack.collectives:
            if not one.is_between_two:
                groups.setdefault(one.group, {})[stack.beat.rank] = one
    behind, waiting = set(), set()
    for last in groups.values():
        most = max(one.number for one in last.values())
        late = {rank for rank, one in last.items() if one.number < most}
        behind |= late
        waiting |= {rank for rank, one in last.items() if late and one.number == most and not one.is_done}
    return sorted(behind - waiting or behind)


class OtherHosts(Protocol):
    """The watchdogs of a run's other hosts."""

    def is_asked(self) -> bool:
        """Whether one of them has found a rank late."""
        ...

    def exchange(self, own: Sequence[RankStack]) -> list[RankStack]:
        """The stacks of this host's ranks -> those of all hosts."""
        ...


class Watchdog:
    """Looks after the ranks of a run on this host from a thread, and calls `stop(incident, pids)` once, where one stalls or does
    not leave; `pids`: of this host's ranks. `others`: of a run on several hosts; all of them then come to the same incident.
    `held`: what ranks held of host memory when they were last seen."""

    def __init__(
        self,
        run_directory: Path,
        deadlines: Deadlines,
        stop: Callable[[Incident, Sequence[int]], None],
        clock: Callable[[], float] = time.monotonic,
        others: OtherHosts | None = None,
    ):
        self._run_directory, self._deadlines, self._stop, self._clock = run_directory, deadlines, stop, clock
        self._others = others
        self._done, self._looked_s, self._begun = threading.Event(), clock(), time.time()
        self._ended_s: float | None = None
        self.held: list[HostMemory] = []

    def look(self) -> Incident | None:
        """Once: learns, and -> what stalls."""
        beats, now_s = [beat for beat in read_beats(self._run_directory) if beat.is_alive], self._clock()
        if now_s - self._looked_s > PAUSE_S:
            self._deadlines.begin_anew(now_s)
            self._ended_s = None
        self._looked_s = now_s
        self._deadlines.learn(beats)
        self._weigh(beats)
        if left := self._lingering(beats, now_s):
            return left
        is_asked = bool(beats) and self._others is not None and self._others.is_asked()
        if not is_asked and not self._deadlines.late(beats, now_s, self._others is None):
            return None
        stacks = find_stacks(self._run_directory, beats, self._clock)
        if stacks and self._others is not None:
            stacks = self._others.exchange(stacks)
        if not stacks:
            return None
        ranks = to_blame(stacks)
        first = next(stack for stack in stacks if stack.beat.rank == ranks[0])
        return Incident("stalled", ranks, first.beat.step, first.beat.phase, waited_s=first.age_s, stacks=stacks)

    def _weigh(self, beats: Sequence[LastBeat]) -> None:
        found = {held.rank: held for beat in beats if (held := held_by_process(beat.rank, beat.pid))}
        self.held = list(({held.rank: held for held in self.held} | found).values())

    def _lingering(self, beats: Sequence[LastBeat], now_s: float) -> Incident | None:
        """Ranks that still are at their end, LEAVE_S after rank 0 has written what became of the run."""
        at_end = [beat for beat in beats if beat.phase == "end"]
        status = read_status(self._run_directory) if at_end else None
        if status is None or status.time < self._begun or status.state not in ("finished", "stopped"):
            return None
        self._ended_s = now_s if self._ended_s is None else self._ended_s
        if now_s - self._ended_s <= LEAVE_S or not (stacks := find_stacks(self._run_directory, at_end, self._clock)):
            return None
        ranks = [stack.beat.rank for stack in stacks]
        return Incident("lingers", ranks, status.step, "end", waited_s=now_s - self._ended_s, stacks=stacks)

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            if (incident := self.look()) is not None and not self._done.is_set():
                self._stop(incident, [beat.pid for beat in read_beats(self._run_directory) if beat.is_alive])
                return

    def __exit__(self, *_: object) -> None:
        self._done.set()
