"""Decides whether a checkpoint is whole: MANIFEST first, then a listing, then every byte. No torch.

Each file that differs is named with its difference: size, hash (which bytes), missing, extra, stale (it belongs to another
save: our files carry the token of theirs), link. Names are checked and links inside the directory are refused, so nothing
outside of it is opened. The directory itself may be a link.

Files that windlass does not write (`.DS_Store`, `.nfs...`, notes) are ignored and listed: MANIFEST names every file that is
read, so they change nothing. A file of a rank that MANIFEST does not list is an error, since it shows that two saves were mixed.
"""

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from windlass.checkpoint.commit import check_step_directory
from windlass.checkpoint.hashed_file import PieceReader
from windlass.checkpoint.manifest import MANIFEST, SCHEMA, Manifest, Problem, is_rank_name, step_of
from windlass.checkpoint.sealed_json import MAX_SEALED_BYTES, bad, check_file_name, unseal
from windlass.errors import BadCheckpoint, UserError
from windlass.units import format_bytes

AT_ONCE: Final = 8
"""Files that are read side by side: reading and hashing release the GIL, each holds one piece of 4 MiB. Not measured: more than
the cores of a small host, since storage over a network answers several requests as fast as one."""
_TOKEN = re.compile(rb'"token":"([0-9a-f]{16})"')


class Checkpoint:
    """A committed checkpoint whose MANIFEST is whole. Its other files are verified as they are read."""

    def __init__(self, directory: Path, manifest: Manifest, manifest_bytes: bytes):
        self.directory, self.manifest, self.manifest_bytes = directory, manifest, manifest_bytes

    @staticmethod
    def open(directory: Path) -> "Checkpoint":
        """Reads MANIFEST; BadCheckpoint if it is not there or not whole."""
        path = directory / MANIFEST
        check_step_directory(directory)
        try:
            if path.is_symlink() or not path.is_file():
                raise bad(f"{directory} has no MANIFEST", "a checkpoint is committed with one")
            size = path.stat().st_size
            if size > MAX_SEALED_BYTES:
                most = format_bytes(MAX_SEALED_BYTES)
                raise bad(f"MANIFEST of {directory} has {format_bytes(size)}", f"at most {most}")
            data = path.read_bytes()
        except OSError as error:
            raise _unreadable(error) from error
        return Checkpoint.parse(directory, data)

    @staticmethod
    def parse(directory: Path, manifest_bytes: bytes) -> "Checkpoint":
        body = unseal(manifest_bytes, MANIFEST)
        schema = body.get("schema_version")
        if isinstance(schema, int) and schema != SCHEMA:  # no BadCheckpoint: it may be whole, and must not be renamed
            age = "an older" if schema < SCHEMA else "a newer"
            raise UserError(
                f"{directory} is of {age} format, {schema}",
                f"this version of windlass reads format {SCHEMA} only",
                "read it with the version that wrote it, or begin another run.directory",
            )
        try:
            manifest = Manifest.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise bad(f"MANIFEST: {'.'.join(map(str, first['loc']))}: {first['msg']}", "its fields are fixed") from None
        for name, entry in manifest.files.items():
            entry.check(check_file_name(name, MANIFEST))
        return Checkpoint(directory, manifest, manifest_bytes)

    def reader(self, name: str) -> PieceReader:
        """Ranges of the file `name`, verified as they are read. Raises BadCheckpoint if MANIFEST does not list it."""
        if name not in self.manifest.files:
            raise bad(f"{self.directory.name} has no file {name!r}", "MANIFEST lists every file")
        path = self.directory / name
        if not path.parent.resolve().is_relative_to(self.directory.resolve()):
            raise bad(f"{name} of {self.directory.name} is outside of it, through a link", "links are not followed")
        return PieceReader(path, self.manifest.files[name])

    def read(self, name: str) -> bytes:
        """The whole file, verified. For small files: at most 1 GiB."""
        with self.reader(name) as reader:
            reader.check_size()
            size = self.manifest.files[name].size
            if size > MAX_SEALED_BYTES:
                raise bad(
                    f"{name} has {format_bytes(size)}", f"such a file has at most {format_bytes(MAX_SEALED_BYTES)}"
                )
            return bytes(reader.read(0, size)) if size else b""

    def survey(self) -> list[Problem]:
        """What a listing shows: missing files, links, wrong sizes, files of another save, a directory of another step."""
        step = step_of(self.directory.name)
        problems = []
        if step is not None and step != self.manifest.step:
            problems.append(Problem(MANIFEST, "stale", f"it is of step {self.manifest.step}, in {self.directory.name}"))
        found = _listing(self.directory)
        for name, entry in sorted(self.manifest.files.items()):
            kind, size = found.pop(name, ("", 0))
            if kind == "":
                problems.append(Problem(name, "missing", f"MANIFEST lists it with {entry.size} bytes"))
            elif kind != "file":
                problems.append(Problem(name, "link", f"it is a {kind}; a checkpoint holds regular files only"))
            elif size != entry.size:
                problems.append(Problem(name, "size", f"{size} bytes, written with {entry.size}"))
        extra = [name for name in sorted(found) if self._is_ours(name)]
        return problems + [Problem(name, "extra", "MANIFEST does not list it") for name in extra if name != MANIFEST]

    def foreign_files(self) -> list[str]:
        """Files and empty directories in the directory that windlass did not write."""
        return [name for name in sorted(_listing(self.directory)) if not self._is_ours(name.rstrip("/"))]

    def _is_ours(self, name: str) -> bool:
        """A file of a checkpoint, or what has the name of one or of a directory of them."""
        files = self.manifest.files
        return (
            name == MANIFEST or name in files or is_rank_name(name) or any(one.startswith(f"{name}/") for one in files)
        )

    def verify(self, name: str) -> Problem | None:
        """Reads every byte of one file."""
        try:
            with self.reader(name) as reader:
                reader.verify()
        except BadCheckpoint as error:
            token = self._token_of(name)
            if token and token != self.manifest.token:
                return Problem(name, "stale", f"it belongs to the save {token}, this is the save {self.manifest.token}")
            return Problem(name, "hash", error.given.removeprefix(f"{name}: ").removeprefix("hash "))
        except UserError as error:
            return Problem(name, "unreadable", error.given)
        return None

    def _token_of(self, name: str) -> str:
        """The token in a file of ours: of a rank's file at its start, of JSON at its end; else ''."""
        path = self.directory / name
        if not path.is_file() or path.is_symlink():
            return ""
        with path.open("rb") as file:
            head = file.read(64)
            file.seek(max(0, path.stat().st_size - 64))
            found = _TOKEN.search(head) or _TOKEN.search(file.read(64))
        return found[1].decode() if found else ""


