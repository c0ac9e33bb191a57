"""The file formats of a source: bytes in, texts out, one row at a time; which files a source may hold.

    *.jsonl, *.ndjson, *.jsonlines, *.jl,   a line is a row: an object whose key `text` (or another) holds the document
    *.ldjson, *.geojsonl
    *.json               an array of such objects, or lines, or one object
    *.csv, *.tsv         a row is a row: the column `text` (or another)
    *.parquet            the same, read row group by row group
    *.arrow, *.feather   the same, as a file or a stream of record batches
    everything else      the file is one row: plain text

All but Parquet and Arrow may be compressed: the name then ends in `.gz`, `.zst`, `.xz` or `.bz2` (compression). `file_format`
of a source overrules the names. The rows are read by text_rows and table_rows, their texts by row_text.

An empty document is a row too, "", and counts as one. A blank line is no row. `.json`, `.csv` and `.tsv` among plain texts are
most likely no part of the corpus: they are refused there, unless the recipe names them.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Final, NamedTuple

from windlass.data.sources import compression
from windlass.data.sources.bad_rows import Row, attempted
from windlass.data.sources.chat_rows import Specials
from windlass.data.sources.config import MAX_ROW_MIB, Kind
from windlass.data.sources.row_text import Form, decode
from windlass.data.sources.shape_config import RowsConfig
from windlass.data.sources.table_rows import row_groups, table_rows
from windlass.data.sources.text_rows import check_row_size, csv_rows, json_lines, json_rows
from windlass.data.verified_file import BLOCK_BYTES, line_ends_before
from windlass.errors import UserError
from windlass.units import MIB

FEW: Final = 3  # files that a message names
CHUNK_BLOCKS: Final = 4  # of lines that are read at once; fewer bytes than a worker is worth (tokenize/pool)
ENDS: Final[dict[str, Kind]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".jl": "jsonl",
    ".ldjson": "jsonl",
    ".geojsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".parq": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}


class FileSpan(NamedTuple):
    """A part of a file: the lines that begin in its bytes begin..end, or row groups begin..end of Parquet; `before`: lines or
    rows before it. Only of JSON lines that are not compressed, its `begin` at the begin of a block, and of Parquet."""

    begin: int
    end: int
    before: int


LEFTOVERS: Final = ("bak", "old", "orig", "tmp", "part", "partial", "download", "crdownload", "save", "swp")
"""Endings that copies and downloads leave behind a file's own."""
BEHIND_LINES: Final = re.compile(r"\.(?:jsonl|ndjson|jsonlines|ldjson|geojsonl)([^a-z0-9].*)$")
"""Whatever follows: names of JSON lines are used for nothing else. `.json.md` and `.csv.j2` are texts."""
BEHIND_ROWS: Final = re.compile(
    rf"\.(?:{'|'.join(end[1:] for end in ENDS)})(?![a-z0-9])((?:[ ._()~\d-]|copy|\.(?:{'|'.join(LEFTOVERS)})(?![a-z]))+)$"
)
PEEKED_BYTES: Final = 1 << 20  # of a text that may be rows
TABLES: Final = ("parquet", "arrow")  # compressed inside, and not read front to back


def file_kind(name: str) -> Kind:
    """The format, by the end of a file's name or URL."""
    name = _name_in(name)
    stem = compression.without_compression(name)
    kind = next((kind for end, kind in ENDS.items() if stem.endswith(end)), None)
    return "text" if kind is None or (kind in TABLES and stem != name) else kind


def is_table(path: Path | str, kind: Kind | None) -> bool:
    return (kind or file_kind(str(path))) in TABLES


def _name_in(where: str) -> str:
    """In small letters, and without the query of a URL, such as a signature."""
    return (where.partition("?")[0] if "://" in where else where).lower()


def may_be_no_corpus(name: str) -> bool:
    """Whether a file of rows beside plain texts is most likely no part of a corpus."""
    return file_kind(name) in ("json", "csv", "tsv")


def names_rows(name: str) -> bool:
    """Whether the name says that the file holds rows, whatever follows, as in `.jsonl.zz`, `.csv.gz.part` or `.jsonl_xz`: bytes
    that are no text mean that it is damaged, or packed as nothing here is."""
    parts = _name_in(name).split(".")
    is_rows = any(file_kind(".".join(parts[:end])) != "text" for end in range(2, len(parts) + 1))
    return is_rows or BEHIND_LINES.search(_name_in(name)) is not None


def check_ending(where: str) -> None:
    """Raises UserError for what a copy, a rotation or a split of a file of rows leaves, as `.jsonl.1`, `.jsonl-20260101.gz` or
    `.csv.bak`: rows, not one text."""
    name = _name_in(where).rpartition("/")[2]
    stem = compression.without_compression(name)
    left = BEHIND_LINES.search(stem) or BEHIND_ROWS.search(stem)
    if left and file_kind(stem) == "text":
        raise UserError(
            f"{where} ends in {left[1]}, and would be read as one text",
            "a file of rows ends as its format does, as in .jsonl, or in a compression behind that",
            "rename it, set `file_format` of the source, or leave the file out by a glob",
        )


