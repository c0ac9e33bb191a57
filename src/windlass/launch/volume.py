"""Directories that pods share are on a volume, which is mounted in each of them."""

import posixpath
from pathlib import PurePath, PurePosixPath

from windlass.errors import UserError


def check_shared(mount: str, run: PurePath, data: PurePath, relative: str) -> None:
    """Raises UserError where hosts would lose `run.directory`, or not all would see `data.directory`."""
    for key, directory, rule in (
        ("run.directory", run, "the run directory is on the volume"),
        ("data.directory", data, "prepared data are on the volume, where all hosts see them"),
    ):
        if error := off_volume(key, directory, mount, rule, relative):
            raise error


def off_volume(given: str, directory: PurePath, mount: str, rule: str, relative: str) -> UserError | None:
    """The error of a directory that is not below `mount`; None where it is, or will be. `given`: with the key that names it;
    `relative`: what becomes of a relative path. The address of a store is no path."""
    if PurePosixPath(posixpath.normpath(posixpath.join(mount, directory))).is_relative_to(posixpath.normpath(mount)):
        return None
    change = f"give a path below {mount}, or a relative one{relative}"
    return UserError(f"{given}={directory} with the volume mounted at {mount}", rule, change)
