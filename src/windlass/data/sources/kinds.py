"""Whether the files of a source are of the kinds that it may hold and that its settings speak of, and what to say where not."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Final

from windlass.data.shards.store import shown
from windlass.data.sources import formats
from windlass.data.sources.config import SourceConfig
from windlass.errors import UserError

FEW: Final = 3  # files that a message names


def few(names: Iterable[str]) -> str:
    """The first names, for messages."""
    first = list(islice(names, FEW + 1))
    return ", ".join(first[:FEW]) + (", ..." if len(first) > FEW else "")


def check_kinds(source: SourceConfig, paths: list[str], outright: set[str]) -> None:
    """Raises UserError where the files are not of the kind that the source's settings speak of. `outright`: what was named, not
    found; among files of other kinds such a file is taken at its word."""
    rows = [path for path in paths if formats.holds_rows(path)]
    unasked = rows if len(rows) == len(paths) else [path for path in rows if path not in outright]
    if unasked and source.format == "text":
        raise of_rows(unasked, len(paths))
    if source.text is not None and all(formats.kind_of(path) == "text" for path in paths):
        rule = "`text` names the key of a .jsonl file's lines or a column of Parquet, and the source has no such file"
        raise UserError(f"`text: {source.text}` with {', '.join(source.paths)}", rule, "leave `text` out")
    if source.format != "text" and any(formats.kind_of(path) == "text" for path in paths):
        what = "conversations" if source.format == "chat" else "pairs"
        rule = f"{what} are lines of .jsonl or rows of .parquet, and the source has other files"
        given = f"`format: {source.format}` with {', '.join(source.paths)}"
        raise UserError(given, rule, f"name the files by a glob: {source.format}/*.jsonl")


def of_rows(paths: list[str], num_all: int) -> UserError:
    """Files that hold rows, of all that the source has, would be read as one text each."""
    first = few(map(shown, paths))
    among = f"{len(paths)} of {num_all} files ({first})" if num_all > 1 else first
    rule = "rows are read from .jsonl, .ndjson and .parquet; any other file is one document, whole"
    change = "write the rows as JSON lines, one object each, into a .jsonl file, or as Parquet"
    if len(paths) < num_all:
        change += (
            "; to leave these files out, name the others by a glob (**/*.txt); to take one whole, name it in `path`"
        )
    does = "would be read as one text, and its name says that it holds rows"
    does = does if len(paths) == 1 else "would be read as one text each, and their names say that they hold rows"
    return UserError(f"{among} {does}", rule, change)


def binary_file(path: Path) -> UserError:
    """A file that is named outright, or by its name holds rows as text, and holds no text."""
    rule = "a source is text in UTF-8, .jsonl (both also as .gz or .zst), or .parquet"
    return UserError(
        f"{path} is a binary file (it holds NUL bytes)", rule, "bring it again, unpack it, or convert it to UTF-8"
    )