def read_rows(
    stream: IO[bytes],
    where: str,
    text_key: str,
    kind: Kind | None = None,
    max_row_bytes: int = MAX_ROW_MIB * MIB,
    specials: Specials = (),
    shape: RowsConfig | None = None,
    span: FileSpan | None = None,
) -> Iterator[Row]:
    """Every row of the file `where`, whose bytes `stream` gives. `kind`: its format, where the name does not say it; `specials`:
    of the tokenizer, which no message may hold; `shape`: where a conversation is; `span`: the part to read. Raises UserError
    for a file that cannot be read, or a row larger than `max_row_bytes`."""
    is_text_by_name, kind = kind is None, kind or file_kind(where)
    form = Form(text_key, specials, shape)
    if kind in ("parquet", "arrow"):
        yield from table_rows(stream, where, kind, form, span)
        return
    try:
        data = unpacked_file(stream, where) if span is None else stream
        if kind == "jsonl":
            yield from json_lines(data, where, form, max_row_bytes, span)
        elif kind == "json":
            yield from json_rows(data, where, form, max_row_bytes)
        elif kind in ("csv", "tsv"):
            yield from csv_rows(data, where, form, max_row_bytes, "," if kind == "csv" else "\t")
        else:
            whole = data.read(max_row_bytes + 1)
            check_row_size(len(whole), where, max_row_bytes)
            if is_text_by_name:
                _check_no_rows(whole, where)
            yield attempted(decode, whole, where, 0)
    except compression.broken() as error:
        raise damaged_file(where, error) from None


def _check_no_rows(whole: bytes, where: str) -> None:
    """Raises UserError where the first lines of a text are JSON objects: files called `dump`, `dump.txt` or `shard.00001.xz` hold
    rows then. A `.log` of such lines is one text."""
    stem = compression.without_compression(_name_in(where).rpartition("/")[2])
    if stem.lower().endswith(".log") or not whole.startswith(b"{"):
        return
    first = whole[:PEEKED_BYTES].splitlines()[:2]
    with contextlib.suppress(ValueError, RecursionError):
        if len(first) == 2 and all(isinstance(json.loads(line), dict) for line in first):
            raise UserError(
                f"{where} would be read as one text, and its lines are JSON objects",
                "the name of a file says its format; a line of a .jsonl file is a row",
                "set `file_format: jsonl` of the source; or `file_format: text`, if it is to be one text",
            )


def spans_of(path: str, kind: Kind | None, num_bytes: int, blocks: bytes) -> list[FileSpan]:
    """The parts of a file that can be read each by itself, together the file; none where only the whole can be."""
    name, kind = _name_in(path), kind or file_kind(path)
    if num_bytes <= CHUNK_BLOCKS * BLOCK_BYTES:
        return []
    if kind == "jsonl" and compression.without_compression(name) == name:
        before = line_ends_before(blocks).tolist()
        ends = [*range(CHUNK_BLOCKS, len(before), CHUNK_BLOCKS), len(before)]
        return [
            FileSpan(first * BLOCK_BYTES, min(end * BLOCK_BYTES, num_bytes), before[first])
            for first, end in zip([0, *ends], ends)
        ]
    if kind == "parquet":
        return [FileSpan(*span) for span in row_groups(path, CHUNK_BLOCKS * BLOCK_BYTES)]
    return []


def damaged_file(where: str, error: Exception) -> UserError:
    return compression.damaged_compression(_name_in(where), where, error)


def unpacked_file(stream: IO[bytes], where: str) -> IO[bytes]:
    """The bytes of the file `where`, unpacked as its name says (compression.unpacked_stream)."""
    return compression.unpacked_stream(stream, _name_in(where), where)


def check_compression(where: str) -> None:
    """Raises UserError for rows in a compression that is not read, so that they are not left out as binary."""
    name = _name_in(where)
    stem, ends = name, (*compression.OTHER, *compression.KNOWN)
    while end := next((end for end in ends if stem.endswith(end)), ""):
        stem = stem.removesuffix(end)  # several in .jsonl.tar.gz
    kind = file_kind(stem)
    is_other = kind != "text" and compression.without_compression(name) != stem
    if stem != name and (is_other or kind in TABLES):
        end = name.removeprefix(stem)
        known = ", ".join(compression.KNOWN)
        rule = f"rows as text may be compressed as {known}; Parquet and Arrow are compressed inside, and not again"
        raise UserError(
            f"{where} holds rows in the compression {end}", rule, "unpack it, or compress it as one of these"
        )


def few(names: Iterable[str]) -> str:
    """The first names, for messages."""
    first = list(islice(names, FEW + 1))
    return ", ".join(first[:FEW]) + (", ..." if len(first) > FEW else "")


def of_rows(paths: list[str], num_all: int) -> UserError:
    """The error for files of rows among plain texts, of `num_all` files, that the recipe does not name."""
    hold = "holds rows" if len(paths) == 1 else "hold rows"
    return UserError(
        f"{len(paths)} of {num_all} files ({few(paths)}) {hold}, and others are plain texts",
        "a directory or glob holds either rows or texts: .json, .csv and .tsv files among texts are probably not part of the "
        "corpus",
        "name the texts by a glob (**/*.txt) to leave these files out; name these files in `path` to read their rows too",
    )


def binary_file(path: Path) -> UserError:
    """The error for a binary file that the recipe names, or whose name promises rows."""
    rule = f"a source is text in UTF-8, .jsonl, .json, .csv (all also as {', '.join(compression.KNOWN)}), .parquet or .arrow"
    return UserError(
        f"{path} is a binary file (it holds NUL bytes)", rule, "bring it again, unpack it, or convert it to UTF-8"
    )
