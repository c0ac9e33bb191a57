"""The directory of a run: space, speed, locks, and the clock of the server behind it."""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from windlass.doctor.diagnosis import Diagnosis
from windlass.units import GIB, MIB

PROBE_BYTES: Final = 64 * MIB
LONGEST_SAVE_S: Final = 600
"""A checkpoint that takes longer to write is mentioned."""
SKEW_S: Final = 1.0


class Directory(NamedTuple):
    """`free`: bytes. `bytes_per_s`: written and flushed. `has_locks`: whether flock works. `skew_s`: this host's clock less the
    one that dates the files."""

    path: Path
    free: int
    bytes_per_s: float
    has_locks: bool
    skew_s: float


def probe(directory: Path, size: int = PROBE_BYTES) -> Directory:
    """Writes `size` bytes where the run would be (its nearest parent that is there), and removes them. Raises OSError."""
    path = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    found = os.statvfs(path)
    with tempfile.NamedTemporaryFile(dir=path, prefix=".windlass-doctor-") as file:
        block, start_s = os.urandom(MIB), time.monotonic()
        for _ in range(max(1, size // MIB)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = max(size, MIB) / (time.monotonic() - start_s)
        has_locks = False
        with contextlib.suppress(OSError):
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_locks = True
        before_s = time.time()
        os.utime(file.fileno())  # the server's time, where there is one
        skew_s = (before_s + time.time()) / 2 - os.fstat(file.fileno()).st_mtime
    return Directory(path, found.f_bavail * found.f_frsize, rate, has_locks, skew_s)


def check_run_storage(directory: Directory, checkpoint_bytes: int, kept: int) -> Iterator[Diagnosis]:
    """`kept`: checkpoints that are there at once, with the one that is being written."""
    given = f"{directory.path}: {directory.free / GIB:.1f} GiB are free"
    if directory.free < kept * checkpoint_bytes:
        yield Diagnosis(
            "disk-full-soon",
            f"{given}; {kept} checkpoints of {checkpoint_bytes / GIB:.1f} GiB take {kept * checkpoint_bytes / GIB:.1f} GiB",
            "the next checkpoint is written before the oldest is removed",
            "free space, another run.directory, or a smaller checkpoint.keep_last",
        )
    save_s = checkpoint_bytes / directory.bytes_per_s
    if save_s > LONGEST_SAVE_S:
        yield Diagnosis(
            "disk-slow",
            f"{directory.path}: {directory.bytes_per_s / MIB:.0f} MiB/s from one process, so that a checkpoint of "
            f"{checkpoint_bytes / GIB:.1f} GiB takes {save_s / 60:.0f} minutes",
            "a stop is a checkpoint away, and so is the work that a crash costs",
            "a faster file system; ranks write side by side, so more hosts may help",
        )
    if not directory.has_locks:
        yield Diagnosis(
            "no-locks",
            f"{directory.path}: flock fails",
            "a lock keeps two runs out of one directory",
            "mount with locks (NFS: not nolock; Lustre: -o flock)",
        )
    if abs(directory.skew_s) > SKEW_S:
        yield Diagnosis(
            "clock-differs",
            f"this host's clock is {directory.skew_s:+.1f} s from the one that dates the files in {directory.path}",
            "a run compares the times of files and of its own events: status, stalls and schedules go wrong by that",
            "let all hosts follow one time server (chronyc tracking, timedatectl)",
        )
