"""Directories that pods share are on a volume, which is mounted in each of them."""

from pathlib import PurePath

from windlass.errors import UserError


def off_volume(given: str, place: PurePath, mount: str, rule: str, relative: str) -> UserError | None:
    """The error of a directory that is not below `mount`; None where it is, or will be. `given`: with the key that names it;
    `relative`: what becomes of a relative path."""
    if not place.is_absolute() or place.is_relative_to(mount):
        return None
    change = f"give a path below {mount}, or a relative one{relative}"
    return UserError(f"{given}={place} with the volume mounted at {mount}", rule, change)
