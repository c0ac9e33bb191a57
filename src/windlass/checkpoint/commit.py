"""The commit protocol on a POSIX file system. No torch.

    checkpoints/.tmp-00000100-<token>/   a draft: every rank writes and fsyncs its own file into it
        rank-00000.bin ... index.json trainer_state.json resolved.yaml ... and last MANIFEST
    checkpoints/step-00000100/           the draft, renamed: from here on it is committed

1. Rank 0 makes the draft; the token (run and chance) is in its name and in every file of ours, so a file of another
   save is known for what it is. Before that it compares the bytes needed with the bytes free.
2. When all files are on disk, rank 0 writes MANIFEST (size and hash of each file, and of itself), fsyncs it and the
   directories, renames the draft to its final name, and fsyncs the parent. The rename is the commit: atomic, and
   never over a directory.
3. Only then may an older step be deleted: it is renamed to a draft's name first, so a kill leaves no half of a
   committed one.
4. A step is used when MANIFEST and every byte agree. What fails is renamed to step-00000100.corrupt, and the next
   older is used.

A kill at any moment leaves either the draft (swept at the next start) or the committed step. Tested: 100 kills at
random moments of saves (tests/checkpoint/test_kill.py), none lost. An object store has no rename: there MANIFEST, written last,
is the commit (mirror.py).
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from windlass.checkpoint.hashed_file import FileEntry, PieceWriter
from windlass.checkpoint.manifest import MANIFEST, SCHEMA, Manifest, new_token, step_name, step_of
from windlass.checkpoint.sealed_json import check_file_name, digest, seal
from windlass.errors import Unavailable, UserError
from windlass.safe_text import printable
from windlass.units import format_bytes

FAILS_NOW: Final = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EHOSTDOWN, errno.EAGAIN})
"""Errors of a network file system or a disk that a retry may not meet again."""

SPACE_FACTOR = 1.1  # need x 1.1 must be free: the file system's own blocks, the manifest, other writers

_QUARANTINED = re.compile(r"step-\d{8,12}\.corrupt(-\d+)?")
_DRAFT = re.compile(r"\.tmp-\d{8,12}-([0-9a-f]{8})[0-9a-f]{8}")


class DiskFull(Unavailable):
    """Not enough space for a checkpoint; the last committed one stays. The same command may succeed once there is space."""


def check_step_directory(path: Path) -> None:
    """Raises UserError for a file, and for a link that leads to no directory. No BadCheckpoint: its storage may only be
    unmounted."""
    if path.is_dir() or not (path.exists() or path.is_symlink()):
        return
    given, change = f"{path} is a file", "move the file away"
    if path.is_symlink():
        given = f"{path} is a link to {printable(os.readlink(path))}, which is no directory here"
        change = "mount the storage that it leads to, correct the link, or remove it to go on without what it leads to"
    raise UserError(given, "a step of a run, and the directory of its steps, is a directory or a link to one", change)


def committed_steps(checkpoints: Path) -> list[int]:
    """The committed steps, newest first: directories, and links whatever they lead to. Nothing is verified yet. Raises
    UserError where `checkpoints` is a file, or a link that leads nowhere."""
    check_step_directory(checkpoints)
    if not checkpoints.is_dir():
        return []
    found = (step_of(entry.name) for entry in os.scandir(checkpoints) if entry.is_symlink() or entry.is_dir())
    return sorted((step for step in found if step is not None), reverse=True)


def check_takes_steps(checkpoints: Path) -> None:
    """Raises UserError where a step could not be committed, so that it is known before the first step and not at a save."""
    check_step_directory(checkpoints)
    if not checkpoints.is_dir():
        return
    if not os.access(checkpoints, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(
            f"this user cannot write to {checkpoints}",
            "a save makes a directory in it",
            "give the directory to this user, or set another run.directory",
        )
    for name in os.listdir(checkpoints):
        if step_of(name) is not None and not (checkpoints / name).is_symlink():
            check_step_directory(checkpoints / name)


def quarantined(checkpoints: Path) -> list[str]:
    """Names of the checkpoints that failed verification once and were put aside."""
    if not checkpoints.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(checkpoints) if _QUARANTINED.fullmatch(entry.name))


def fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_bytes(directory: Path) -> int:
    found = _file_system(directory)
    return found.f_bavail * found.f_frsize


def _file_system(directory: Path) -> os.statvfs_result:
    while not directory.exists():
        directory = directory.parent
    return os.statvfs(directory)


def _disk_full(directory: Path, need: int, what: str = "a checkpoint") -> DiskFull:
    held, free = _file_system(directory), format_bytes(_free_bytes(directory))
    if held.f_files and not held.f_favail:  # file systems without a fixed number of files say 0 of 0
        return DiskFull(
            f"the disk is full: {what} needs a new file, and no inodes are free in {directory} ({free} are free)",
            "a file system holds a fixed number of files; the last committed checkpoint stays",
            "delete files there (many small ones, most likely), or set another run.directory",
        )
    return DiskFull(
        f"the disk is full: {what} needs {format_bytes(need)}, {free} are free in {directory}",
        f"{SPACE_FACTOR} times the need must be free when a save begins; the last committed checkpoint stays",
        "free some space, lower checkpoint.keep_last or keep_best, or set another run.directory",
    )


def check_space(directory: Path, need: int) -> None:
    """DiskFull unless `need` x 1.1 bytes are free on the file system of `directory`."""
    if need * SPACE_FACTOR > _free_bytes(directory):
        raise _disk_full(directory, need)


@contextmanager
def named_errors(directory: Path, need: int, what: str = "a checkpoint") -> Iterator[None]:
    """Turns an OSError while writing `what`, of `need` bytes, into a UserError with the path: DiskFull for a full disk,
    Unavailable where the storage fails now."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(directory, need, what) from error
        if error.errno in FAILS_NOW:
            raise Unavailable(
                f"cannot write to {error.filename or directory}: {error.strerror}",
                "the storage of the run directory failed now, and may answer later; the last committed checkpoint stays",
                "start the same command again; if it fails again, look at the storage",
            ) from error
        raise UserError(
            f"cannot write to {error.filename or directory}: {error.strerror}",
            "the run directory must be on storage that takes writes; the last committed checkpoint stays",
            "fix the storage or its permissions, then start the same command again",
        ) from error


