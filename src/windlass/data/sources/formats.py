"""The file formats of a source: bytes in, texts out, one row at a time.

    *.jsonl, *.ndjson    a line is a row: an object whose key `text` (or another) holds the document
    *.parquet            a row is a row: the column `text` (or another), read row group by row group
    everything else      the file is one row: plain text

Where rows hold conversations or pairs (the keys CONVERSATION and PAIR), the text is their JSON (chat_rows.conversation_of,
preference_rows.pair_of).

All but Parquet may be compressed: the name then ends in `.gz`, `.zst`, `.xz` or `.bz2` (compression). Compressed `.json` is read
as JSON lines, as large corpora name theirs. `file_format` of a source overrules the names. Memory: one row of at most
`max_row_mib`, or a batch of 256 rows of Parquet and its pages. A text is exact: its UTF-8 bytes are those of the file.

An empty document is a row too, "", and counts as one. A blank line of JSON lines is no row. A byte order mark before the first
line is dropped. A .json, .csv or .tsv file most likely holds rows and would be read as one text: it is refused, unless the recipe
names it among other files.
"""

import codecs
import json
import traceback
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

from windlass.data.sources import compression
from windlass.data.sources.bad_rows import FETCHED, BadRow, Row, attempted, fetched_text
from windlass.data.sources.chat_rows import CHAT_COLUMNS, Specials, check_specials, conversation_of
from windlass.data.sources.config import CONVERSATION, MAX_ROW_MIB, PAIR, Kind
from windlass.data.sources.preference_rows import PAIR_COLUMNS, pair_of
from windlass.errors import UserError, nearest
from windlass.units import MIB

FEW: Final = 3  # files that a message names
ROWS_AT_ONCE: Final = 256  # of Parquet
OF_ROWS: Final = {CONVERSATION: conversation_of, PAIR: pair_of, FETCHED: fetched_text}
COLUMNS_OF: Final = {CONVERSATION: CHAT_COLUMNS, PAIR: PAIR_COLUMNS}


def kind_of(name: str) -> Kind:
    """The format, by the end of a file's name or URL."""
    name = _name_in(name)
    stem = compression.without_compression(name)
    is_lines = stem.endswith((".jsonl", ".ndjson")) or (stem != name and stem.endswith(".json"))
    return "jsonl" if is_lines else "parquet" if name.endswith(".parquet") else "text"


def _name_in(where: str) -> str:
    """In small letters, and without the query of a URL, such as a signature."""
    return (where.partition("?")[0] if "://" in where else where).lower()


def holds_rows(name: str) -> bool:
    """Whether a file that is read as one text is of a kind that holds rows."""
    return kind_of(name) == "text" and compression.without_compression(_name_in(name)).endswith(
        (".json", ".csv", ".tsv")
    )


def names_rows(name: str) -> bool:
    """Whether the name says that the file holds rows as text: bytes that are no text mean that it is damaged."""
    return kind_of(name) == "jsonl" or holds_rows(name)


def read_rows(
    stream: IO[bytes],
    where: str,
    text_key: str,
    kind: Kind | None = None,
    max_row_bytes: int = MAX_ROW_MIB * MIB,
    specials: Specials = (),
) -> Iterator[Row]:
    """Every row of the file `where`, whose bytes `stream` gives. `kind`: its format, where the name does not say it; `specials`:
    of the tokenizer, which no message may hold. Raises UserError for a file that cannot be read, or a row larger than
    `max_row_bytes`."""
    kind = kind or kind_of(where)
    if kind == "parquet":
        yield from _parquet_rows(stream, where, text_key, specials)
        return
    try:
        data = unpacked(stream, where)
        if kind == "jsonl":
            yield from _lines(data, where, text_key, max_row_bytes, specials)
        else:
            whole = data.read(max_row_bytes + 1)
            _check_size(whole, where, max_row_bytes)
            yield attempted(decode, whole, where, 0)
    except compression.broken() as error:
        raise damaged(where, error) from None


def _check_size(row: bytes, where: str, max_row_bytes: int) -> None:
    if len(row) > max_row_bytes:
        given = f"{where} is a row of more than {max_row_bytes // MIB} MiB"
        rule = "a row (a line of JSON, a whole text file) is read into memory, up to `max_row_mib` of its source"
        raise UserError(given, rule, "raise `max_row_mib` of the source, or cut the text into documents")


def damaged(where: str, error: Exception) -> UserError:
    return compression.damaged(_name_in(where), where, error)


def unpacked(stream: IO[bytes], where: str) -> IO[bytes]:
    """The bytes of the file `where`, unpacked as its name says (compression.unpacked)."""
    return compression.unpacked(stream, _name_in(where), where)


def check_compression(where: str) -> None:
    """Raises UserError for rows in a compression that is not read, so that they are not left out as binary."""
    name = _name_in(where)
    stem = next(
        (name.removesuffix(end) for end in (*compression.OTHER, *compression.KNOWN) if name.endswith(end)), name
    )
    is_other = (
        stem.endswith((".jsonl", ".ndjson", ".json", ".csv", ".tsv")) and compression.without_compression(name) == name
    )
    if stem != name and (is_other or stem.endswith(".parquet")):
        end = name.removeprefix(stem)
        rule = f"rows as text may be compressed as {', '.join(compression.KNOWN)}; Parquet is compressed inside, and not again"
        raise UserError(
            f"{where} holds rows in the compression {end}", rule, "unpack it, or compress it as one of these"
        )


def few(names: Iterable[str]) -> str:
    """The first names, for messages."""
    first = list(islice(names, FEW + 1))
    return ", ".join(first[:FEW]) + (", ..." if len(first) > FEW else "")


