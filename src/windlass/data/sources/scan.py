"""A source of the recipe -> its files, each with what identifies it.

A source is local files, files at a URL, or a dataset by name. Local files are identified by their hash, files at a URL by size
and the store's own mark (ETag, version, modification time), a dataset of the hub by its commit. fetch copies what is not local.

In directories and globs hidden files are left out. Binary files (a NUL among the first 8000 bytes: git's rule) are left out and
logged; a binary file whose name promises rows is damaged, and an error. Links are followed. A file that matches under several
names is read once.
"""

import fnmatch
import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.data.sources import formats
from windlass.data.sources.config import SourceConfig
from windlass.data.sources.growing import scan_growing
from windlass.data.sources.hub import scan_hub
from windlass.data.sources.known_hashes import KnownHashes
from windlass.data.sources.source_files import SourceFile, as_asked, files_below, is_binary, refuse_unlisted
from windlass.data.sources.urls import scan_url
from windlass.errors import AbsentSource, UserError, nearest_entry

SAVED = ("state.json", "dataset_dict.json")  # in a directory that the library `datasets` saved
STDLIB_SKIPPED = frozenset(
    ("test", "tests", "idle_test", "idlelib", "turtledemo", "site-packages", "dist-packages", "__pycache__")
    + ("encodings", "pydoc_data")  # generated tables and help text, not code
    + ("tkinter", "lib2to3", "distutils", "ensurepip")  # packages of their own on Debian, some gone since 3.12
)
STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # the compiler flags of the machine that built Python


def scan(
    source: SourceConfig, log: Callable[[str], None], known: str | None = None, hashes: KnownHashes | None = None
) -> list[SourceFile]:
    """The files of a source, hashed, in reading order; the rows of a dataset count as one file. `known`: the commit to use of a
    dataset of the hub. `hashes`: those of local files that need not be read. Raises UserError if there is no file."""
    hashes = hashes or KnownHashes()
    if source.hub is not None:
        return [scan_hub(source, log, known)]
    if source.builtin is not None:
        return [hashes.file(path, name, "text") for path, name in _stdlib_files()]
    if source.grows_until is not None:
        return [scan_growing(source)]
    return _scan_paths(source, log, hashes)


def scan_texts(
    what: str, path: str | list[str], text: str | None, log: Callable[[str], None], hashes: KnownHashes
) -> list[SourceFile]:
    """The files of texts that are no source themselves. Raises UserError, which begins with `what` they are."""
    try:
        return scan(SourceConfig(path=path, text=text), log, None, hashes)
    except UserError as error:
        change = error.change.replace("`text` of the source", "`text` there")
        raise UserError(f"{what}: {error.given}", error.rule, change) from None


def _scan_paths(source: SourceConfig, log: Callable[[str], None], hashes: KnownHashes) -> list[SourceFile]:
    text_key = source.text_key
    found: dict[tuple[str, str], SourceFile] = {}  # by `_identity`, as are the others
    binary, outright = dict[tuple[str, str], str](), set[tuple[str, str]]()
    for pattern in source.paths:
        if "://" in pattern:
            outright.add(_identity(pattern))
            for file in scan_url(pattern, text_key, log):
                formats.check_compression(str(file.path))
                found.setdefault(_identity(file.path), as_asked(file, source))
            continue
        paths, explicit = _match(pattern)
        for path, name in paths:
            identity = _identity(path)
            if explicit:
                outright.add(identity)
            if identity in found:
                continue
            if hashes.is_known(path) or not is_binary(path, source.file_format):
                found[identity] = as_asked(hashes.file(path, name, text_key), source)
            elif explicit or formats.names_rows(path.name):
                raise formats.binary_file(path)
            else:
                binary[identity] = name
    if binary:
        log(f"left out {len(binary)} binary files of {', '.join(source.paths)}: {formats.few(binary.values())}")
    if not found:
        rule = "a source holds at least one text file"
        raise UserError(f"{', '.join(source.paths)} holds only binary files", rule, "give another `path`")
    named = {str(found[identity].path) for identity in outright & found.keys()}
    check_kinds(source, [str(file.path) for file in found.values()], named)
    return list(found.values())


def check_kinds(source: SourceConfig, paths: list[str], outright: set[str]) -> None:
    """Raises UserError where the files do not fit the source's settings. `outright`: files that the recipe names one by one."""
    for path in paths if source.file_format is None else ():
        formats.check_ending(path)
    kinds = {source.file_format or formats.file_kind(path) for path in paths}
    rows = [path for path in paths if formats.may_be_no_corpus(path) and path not in outright]
    unasked = rows if source.file_format is None and "text" in kinds else []
    if unasked and source.format == "text":
        raise formats.of_rows(unasked, len(paths))
    if source.text is not None and kinds == {"text"}:
        rule = "`text` names a key of rows or a column (.jsonl, .json, .csv, .parquet, .arrow), and the source has no such file"
        raise UserError(f"`text: {source.text}` with {', '.join(source.paths)}", rule, "leave `text` out")
    if source.format != "text" and "text" in kinds:
        what = "conversations" if source.format == "chat" else "pairs"
        rule = f"{what} are rows of .jsonl, .json, .csv, .parquet or .arrow, and the source has other files"
        given = f"`format: {source.format}` with {', '.join(source.paths)}"
        raise UserError(given, rule, f"name the files by a glob: {source.format}/*.jsonl")


def _identity(path: Path | str) -> tuple[str, str]:
    """Equal for all spellings of a local file that is read in the same format; any other URL is its own identity."""
    local = str(path).removeprefix("file://")
    return local if "://" in local else os.path.realpath(local), formats.file_kind(local)


def _stdlib_files() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    named = [
        (path, path.relative_to(root).as_posix()) for path in files_below(root, STDLIB_SKIPPED) if path.suffix == ".py"
    ]
    for path, name in sorted(named, key=lambda pair: pair[1]):
        if name.startswith(STDLIB_SKIPPED_PREFIXES):
            continue
        try:
            path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        yield path, name


def _match(pattern: str) -> tuple[list[tuple[Path, str]], bool]:
    """Paths with names, sorted; and whether the pattern is the name of one file."""
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
        paths, root = files_below(path), path
    else:
        if glob.has_magic(pattern):
            _check_listed(path)
        paths = [Path(match) for match in glob.glob(str(path), recursive=True)] if glob.has_magic(pattern) else []
        root = _nearest_folder(path)
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise AbsentSource(f"`path: {pattern}` matches no file", "a source needs at least one file", _hint(path))
    named = [(path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(named, key=lambda pair: pair[1]), False


def _check_listed(pattern: Path) -> None:
    """Raises UserError where a folder that the pattern would look into cannot be listed: glob leaves it out."""
    root = _nearest_folder(pattern)
    parts = pattern.relative_to(root).parts
    for folder, subfolders, _ in os.walk(root, onerror=refuse_unlisted):
        depth = len(Path(folder).relative_to(root).parts)
        open_ended = "**" in parts[: depth + 1]
        if not open_ended:
            wanted = parts[depth] if depth < len(parts) - 1 else None
            subfolders[:] = [name for name in subfolders if wanted is not None and fnmatch.fnmatchcase(name, wanted)]
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]


def _nearest_folder(path: Path) -> Path:
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _hint(path: Path) -> str:
    folder = _nearest_folder(path)
    names = sorted(os.listdir(folder))
    holds = f"{len(names)} entries: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "nothing"
    return f"{nearest_entry(path)}the nearest existing folder is {folder.absolute()}; it holds {holds}"