class Draft:
    """A checkpoint that is being written: `commit` renames its directory to a step, and after a kill `sweep` removes it."""

    def __init__(self, checkpoints: Path, step: int, token: str):
        self.checkpoints, self.step, self.token = checkpoints, step, token
        self.directory = checkpoints / f".tmp-{step:08d}-{token}"
        self.target = checkpoints / step_name(step)

    def create(self) -> None:
        self.refuse_overwrite()
        self.directory.mkdir(parents=True)

    def refuse_overwrite(self) -> None:
        if os.path.lexists(self.target):
            raise UserError(
                f"{self.target} is committed already",
                "a committed checkpoint is never overwritten",
                "let only one run use this directory, and resume from its newest checkpoint",
            )

    def discard(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)  # what cannot be removed now is swept at the next start

    def add(self, name: str, content: bytes | Path) -> FileEntry:
        """Writes one file, from memory or by copying, durably."""
        path = self.directory / check_file_name(name, "this save")
        path.parent.mkdir(parents=True, exist_ok=True)
        with PieceWriter(path) as writer:
            writer.write(memoryview(content if isinstance(content, bytes) else content.read_bytes()))
            return writer.close()

    def commit(self, run_id: str, world: int, metric: float | None, files: dict[str, FileEntry]) -> Manifest:
        """MANIFEST, fsync, rename, fsync: after this the step is committed."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        manifest = Manifest(
            schema_version=SCHEMA,
            run_id=run_id,
            step=self.step,
            world=world,
            token=self.token,
            time=now,
            metric=metric,
            files=files,
        )
        self.add(MANIFEST, seal(manifest.model_dump()))
        for parent, _, _ in os.walk(self.directory):
            fsync_directory(Path(parent))
        self.refuse_overwrite()
        self.directory.rename(self.target)
        fsync_directory(self.checkpoints)
        return manifest


def quarantine(directory: Path) -> Path:
    """Renames a bad checkpoint, or the link to it, to step-N.corrupt, or .corrupt-1, -2, ... -> its new path. Nothing is
    deleted."""
    target, number = directory.with_name(f"{directory.name}.corrupt"), 0
    while os.path.lexists(target):
        number += 1
        target = directory.with_name(f"{directory.name}.corrupt-{number}")
    directory.rename(target)
    fsync_directory(directory.parent)
    return target


def delete_checkpoint(checkpoints: Path, step: int, run_id: str) -> None:
    """Removes a committed step; a kill in between leaves a draft's name, never half a checkpoint. Of a link it removes the link
    alone: the directory that it leads to may be in use elsewhere."""
    directory = checkpoints / step_name(step)
    if directory.is_symlink():
        directory.unlink()
        fsync_directory(checkpoints)
        return
    grave = checkpoints / f".tmp-{step:08d}-{new_token(run_id)}"
    directory.rename(grave)
    fsync_directory(checkpoints)
    shutil.rmtree(grave, ignore_errors=True)


def sweep(checkpoints: Path, run_id: str) -> int:
    """Removes this run's leftover drafts -> how many. Call it while none of our saves is under way."""
    if not checkpoints.is_dir():
        return 0
    mark = digest(run_id.encode())[:8]
    drafts = [Path(entry.path) for entry in os.scandir(checkpoints) if entry.is_dir(follow_symlinks=False)]
    ours = [path for path in drafts if (match := _DRAFT.fullmatch(path.name)) and match[1] == mark]
    for path in ours:
        shutil.rmtree(path, ignore_errors=True)
    return len(ours)
