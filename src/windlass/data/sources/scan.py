"""From a source of the recipe to its documents.

A source is local files, files at a URL, or a dataset by name. `scan` lists what it consists of, and by what each file is
known again: local files by their hash, files at a URL by size and the store's own mark (ETag, version, time of change),
a dataset of the hub by its commit. `fetch` (data/sources/fetch.py) brings what is not local here, once. `documents` reads local
files and compares the hash, so a file that changes in between is an error, not a mixture. In directories and globs, hidden
files are left out, and binary files (a NUL among the first 8000 bytes: git's rule) left out and named, unless their names say
that they hold rows: such a file is damaged, and an error. Links are followed; a file under several spellings is read once.
"""

import glob
import io
import os
import sysconfig
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from windlass.data.config import SourceConfig
from windlass.data.shards.store import shown
from windlass.data.sources import formats
from windlass.data.sources.config import Format
from windlass.data.sources.kinds import binary_file, check_kinds, few, of_rows
from windlass.errors import AbsentSource, UserError, nearest

BINARY_PROBE_BYTES = 8000
READ_BYTES = 1 << 20
SAVED = ("state.json", "dataset_dict.json")  # in a directory that the library `datasets` saved
STDLIB_SKIPPED = frozenset(
    ("test", "tests", "idle_test", "idlelib", "turtledemo", "site-packages", "dist-packages", "__pycache__")
    + ("encodings", "pydoc_data")  # generated tables and help text, not code
    + ("tkinter", "lib2to3", "distutils", "ensurepip")  # packages of their own on Debian, some gone since 3.12
)
STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # the compiler flags of the machine that built Python
Report = Callable[[str], None]


class SourceFile(NamedTuple):
    """A file as `scan` found it. `name` is relative to the source; `xxh3` its hash, or what else it is known by; `text_key`
    is the key or column that holds the text. `path` is a string for what is not on this host's disk."""

    path: Path | str
    name: str
    num_bytes: int
    xxh3: str
    text_key: str


class Source(NamedTuple):
    """What `scan` found, and the part of it that is wanted: `rows` first..last, then the first `documents` that hold text.
    `tokens` is known only to those who encode."""

    files: list[SourceFile]
    rows: tuple[int, int | None] = (0, None)
    num_documents: int | None = None
    num_tokens: int | None = None
    format: Format = "text"
    too_long: Literal["drop"] | None = None
    stream: Callable[[], Iterator[str]] | None = None
    """Gives the documents, in place of `files`, where they come as they are read."""
    first_documents: int | None = None
    """At most so many of all these."""

    def documents(self) -> Iterator[str]:
        """Every document that is not empty, in order. Raises UserError naming the file and row that is wrong."""
        if self.stream is not None:
            return islice(self.stream(), self.first_documents)
        rows = islice(all_rows(self.files), *self.rows)
        texts = islice((text for text in rows if text), self.num_documents)
        return islice(texts, self.first_documents)


def source_of(config: SourceConfig, files: list[SourceFile]) -> Source:
    return Source(files, config.slice, config.documents, config.tokens, config.format, config.too_long)


def scan(source: SourceConfig, report: Report, known: str | None = None) -> list[SourceFile]:
    """The files of a source, hashed, in the order they are read; the rows of a dataset count as one file. `known`: the commit
    that a dataset of the hub is to have. Raises UserError if there is none."""
    if source.hub is not None:
        from windlass.data.sources.hub import scan_hub

        return [scan_hub(source, report, known)]
    if source.builtin is not None:
        return [_hash_file(path, name, "text") for path, name in _stdlib_files()]
    if source.grows_until is not None:
        from windlass.data.sources.growing import scan_arriving  # which reads files as this one does

        return [scan_arriving(source)]
    return _scan_paths(source, report)


def _scan_paths(source: SourceConfig, report: Report) -> list[SourceFile]:
    text_key = source.text_key
    found: dict[tuple[str, str], SourceFile] = {}  # by `_identity`, as are the others
    binary, outright = dict[tuple[str, str], str](), set[tuple[str, str]]()
    for pattern in source.paths:
        if "://" in pattern:
            from windlass.data.sources.fetch import scan_url

            outright.add(_identity(pattern))
            for file in scan_url(pattern, text_key, report):
                found.setdefault(_identity(file.path), file)
            continue
        paths, explicit = _match(pattern)
        for path, name in paths:
            identity = _identity(path)
            if explicit:
                outright.add(identity)
            if identity in found:
                continue
            if not _is_binary(path):
                found[identity] = _hash_file(path, name, text_key)
            elif explicit or formats.names_rows(path.name):
                raise binary_file(path)
            else:
                binary[identity] = name
    if binary:
        report(f"left out {len(binary)} binary files of {', '.join(source.paths)}: {few(binary.values())}")
    if not found:
        rule = "a source holds at least one text file"
        raise UserError(f"{', '.join(source.paths)} holds only binary files", rule, "give another `path`")
    named = {str(found[identity].path) for identity in outright & found.keys()}
    check_kinds(source, [str(file.path) for file in found.values()], named)
    return list(found.values())


