"""Where every rank of this host is: a page of shared memory per rank, which any process of the same user can read.

A rank that hangs can no longer say where it is, so it writes that down before every phase. The page is in /dev/shm, in a folder
named after the run directory, whatever started the ranks; only ranks of this host are there.
"""

import contextlib
import faulthandler
import hashlib
import mmap
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self, get_args

Phase = Literal["start", "record", "evaluate", "checkpoint", "data", "step", "update", "end"]
"""In their order between two updates, at one number of completed steps. start: until the first step. step: forward and
backward. update: clipping and the optimizer. end: from the last step until the process has left."""
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
STACK_SIGNAL: Final = signal.SIGUSR2
"""On it a rank's C code writes the stacks of all its threads, whatever its Python is doing."""
POLL_S: Final = 0.5
"""How often a rank looks whether its last collective is asked for."""
# pid, rank, step, position, time, index of the phase, the longest time of each phase
_BEAT: Final = struct.Struct(f"<qqqqdq{len(PHASES)}d")
_REQUESTS: Final = struct.Struct("<q")  # how often the last collective was asked for; behind the beat
# how often a profile was asked for, of how many steps; how many of these were answered; behind both
_PROFILES: Final = struct.Struct("<qqq")
_PROFILES_AT: Final = _BEAT.size + _REQUESTS.size
_PAGE_BYTES: Final = _PROFILES_AT + _PROFILES.size


class LastBeat(NamedTuple):
    """What a rank wrote last."""

    pid: int
    rank: int
    step: int
    """Completed optimizer steps."""
    position: int
    """Where the batch of this step ends in the stream, in samples."""
    time_s: float
    """When, on this host's monotonic clock."""
    phase: Phase
    longest_s: tuple[float, ...] = ()
    """How long each of PHASES has taken at most in this process, 0 where it has not ended yet."""

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs (one that has ended and waits for its parent does not)."""
        return process_state(self.pid) not in ("", "Z", "X")

    @property
    def progress(self) -> tuple[int, int]:
        """Later is greater."""
        return self.step, PHASES.index(self.phase)


def folder_of(run_directory: Path) -> Path:
    """The folder of the pages of a run's ranks on this host."""
    memory = Path("/dev/shm")
    name = hashlib.sha256(str(run_directory.resolve()).encode()).hexdigest()[:16]
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"windlass-{os.getuid()}-{name}"


def read_beats(run_directory: Path) -> list[LastBeat]:
    """The last beat of every rank that has a page here, in the order of ranks; those of dead processes too."""
    beats = []
    for file in sorted(folder_of(run_directory).glob("rank-*.page")):
        with contextlib.suppress(OSError, struct.error, IndexError):
            beats.append(_parse(file.read_bytes()))
    return sorted(beats, key=lambda beat: beat.rank)


def _parse(page: bytes) -> LastBeat:
    """Raises struct.error or IndexError for what is no page."""
    if len(page) != _PAGE_BYTES:
        raise struct.error
    pid, rank, step, position, time_s, phase, *longest_s = _BEAT.unpack_from(page)
    return LastBeat(pid, rank, step, position, time_s, PHASES[phase], tuple(longest_s))


def forget_beats(run_directory: Path) -> None:
    """Removes the pages of ranks that are gone; another command may run beside a run that lives."""
    for beat in read_beats(run_directory):
        if not beat.is_alive:
            for file in _files(folder_of(run_directory), beat.rank):
                file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty, or not there
        folder_of(run_directory).rmdir()


def leave_page(run_directory: Path) -> None:
    """For a process that ends at once, past its own exits: its page says that it has left, so that nobody takes it for dead."""
    folder = folder_of(run_directory)
    for beat in read_beats(run_directory):
        if beat.pid == os.getpid():
            with contextlib.suppress(OSError), _page_file(folder, beat.rank).open("r+b") as page:
                page.write(bytes(8))


def stack_file(folder: Path, rank: int) -> Path:
    """Where faulthandler writes."""
    return folder / f"rank-{rank:06d}.stack"


def collective_file(folder: Path, rank: int) -> Path:
    """Where a rank that was asked writes its last collectives."""
    return folder / f"rank-{rank:06d}.collective"


def _page_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:06d}.page"


def _files(folder: Path, rank: int) -> tuple[Path, Path, Path]:
    """The page first."""
    return _page_file(folder, rank), stack_file(folder, rank), collective_file(folder, rank)


