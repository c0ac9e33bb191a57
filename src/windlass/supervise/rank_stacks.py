"""The Python line, the process state and the last collective of every rank on this host.

faulthandler answers a signal from C, so a main thread that waits in a collective answers too; only a stopped process, or one
that the kernel holds, does not. py-spy reads the memory of those, where it is installed (extra `stacks`) and allowed to.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from windlass.supervise.heartbeat import (
    STACK_SIGNAL,
    LastBeat,
    ask_for_collective,
    collective_file,
    folder_of,
    process_state,
    stack_file,
)

WAIT_S: Final = 5.0
"""How long ranks may take to answer: on a busy host one that computes does so late, and no answer says who is behind."""
PY_SPY_S: Final = 5.0
"""For all ranks together, which are read side by side. With WAIT_S less than other hosts wait (stalls)."""
_FRAME: Final = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_STOPPED: Final = {"T": "stopped (SIGSTOP)", "t": "held by a debugger"}
_STATES: Final = {**_STOPPED, "D": "waits for a disk or a network file system (state D)"}


class Collective(NamedTuple):
    """The last one that a rank has begun in a process group. `number`: counted by all ranks of the group alike; of a send or
    receive (`is_between_two`), by each rank for itself."""

    group: str
    number: int
    what: str
    is_done: bool
    is_between_two: bool = False

    def __str__(self) -> str:
        return f"number {self.number} of group {self.group}, {self.what}{'' if self.is_done else ', not done'}"


@dataclass(frozen=True)
class RankStack:
    """Where a rank is. `frames`: of its main thread, the innermost first, as "file:line function"; empty where it did not answer.
    `collectives`: of each process group the last one, the newest first. `state`: why it cannot go on, by the kernel; empty where
    it may. `memory_gib`: resident. `host`: its name, where several are looked at."""

    beat: LastBeat
    age_s: float
    frames: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    state: str = ""
    memory_gib: float = 0.0
    host: str = ""

    @property
    def is_stopped(self) -> bool:
        """By somebody, from outside."""
        return self.state in _STOPPED.values()

    @property
    def line(self) -> str:
        """The innermost frame, and the innermost of windlass where that is another."""
        if not self.frames:
            return self.state or "no answer"
        ours = next((frame for frame in self.frames if "windlass/" in frame), "")
        shown = self.frames[0] + (f" <- {ours}" if ours and ours != self.frames[0] else "")
        return f"{self.state}; {shown}" if self.state else shown

    def text(self) -> str:
        """Lines for the terminal."""
        beat, on = self.beat, f" on {self.host}" if self.host else ""
        lines = [
            f"rank {beat.rank}{on}: step {beat.step}, {beat.phase} for {self.age_s:.0f} s, pid {beat.pid}, "
            f"{self.memory_gib:.1f} GiB",
            f"  at {self.line}",
        ]
        if self.collectives:
            lines.append(f"  last collective: {self.collectives[0]}")
        return "\n".join(lines)

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        beat = self.beat
        return {
            "rank": beat.rank,
            "pid": beat.pid,
            "step": beat.step,
            "phase": beat.phase,
            "age_s": round(self.age_s, 1),
            "at": self.line,
            "frames": self.frames,
            "collective": str(self.collectives[0]) if self.collectives else None,
            "memory_gib": round(self.memory_gib, 2),
            **({"host": self.host} if self.host else {}),
        }

    def to_json(self) -> list[Any]:
        """The whole, for `from_json` on another host."""
        return [self.beat, self.age_s, self.frames, self.collectives, self.state, self.memory_gib, self.host]

    @classmethod
    def from_json(cls, fields: list[Any]) -> "RankStack":
        """What `to_json` gave, after JSON."""
        beat, age_s, frames, collectives, *rest = fields
        known = LastBeat(*beat)._replace(longest_s=tuple(beat[-1]))
        return cls(known, age_s, tuple(frames), tuple(Collective(*one) for one in collectives), *rest)


def find_stacks(
    run_directory: Path,
    beats: Sequence[LastBeat],
    clock: Callable[[], float] = time.monotonic,
    wait_s: float = WAIT_S,
) -> list[RankStack]:
    """Asks all ranks at once -> where each one is. Ranks whose process has ended are left out."""
    folder, alive = folder_of(run_directory), [beat for beat in beats if beat.is_alive]
    before = {beat.rank: _size(stack_file(folder, beat.rank)) for beat in alive}
    for beat in alive:
        collective_file(folder, beat.rank).unlink(missing_ok=True)
        ask_for_collective(run_directory, beat.rank)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(beat.pid, STACK_SIGNAL)
    end_s = time.monotonic() + wait_s
    sizes = before
    while time.monotonic() < end_s:
        time.sleep(0.05)
        last, sizes = sizes, {beat.rank: _size(stack_file(folder, beat.rank)) for beat in alive}
        # the main thread is written last
        is_written = sizes == last and all(sizes[rank] > before[rank] for rank in sizes)
        if is_written and all(collective_file(folder, beat.rank).is_file() for beat in alive):
            break
    stacks = [_stack(folder, beat, before[beat.rank], clock()) for beat in alive]
    silent = _read_from_outside([stack.beat.pid for stack in stacks if not stack.frames])
    return [stack if stack.frames else replace(stack, frames=silent[stack.beat.pid]) for stack in stacks]


def _stack(folder: Path, beat: LastBeat, before: int, now_s: float) -> RankStack:
    frames: tuple[str, ...] = ()
    with contextlib.suppress(OSError), stack_file(folder, beat.rank).open("rb") as file:
        file.seek(before)
        frames = main_frames(file.read().decode("utf-8", "replace"))
    collectives: tuple[Collective, ...] = ()
    with contextlib.suppress(OSError, ValueError, TypeError):
        collectives = tuple(
            Collective(*one) for one in json.loads(collective_file(folder, beat.rank).read_text("utf-8"))
        )
    state = _STATES.get(process_state(beat.pid), "")
    return RankStack(beat, max(0.0, now_s - beat.time_s), frames, collectives, state, _resident_gib(beat.pid))


def main_frames(dump: str) -> tuple[str, ...]:
    """The frames of the main thread, which is the last in faulthandler's text on all threads."""
    _, _, last = dump.strip().rpartition("\n\n")
    found = (_FRAME.fullmatch(line) for line in last.splitlines())
    return tuple(f"{_short(match[1])}:{match[2]} {match[3]}" for match in found if match)


def _read_from_outside(pids: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """By py-spy, side by side: the frames of each main thread; none where it is not installed, or may not read that process."""
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    started, end_s = {}, time.monotonic() + PY_SPY_S
    for pid in pids if program else ():
        command = [str(program), "dump", "--nonblocking", "--json", "--pid", str(pid)]
        with contextlib.suppress(OSError):
            started[pid] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    found = dict.fromkeys(pids, tuple[str, ...]())
    for pid, process in started.items():
        with process, contextlib.suppress(subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            try:
                said, _ = process.communicate(timeout=max(0.0, end_s - time.monotonic()))
            finally:
                process.kill()
            (main,) = [thread for thread in json.loads(said) if thread["os_thread_id"] == pid]
            frames = main["frames"]
            found[pid] = tuple(f"{_short(frame['filename'])}:{frame['line']} {frame['name']}" for frame in frames)
    return found


def _short(path: str) -> str:
    """The last three parts of a path: enough to know the file by."""
    return "/".join(path.split("/")[-3:])


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _resident_gib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
