"""From a source of the recipe to its documents.

A text file is one document, a line of a `.jsonl` file is one document, the embedded corpus is the standard library's
own sources. A document is exact: its UTF-8 bytes are what the file holds, no newline is changed. `scan` lists and
hashes the files once; `documents` reads them again and compares the hash, so a file that changes in between is an
error, not a mixture.

In directories and globs, hidden files and binary files (a NUL among the first 8000 bytes: git's rule) are left out
and counted.
"""

import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from windlass.data.config import SourceConfig
from windlass.errors import UserError, nearest

BINARY_PROBE_BYTES = 8000
READ_BYTES = 1 << 20
STDLIB_SKIPPED = frozenset(
    ("test", "tests", "idle_test", "idlelib", "turtledemo", "site-packages", "dist-packages", "__pycache__")
    + ("encodings", "pydoc_data")  # generated tables and help text, not code
    + ("tkinter", "lib2to3", "distutils", "ensurepip")  # packages of their own on Debian, some gone since 3.12
)
STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")  # the compiler flags of the machine that built Python


class SourceFile(NamedTuple):
    """A file as `scan` found it. `name` is relative to the source; `text_key` is the key in a line of .jsonl."""

    path: Path
    name: str
    num_bytes: int
    xxh3: str
    text_key: str


def scan(source: SourceConfig, report: Callable[[str], None]) -> list[SourceFile]:
    """The files of a source, hashed, in the order they are read. Raises UserError if there is none."""
    if source.builtin is not None:
        return [_hash_file(path, name, "text") for path, name in _stdlib_files()]
    text_key = "text" if source.text is None else source.text
    found: dict[Path, SourceFile] = {}
    num_binary = 0
    for pattern in source.paths:
        paths, explicit = _match(pattern)
        for path, name in paths:
            if path in found:
                continue
            if not _is_binary(path):
                found[path] = _hash_file(path, name, text_key)
            elif explicit:
                rule = "a source is text in UTF-8, or .jsonl; compressed files and Parquet are not read"
                raise UserError(f"{path} is a binary file (it holds NUL bytes)", rule, "unpack or convert it to text")
            else:
                num_binary += 1
    if num_binary:
        report(f"left out {num_binary} binary files of {', '.join(source.paths)}")
    if not found:
        rule = "a source holds at least one text file"
        raise UserError(f"{', '.join(source.paths)} holds only binary files", rule, "give another `path`")
    if source.text is not None and not any(path.suffix == ".jsonl" for path in found):
        rule = "`text` names the key of a .jsonl file's lines, and the source has no such file"
        raise UserError(f"`text: {source.text}` with {', '.join(source.paths)}", rule, "leave `text` out")
    return list(found.values())


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
    if path.is_dir():
        paths, root = _below(path), path
    else:
        paths = [Path(match) for match in glob.glob(str(path), recursive=True)] if glob.has_magic(pattern) else []
        root = _nearest_folder(path)
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise UserError(f"`path: {pattern}` matches no file", "a source needs at least one file", _hint(path))
    named = [(path, path.relative_to(root).as_posix()) for path in paths]
    return sorted(named, key=lambda pair: pair[1]), False


def _below(directory: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Every file below, but for hidden ones and those in folders named in `skipped`."""
    paths = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return paths


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
    with _open(path) as file:
        return b"\0" in file.read(BINARY_PROBE_BYTES)


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


def documents(files: list[SourceFile]) -> Iterator[str]:
    """Every document that is not empty, in order. Raises UserError naming the file and line (or byte) that is wrong."""
    for file in files:
        if file.path.suffix == ".jsonl":
            yield from _lines(file)
            continue
        with _open(file.path) as stream:
            data = stream.read()
        _check_unchanged(file, xxhash.xxh3_128_hexdigest(data))
        text = _decode(data, str(file.path), 0)
        if text:
            yield text


def _lines(file: SourceFile) -> Iterator[str]:
    digest, offset = xxhash.xxh3_128(), 0
    with _open(file.path) as stream:
        for number, line in enumerate(stream, 1):
            digest.update(line)
            where = f"{file.path}:{number}"
            text = _text_of_line(_decode(line, where, offset), where, file.text_key)
            if text:
                yield text
            offset += len(line)
    _check_unchanged(file, digest.hexdigest())


def _text_of_line(line: str, where: str, text_key: str) -> str:
    if not line.strip():
        return ""
    rule = f"a line of a .jsonl file is an object whose key `{text_key}` holds the text"
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}", rule, "mend or remove the line") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} is {type(value).__name__}, not an object", rule, "mend or remove the line")
    if text_key not in value:
        keys = ", ".join(map(str, value)) or "none"
        change = f"{nearest(text_key, list(value))}set `text` of the source to one of its keys: {keys}"
        raise UserError(f"{where} has no key `{text_key}`", rule, change)
    text = value[text_key]
    if not isinstance(text, str):
        raise UserError(f"{where} has {type(text).__name__} under `{text_key}`", rule, "give a key that holds text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} holds half of a surrogate pair", "text must be valid Unicode", "mend it") from None
    return text


def _decode(data: bytes, where: str, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        given = f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        raise UserError(given, "text is read as UTF-8", f"convert it: iconv -f LATIN1 -t UTF-8 {where}") from None


def _check_unchanged(file: SourceFile, found: str) -> None:
    if found != file.xxh3:
        rule = "a source stays as it is while it is read"
        raise UserError(f"{file.path} changed while it was being prepared", rule, "prepare again when it is complete")