def of_rows(paths: list[str], num_all: int) -> UserError:
    """The error for files that hold rows, of `num_all` files, and would be read as one text each."""
    first = few(paths)
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
    """The error for a binary file that the recipe names, or whose name promises rows."""
    rule = f"a source is text in UTF-8, .jsonl (both also as {', '.join(compression.KNOWN)}), or .parquet"
    return UserError(
        f"{path} is a binary file (it holds NUL bytes)", rule, "bring it again, unpack it, or convert it to UTF-8"
    )


def _lines(stream: IO[bytes], where: str, text_key: str, max_row_bytes: int, specials: Specials) -> Iterator[Row]:
    offset = number = 0
    while line := stream.readline(max_row_bytes + 1):
        number += 1
        _check_size(line, f"{where}:{number}", max_row_bytes)
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        row = attempted(_text_of_line, line, f"{where}:{number}", text_key, offset, specials)
        if row is not None:
            yield row
        offset += len(line)


def _text_of_line(data: bytes, where: str, text_key: str, offset: int, specials: Specials) -> str | None:
    """None of a blank line. Raises BadRow."""
    line = decode(data, where, offset)
    if not line.strip():
        return None
    rule = f"a line of a .jsonl file is an object whose key `{text_key}` holds the text"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"{where} is not JSON: {error}", rule, "mend or remove the line") from None
    if not isinstance(value, dict):
        given = f"{where} is {type(value).__name__}, not an object"
        raise BadRow("wrong type", given, rule, "mend or remove the line")
    return text_of(value, where, "key", text_key, rule, specials)


def text_of(row: Mapping[str, Any], where: str, what: str, text_key: str, rule: str, specials: Specials = ()) -> str:
    """The document of a row. `what`: a key or a column, for messages. Raises BadRow."""
    if text_key in OF_ROWS:
        text = checked(OF_ROWS[text_key](row, where), where, text_key, rule)
        check_specials(text, where, specials)
        return text
    if text_key not in row:
        raise no_column(where, what, text_key, list(map(str, row)), rule)
    return checked(row[text_key], where, text_key, rule)


def no_column(where: str, what: str, text_key: str, names: list[str], rule: str) -> BadRow:
    given = f"{where} has no {what} `{text_key}`"
    if "messages" in names or {"prompt", "completion"} <= set(names):
        held = "messages" if "messages" in names else "prompt and completion"
        return BadRow("missing key", given, rule, f"it holds {held}: set `format: chat` of the source")
    if {"chosen", "rejected"} <= set(names):
        change = f"it holds {PAIR}: set `format: preference` of the source"
        return BadRow("missing key", given, rule, change)
    change = f"{nearest(text_key, names)}set `text` of the source to one of its {what}s: {', '.join(names) or 'none'}"
    return BadRow("missing key", given, rule, change)


def checked(text: Any, where: str, text_key: str, rule: str) -> str:
    """`text`, if it is a string of valid Unicode. Raises BadRow."""
    if not isinstance(text, str):
        found = "nothing" if text is None else type(text).__name__
        kind = "null" if text is None else "wrong type"
        raise BadRow(kind, f"{where} has {found} under `{text_key}`", rule, "give one that holds text")
    try:
        text.encode()
    except UnicodeEncodeError:
        given = f"{where} holds half of a surrogate pair"
        raise BadRow("lone surrogate", given, "text must be valid Unicode", "mend it") from None
    return text


def _parquet_rows(stream: IO[bytes], where: str, text_key: str, specials: Specials) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    rule = f"the column `{text_key}` of a Parquet file holds one text per row"
    try:
        file = pyarrow.parquet.ParquetFile(stream)
        names = list(file.schema_arrow.names)
        held = COLUMNS_OF.get(text_key, (text_key,))
        if text_key not in OF_ROWS and text_key not in names:
            raise no_column(where, "column", text_key, names, rule)
        wanted = [name for name in names if name in held] or names[:1]
        if len(set(wanted)) < len(wanted):
            given = f"{where} has several columns of one name: {', '.join(wanted)}"
            raise UserError(given, rule, "write the file again with each name once")
        number = 0
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted):
            for row in _each(batch):
                number += 1
                yield attempted(_text_of_row, row, f"{where}, row {number},", text_key, rule, specials)
    except (pyarrow.ArrowException, OSError) as error:
        if not isinstance(error, pyarrow.ArrowException) and not _is_of_arrow(error):
            raise
        said = str(error).splitlines()[0]
        raise UserError(f"{where} cannot be read as Parquet: {said}", rule, "bring the file again") from None


def _each(batch: Any) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch; the error of one whose text is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # of some row
        for number in range(len(batch)):
            try:
                (row,) = batch.slice(number, 1).to_pylist()
            except UnicodeDecodeError as error:
                row = error
            yield row


def _text_of_row(
    row: dict[str, Any] | UnicodeDecodeError, where: str, text_key: str, rule: str, specials: Specials
) -> str:
    if isinstance(row, UnicodeDecodeError):
        given = f"{where} holds text that is not UTF-8: byte 0x{row.object[row.start]:02x}"
        raise BadRow("not UTF-8", given, "text is read as UTF-8", "write the file again with a text column")
    return text_of(row, where, "column", text_key, rule, specials)


def _is_of_arrow(error: OSError) -> bool:
    """Whether Arrow raised it (it raises OSError for damaged pages too), not the file or store that it reads."""
    origin = traceback.extract_tb(error.__traceback__)[-1].filename
    return error.errno is None and origin.startswith("pyarrow/")


def decode(data: bytes, where: str, offset: int) -> str:
    """The text that `data`, which begins at `offset` of `where`, is in UTF-8. Raises BadRow."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        given = f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        change = f"convert it: iconv -f LATIN1 -t UTF-8 {where}"
        raise BadRow("not UTF-8", given, "text is read as UTF-8", change) from None