def process_state(pid: int) -> str:
    """The kernel's letter for it: R and S run, D waits for a disk, T is stopped, Z has ended. Empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class Heartbeat:
    """The page of this process's rank. Without a folder (a rank of a caller's process group) it is memory of its own.

    `last_collective`: -> what this rank's threads sent last, to be shown; called from a thread, while the main thread may hang.
    `is_watched`: a launcher looks after it and clears up.
    """

    def __init__(
        self,
        folder: Path | None = None,
        rank: int = 0,
        last_collective: Callable[[], str] = lambda: "",
        is_watched: bool = False,
    ):
        self._rank, self._last_collective, self._done = rank, last_collective, threading.Event()
        self._is_watched = is_watched
        self._step = self._position = self._phase = 0
        self._begun_s, self._longest_s = time.monotonic(), [0.0] * len(PHASES)
        self._files: tuple[Path, ...] = ()
        self._page: mmap.mmap | bytearray = bytearray(_PAGE_BYTES)
        if folder is not None:
            with contextlib.suppress(OSError):  # no shared memory here: nobody looks
                self._open(folder)
        self.beat("start")

    def _open(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or _is_taken(files := _files(folder, self._rank)):
            return
        for file in files:
            file.unlink(missing_ok=True)
        draft = files[0].with_suffix(".draft")
        # a full /dev/shm refuses this write; a write to a mapped page that it has no room for would be a SIGBUS
        draft.write_bytes(bytes(_PAGE_BYTES))
        with draft.open("r+b") as page:
            self._page = mmap.mmap(page.fileno(), _PAGE_BYTES)
        self.beat("start")
        self._stacks = files[1].open("wb", buffering=0)
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        draft.replace(files[0])  # from here on a signal may come
        self._files = files
        threading.Thread(target=self._answer, name="answers-stacks", daemon=True).start()

    def beat(self, phase: Phase, step: int | None = None, position: int | None = None) -> None:
        """Begins `phase`. `step` and `position` stay what they were where none is given."""
        self._step = self._step if step is None else step
        self._position = self._position if position is None else position
        now_s = time.monotonic()
        if now_s - self._begun_s > self._longest_s[self._phase]:
            self._longest_s[self._phase] = now_s - self._begun_s
        self._begun_s, self._phase = now_s, PHASES.index(phase)
        facts = os.getpid(), self._rank, self._step, self._position, now_s, self._phase
        _BEAT.pack_into(self._page, 0, *facts, *self._longest_s)

    def profile_asked(self) -> int:
        """How many steps somebody wants a profile of; 0 where nobody does. Read between two steps."""
        asked, steps, answered = _PROFILES.unpack_from(self._page, _PROFILES_AT)
        return steps if asked != answered else 0

    def profile_answered(self) -> None:
        """Whoever asked finds the profile in the run directory, or none."""
        asked, steps, _ = _PROFILES.unpack_from(self._page, _PROFILES_AT)
        _PROFILES.pack_into(self._page, _PROFILES_AT, asked, steps, asked)

    def _answer(self) -> None:
        seen = 0
        while not self._done.wait(POLL_S):
            (asked,) = _REQUESTS.unpack_from(self._page, _BEAT.size)
            if asked != seen:
                seen = asked
                with contextlib.suppress(OSError):
                    draft = self._files[2].with_suffix(".draft")
                    draft.write_text(self._last_collective(), "utf-8")
                    draft.replace(self._files[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that ended well leaves no page. Where a launcher watches, the page stays until the process ends, since a process
        may hang in its end.
        The page of a run that failed stays for the launcher, as a dead process's: its process may live on, and would be ended by
        STACK_SIGNAL from here on."""
        if error is None and self._is_watched and self._files:
            self.beat("end")
            return
        self._done.set()
        if not self._files:
            return
        _BEAT.pack_into(self._page, 0, 0, *_BEAT.unpack_from(self._page)[1:])  # no process: none may be signalled
        for file in self._files[self._is_watched :]:
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            self._files[0].parent.rmdir()
        faulthandler.unregister(STACK_SIGNAL)
        self._stacks.close()


def _is_taken(files: tuple[Path, ...]) -> bool:
    """Whether another live process has this rank's page: of the run that holds the directory; this one is refused."""
    try:
        beat = _parse(files[0].read_bytes())
    except (OSError, struct.error, IndexError):
        return False
    return beat.is_alive and beat.pid != os.getpid()


def ask_for_collective(run_directory: Path, rank: int) -> None:
    """Lets the rank write down its last collective, within POLL_S if its interpreter still runs."""
    with contextlib.suppress(OSError, ValueError):
        file = _page_file(folder_of(run_directory), rank)
        with file.open("r+b") as page, mmap.mmap(page.fileno(), _PAGE_BYTES) as memory:
            (asked,) = _REQUESTS.unpack_from(memory, _BEAT.size)
            _REQUESTS.pack_into(memory, _BEAT.size, asked + 1)


def ask_for_profile(run_directory: Path, rank: int, steps: int) -> int | None:
    """Lets the rank record its next `steps` steps -> the number of this request, for `is_profile_answered`; None where another
    one is being answered, 0 where the rank has no page."""
    with contextlib.suppress(OSError, ValueError):
        file = _page_file(folder_of(run_directory), rank)
        with file.open("r+b") as page, mmap.mmap(page.fileno(), _PAGE_BYTES) as memory:
            asked, _, answered = _PROFILES.unpack_from(memory, _PROFILES_AT)
            if asked != answered:
                return None
            _PROFILES.pack_into(memory, _PROFILES_AT, asked + 1, steps, answered)
            return int(asked) + 1
    return 0


def is_profile_answered(run_directory: Path, rank: int, request: int) -> bool:
    """Whether the rank has written, or could not; True where it has no page any more."""
    try:
        page = _page_file(folder_of(run_directory), rank).read_bytes()
        return bool(_PROFILES.unpack_from(page, _PROFILES_AT)[2] >= request)
    except (OSError, struct.error):
        return True
