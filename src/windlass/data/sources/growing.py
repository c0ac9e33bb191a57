"""A local directory that is still being filled: its files in the order of their names, until a marker file ends it.

The order of documents must not depend on when somebody looks. So files are read in the order of their names, and a file whose
name sorts before one that was read is an error: a preparation of the complete directory would have read it earlier. A file gets
its name when it is complete (it is renamed from a name that begins with a dot). It is hashed, and a change while it is read is
an error.

Nobody knows in advance which files will come. So only its path identifies such a source; the rows kept beside the preparation
and the hashes of the shards identify what was read. At the end prepared.json keeps the hash of each file that was read; where
they differ later, the source is prepared again.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from windlass.data.sources.bad_rows import Row
from windlass.data.sources.chat_rows import Specials
from windlass.data.sources.config import SourceConfig
from windlass.data.sources.formats import file_kind
from windlass.data.sources.source_files import SourceFile, all_source_rows, file_at, names_below
from windlass.errors import UserError
from windlass.units import counted, format_duration

POLL_S: Final = 0.5


class Patience(NamedTuple):
    """How to wait for files: at most `max_silence_s` for the next one, calling `tick` meanwhile. `take(name, hash)` is called for
    each file that is read, last for the marker, with an empty hash."""

    max_silence_s: float = math.inf
    tick: Callable[[], None] = lambda: None
    take: Callable[[str, str], None] = lambda _name, _hash: None


def scan_growing(config: SourceConfig) -> SourceFile:
    """The directory as one file, identified by its name. Raises UserError."""
    directory, text_key = _directory(config), config.text_key
    if not directory.is_dir():
        change = "make it, or fix `path`"
        raise UserError(
            f"{directory} is no directory", "a source with `grows_until` is a directory that is filled", change
        )
    names = [name for name in names_below(directory) if name != config.grows_until]
    for name in names:
        _check_kind(config, name)
    if (directory / str(config.grows_until)).exists():
        _check_key(config, names)
    identity = xxhash.xxh3_128_hexdigest(f"{directory.name}\0{config.grows_until}".encode())
    return SourceFile(str(directory), directory.name, 0, identity, text_key)


def growing_rows(config: SourceConfig, patience: Patience, specials: Specials = ()) -> Iterator[Row]:
    """Every row, empty and bad ones too, in the order of the files' names. Waits for files. Raises UserError."""
    directory = _directory(config)
    assert config.grows_until is not None
    last, num_files, since_s = "", 0, time.monotonic()
    while True:
        is_whole = (directory / config.grows_until).exists()  # asked first: files that come after it are not read
        names = [name for name in names_below(directory) if name != config.grows_until]
        if sum(name <= last for name in names) != num_files:
            _raise_late(directory, names, last)
        for name in names[num_files:]:
            _check_kind(config, name)
            file = file_at(directory / name, name, config)
            patience.take(name, file.xxh3)
            yield from all_source_rows([file._replace(specials=specials)])
            last, num_files, since_s = name, num_files + 1, time.monotonic()
        if is_whole:
            _check_key(config, names)
            patience.take(config.grows_until, "")
            return
        if time.monotonic() - since_s > patience.max_silence_s:
            waited = format_duration(time.monotonic() - since_s)
            raise UserError(
                f"{directory} holds {counted(num_files, 'file')}, no further one came within {waited}, and no "
                f"{config.grows_until}",
                f"a source with `grows_until` grows, or ends with that file; data.order.deadline_s={patience.max_silence_s:g}",
                f"see what fills it, or make {config.grows_until}; or raise data.order.deadline_s",
            )
        patience.tick()
        time.sleep(POLL_S)


def what_changed(config: SourceConfig, taken: Mapping[str, str]) -> str | None:
    """The first file that is not as it was when it was read, if any. Files after the last one read do not matter, unless the
    source was read to its end."""
    directory = _directory(config)
    names = [name for name in names_below(directory) if name != config.grows_until]
    before = [name for name in taken if name != config.grows_until]
    is_whole = config.grows_until in taken
    for name in sorted({*names, *before}):
        if name not in taken and (is_whole or name < max(before, default="")):
            return f"{directory / name} has come since it was prepared"
        if name in taken and name not in names:
            return f"{directory / name} is gone since it was prepared"
        if name in taken and file_at(directory / name, name, config).xxh3 != taken[name]:
            return f"{directory / name} has changed since it was prepared"
    return None


def _check_kind(config: SourceConfig, name: str) -> None:
    """Raises UserError where a file does not fit the source's format."""
    if config.format != "text" and (config.file_format or file_kind(name)) == "text":
        what = "conversations" if config.format == "chat" else "pairs"
        given = f"`format: {config.format}` with {_directory(config) / name}, which is read as one text"
        change = "take it out, or give it a name that begins with a dot; then begin again"
        raise UserError(
            given, f"{what} are rows of .jsonl, .json, .csv, .parquet or .arrow, and so is every file", change
        )


def _check_key(config: SourceConfig, names: list[str]) -> None:
    """Raises UserError where `text` names a key or column, and no file has any."""
    if config.text is not None and all((config.file_format or file_kind(name)) == "text" for name in names):
        rule = "`text` names a key of rows or a column (.jsonl, .json, .csv, .parquet, .arrow), and the source has no such file"
        raise UserError(f"`text: {config.text}` with {_directory(config)}", rule, "leave `text` out")


def _directory(config: SourceConfig) -> Path:
    return Path(config.paths[0]).expanduser()


def _raise_late(directory: Path, names: list[str], last: str) -> None:
    earlier = [name for name in names if name <= last]
    raise UserError(
        f"{directory} was taken up to {last}, and now holds other files up to that name: {', '.join(earlier[-3:])}",
        "files of a source that grows come in the order of their names, and stay",
        "give later files later names; then delete the preparation, and begin again",
    )