def _identity(path: Path | str) -> tuple[str, str]:
    """One for all spellings of a local file by which it is read in the same way; any other URL is its own."""
    local = str(path).removeprefix("file://")
    return local if "://" in local else os.path.realpath(local), formats.kind_of(local)


def _stdlib_files() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    named = [(path, path.relative_to(root).as_posix()) for path in _below(root, STDLIB_SKIPPED) if path.suffix == ".py"]
    for path, name in sorted(named, key=lambda pair: pair[1]):
        if name.startswith(STDLIB_SKIPPED_PREFIXES):
            continue
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        yield path, name


def _match(pattern: str) -> tuple[list[tuple[Path, str]], bool]:
    """Paths with names, sorted, and whether the pattern names one file outright."""
    path = Path(os.path.expanduser(pattern))
    if path.is_file():
        return [(path, path.name)], True
    if path.exists() and not path.is_dir():
        rule = "a source is files and directories; a pipe, a socket or a device cannot be read twice"
        raise UserError(f"`path: {pattern}` is neither a file nor a directory", rule, "write what it gives to a file")
    if path.is_dir():
        if any((path / name).is_file() for name in SAVED):
            rule = "what `save_to_disk` wrote is read by the library `datasets`"
            raise UserError(f"`path: {pattern}` holds a saved dataset", rule, f"write `hub: {pattern}` for `path`")
        paths, root = _below(path), path
    else:
        paths = [Path(match) for match in glob.glob(str(path), recursive=True)] if glob.has_magic(pattern) else []
        root = _nearest_folder(path)
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise AbsentSource(f"`path: {pattern}` matches no file", "a source needs at least one file", _hint(path))
    named = [(path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(named, key=lambda pair: pair[1]), False


def _below(directory: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Every file below, but for hidden ones and those in folders named in `skipped`; without any, linked folders too."""
    paths = []
    for folder, subfolders, names in os.walk(directory, followlinks=not skipped):
        links = [name for name in subfolders if Path(folder, name).is_symlink()]
        loops = {name for name in links if Path(folder).resolve().is_relative_to(Path(folder, name).resolve())}
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped | loops]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return paths


def names_below(directory: Path) -> list[str]:
    """Every file below, but for hidden ones, by its name from there, sorted."""
    return sorted(path.relative_to(directory).as_posix() for path in _below(directory))


def file_at(path: Path, name: str, text_key: str) -> SourceFile:
    """A text file of any format, hashed. Raises UserError."""
    if _is_binary(path):
        raise binary_file(path)
    if formats.holds_rows(name):
        raise of_rows([str(path)], 1)
    return _hash_file(path, name, text_key)


def _nearest_folder(path: Path) -> Path:
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _hint(path: Path) -> str:
    folder = _nearest_folder(path)
    names = sorted(os.listdir(folder))
    holds = f"{len(names)} entries: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "nothing"
    guess = nearest(path.name, names) if folder == path.parent else ""
    return f"{guess}the nearest existing folder is {folder.absolute()}; it holds {holds}"


def _is_binary(path: Path) -> bool:
    """What is compressed is judged by what it holds. Raises UserError where it is damaged."""
    if formats.kind_of(path.name) == "parquet":
        return False
    with _open(path) as file:
        try:
            return b"\0" in formats.unpacked(file, path.name).read(BINARY_PROBE_BYTES)
        except formats.broken() as error:
            raise formats.damaged(str(path), error) from None


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "sources are read", "mend its rights") from None


def _hash_file(path: Path, name: str, text_key: str) -> SourceFile:
    digest, num_bytes = xxhash.xxh3_128(), 0
    with _open(path) as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return SourceFile(path, name, num_bytes, digest.hexdigest(), text_key)


class _Hashed(io.RawIOBase):
    """A file that hashes what is read of it, from its begin to its end."""

    def __init__(self, file: Any):
        self._file, self.digest = file, xxhash.xxh3_128()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)
        self.digest.update(memoryview(buffer)[:count])
        return count


def all_rows(files: list[SourceFile]) -> Iterator[str]:
    """Every row, empty ones too. Raises UserError naming what is wrong."""
    for file in files:
        path = Path(file.path)
        if formats.kind_of(path.name) == "parquet":  # which is not read from its begin to its end
            check_unchanged(file, _hash_file(path, "", "").xxh3)
            with _open(path) as stream:
                yield from formats.read_rows(stream, str(path), file.text_key)
            continue
        with _open(path) as stream:
            hashed = _Hashed(stream)
            buffered = io.BufferedReader(hashed, READ_BYTES)
            yield from formats.read_rows(buffered, str(path), file.text_key)
            while buffered.read(READ_BYTES):  # what stands behind the last compressed byte
                pass
            check_unchanged(file, hashed.digest.hexdigest())


def check_unchanged(file: SourceFile, found: str) -> None:
    """Raises UserError where the file is known by another hash or mark now."""
    if found != file.xxh3:
        rule = "a source stays as it is while it is read"
        where = shown(file.path) if isinstance(file.path, str) else file.path
        raise UserError(f"{where} changed while it was being prepared", rule, "prepare again when it is complete")