def _unreadable(error: OSError) -> UserError:
    """No BadCheckpoint: what cannot be read may well be whole, and must not be renamed."""
    return UserError(
        f"{error.filename} cannot be read: {error.strerror}",
        "the user who loads a checkpoint must be allowed to list and read all of it",
        "fix the permissions or the storage",
    )


def _listing(directory: Path) -> dict[str, tuple[str, int]]:
    """relative name -> (file, link, device or directory; size). Links are not followed. Of directories those alone that hold
    nothing, with a slash behind their names."""
    found: dict[str, tuple[str, int]] = {}

    def refuse(error: OSError) -> None:
        raise _unreadable(error) from error

    for parent, directories, files in os.walk(directory, onerror=refuse):
        here = Path(parent)
        if not directories and not files and here != directory:
            found[f"{here.relative_to(directory)}/"] = ("directory", 0)
        links = [name for name in directories if (here / name).is_symlink()]
        for name in files + links:
            try:
                state = (here / name).lstat()
            except FileNotFoundError:
                continue  # removed since the listing, as .nfs files are
            except OSError as error:
                raise _unreadable(error) from error
            kind = "file" if stat.S_ISREG(state.st_mode) else "link" if stat.S_ISLNK(state.st_mode) else "device"
            found[str((here / name).relative_to(directory))] = (kind, state.st_size)
    return found


def verify_checkpoint(directory: Path) -> list[Problem]:
    """Every byte of a checkpoint against its MANIFEST -> what is wrong; [] means that it is whole."""
    try:
        checkpoint = Checkpoint.open(directory)
    except UserError as error:
        return [Problem(MANIFEST, "manifest", error.given)]
    problems = checkpoint.survey()
    seen = {problem.file for problem in problems}
    names = [name for name in sorted(checkpoint.manifest.files) if name not in seen]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return problems + [problem for problem in pool.map(checkpoint.verify, names) if problem]


def complaint(directory: Path, problems: list[Problem]) -> BadCheckpoint:
    """The problems as one error, the first five named."""
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    listed = "; ".join(str(problem) for problem in problems[:5])
    return bad(f"{directory}: {listed}{more}", "every file must match its entry in MANIFEST, byte for byte")
