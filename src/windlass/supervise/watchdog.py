"""Which ranks stall. A rank stalls where it has begun nothing new for ten times the longest that this run has needed for the same
phase; before a phase was seen once, START_S.

All ranks of a layout wait for one that stalls, so all are late: the one to blame is behind the others, by step and phase, or
else by the number of its last collective.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from windlass.supervise.heartbeat import LastBeat, Phase, read_beats
from windlass.supervise.incident import Incident
from windlass.supervise.places import Place, find_places

START_S: Final = 3600.0
"""For a phase that has not been seen to end: a start that reads weights, a first step that compiles."""
TIMES: Final = 10.0
"""A phase may take this multiple of the longest seen."""
POLL_S: Final = 1.0


class Deadlines:
    """How long a phase may take, learned from beats. `least_s`: what every phase that was seen may take."""

    def __init__(self, least_s: float):
        self._least_s = least_s
        self._longest_s: dict[Phase, float] = {}
        self._last: dict[int, LastBeat] = {}

    def learn(self, beats: Sequence[LastBeat]) -> None:
        """From what ranks wrote since the last call: a phase has taken no longer than from its beat to the newest."""
        for beat in beats:
            before = self._last.get(beat.rank)
            if before is not None and before.pid == beat.pid and before.time_s < beat.time_s:
                took_s = beat.time_s - before.time_s
                self._longest_s[before.phase] = max(self._longest_s.get(before.phase, 0.0), took_s)
            self._last[beat.rank] = beat

    def of(self, phase: Phase) -> float:
        longest_s = self._longest_s.get(phase)
        return max(START_S, self._least_s) if longest_s is None else max(self._least_s, TIMES * longest_s)

    def late(self, beats: Sequence[LastBeat], now_s: float) -> list[LastBeat]:
        """Ranks beyond their deadlines. Those that have ended well wait for nobody."""
        return [beat for beat in beats if beat.phase != "end" and now_s - beat.time_s > self.of(beat.phase)]


def to_blame(places: Sequence[Place]) -> list[int]:
    """The ranks that the others wait for: stopped ones, else those behind by step and phase, else those that have not begun a
    collective of a group where others have; all of them where nothing distinguishes them."""
    if stopped := [place.beat.rank for place in places if place.state]:
        return stopped
    least = min(place.beat.progress for place in places)
    behind = [place.beat.rank for place in places if place.beat.progress == least]
    if len(behind) == len(places):
        behind = _behind_in_a_group(places) or behind
    return behind


def _behind_in_a_group(places: Sequence[Place]) -> list[int]:
    numbers: dict[str, dict[int, int]] = {}
    for place in places:
        for one in place.collectives:
            numbers.setdefault(one.group, {})[place.beat.rank] = one.number
    return sorted({rank for found in numbers.values() for rank in found if found[rank] < max(found.values())})


class Watchdog:
    """Looks after the ranks of a run on this host from a thread, and calls `stop(incident)` once, where one stalls."""

    def __init__(
        self,
        run_directory: Path,
        least_s: float,
        stop: Callable[[Incident], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run_directory, self._stop, self._clock = run_directory, stop, clock
        self._deadlines, self._done = Deadlines(least_s), threading.Event()

    def look(self) -> Incident | None:
        """Once: learns, and -> what stalls."""
        beats = [beat for beat in read_beats(self._run_directory) if beat.is_alive]
        self._deadlines.learn(beats)
        late = self._deadlines.late(beats, now_s := self._clock())
        if not late:
            return None
        places = find_places(self._run_directory, beats, self._clock)
        if not places:
            return None
        ranks = to_blame(places)
        first = next(place.beat for place in places if place.beat.rank == ranks[0])
        waited_s = now_s - first.time_s
        return Incident("stalled", ranks, first.step, first.phase, waited_s=waited_s, places=places)

    def __enter__(self) -> "Watchdog":
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            if (incident := self.look()) is not None and not self._done.is_set():
                self._stop(incident)
                return

    def __exit__(self, *_: object) -> None:
        self._done.set()
