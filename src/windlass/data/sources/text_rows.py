"""Files of rows as text: JSON lines, JSON, CSV and TSV.

    JSON lines   a line is a row: an object. A blank line is none
    JSON         an array of rows, read row by row; or lines, as many name theirs; or one object, which is a row
    CSV, TSV     a line names the columns; a row is a line, or several where a quoted cell holds line breaks. Cells are texts

Memory: one row of at most `max_row_mib`. A byte order mark before the first line is dropped.
"""

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, Any, Final

from windlass.data.sources.bad_rows import BadRow, Row, attempted
from windlass.data.sources.row_text import OF_ROWS, Form, decode_line, document_text, line_in_utf8, no_column
from windlass.errors import UserError
from windlass.units import MIB

AT_ONCE: Final = 256 << 10  # bytes of an array
BLANK: Final = " \t\r\n"


def check_row_size(num_bytes: int, where: str, max_row_bytes: int) -> None:
    if num_bytes > max_row_bytes:
        given = f"{where} is a row of more than {max_row_bytes // MIB} MiB"
        rule = "a row (a line of JSON, a whole text file) is read into memory, up to `max_row_mib` of its source"
        raise UserError(given, rule, "raise `max_row_mib` of the source, or cut the text into documents")


def _lines_of(stream: IO[bytes], max_row_bytes: int) -> Iterator[bytes]:
    return iter(lambda: stream.readline(max_row_bytes + 1), b"")


def json_lines(
    stream: IO[bytes], where: str, form: Form, max_row_bytes: int, span: tuple[int, int, int] | None = None
) -> Iterator[Row]:
    """`span`: begin, end and number of lines before, of which the lines that begin there are read (formats.FileSpan)."""
    number, offset, end = 1, 0, None
    if span is not None:
        offset, end, number = _first_line(stream, *span)
    return _rows_of_lines(_lines_of(stream, max_row_bytes), where, form, max_row_bytes, number, offset, end)


def _first_line(stream: IO[bytes], begin: int, end: int, before: int) -> tuple[int, int, int]:
    """(where the first line begins that begins at `begin` or later, `end`, its number); the stream is there."""
    at = stream.seek(max(0, begin - 1))
    while at < begin or (begin and at < end):
        part = stream.readline(AT_ONCE)
        at += len(part)
        if part.endswith(b"\n") or not part:
            break
    return at, end, before + 1 + (at > begin)


def _rows_of_lines(
    lines: Iterable[bytes],
    where: str,
    form: Form,
    max_row_bytes: int,
    first: int = 1,
    offset: int = 0,
    end: int | None = None,
) -> Iterator[Row]:
    if end is not None and offset >= end:
        return
    for number, line in enumerate(lines, first):
        check_row_size(len(line), f"{where}:{number}", max_row_bytes)
        end_of_line = offset + len(line)
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        row = attempted(_text_of_line, line, where, number, form, end_of_line - len(line))
        if row is not None:
            yield row
        offset = end_of_line
        if end is not None and offset >= end:
            return


def _text_of_line(data: bytes, path: str, number: int, form: Form, offset: int) -> str | None:
    """None of a blank line. Raises BadRow."""
    line, where = decode_line(data, path, number, offset), f"{path}:{number}"
    if not line.strip():
        return None
    rule = f"each line of the file is an object whose key `{form.text_key}` holds the text"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"{where} is not JSON: {error}", rule, "fix or remove the line") from None
    return _text_of_value(value, where, form, rule)


def _text_of_value(value: Any, where: str, form: Form, rule: str) -> str:
    if not isinstance(value, dict):
        given = f"{where} is {type(value).__name__}, not an object"
        raise BadRow("wrong type", given, rule, "fix or remove it")
    return document_text(value, where, "key", form, rule)


def json_rows(stream: IO[bytes], where: str, form: Form, max_row_bytes: int) -> Iterator[Row]:
    """The rows of a file that is a JSON array, JSON lines, or one JSON object. The first letter and the end of the first line
    show which. Raises UserError where the file is none of these: where a row of it ends is not known."""
    lines, held = _lines_of(stream, max_row_bytes), list[bytes]()
    for line in lines:
        held.append(line)
        if line.removeprefix(codecs.BOM_UTF8).strip():
            break
    begin = b"".join(held).removeprefix(codecs.BOM_UTF8).strip()
    if begin.startswith(b"["):
        yield from _array(chain([b"".join(held)], iter(lambda: stream.read(AT_ONCE), b"")), where, form, max_row_bytes)
    elif not begin or begin.endswith(b"}"):
        yield from _rows_of_lines(chain(held, lines), where, form, max_row_bytes)
    else:
        whole = b"".join([*held, stream.read(max_row_bytes + 1)])
        check_row_size(len(whole), where, max_row_bytes)
        try:
            value = json.loads(whole.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise _not_json(where, error) from None
        yield attempted(_text_of_value, value, where, form, f"the key `{form.text_key}` of an object holds the text")


def _not_json(where: str, error: Exception) -> UserError:
    rule = "a .json file is an array of rows, or lines with an object each, or one object"
    change = "fix the file; or write JSON lines (.jsonl), of which `bad_rows` leaves single ones out"
    return UserError(f"{where} is not JSON: {error}", rule, change)


def _array(chunks: Iterator[bytes], where: str, form: Form, max_row_bytes: int) -> Iterator[Row]:
    """The rows of an array, decoded one by one. `chunks` begin with its first line."""
    rule = f"each row of the array is an object whose key `{form.text_key}` holds the text"
    text = _Text(chunks, where, max_row_bytes)
    text.skip("[")
    number, is_end = 0, text.next_letter() == "]"
    while not is_end:
        number += 1
        value = text.value(f"{where}, row {number},")
        yield attempted(_text_of_value, value, f"{where}, row {number},", form, rule)
        is_end = text.next_letter() == "]"
        if not is_end:
            text.skip(",")
    text.skip("]")
    if text.next_letter():
        raise _not_json(where, ValueError("text behind the array"))


class _Text:
    """JSON text of which a part is held: from the next letter on."""

    def __init__(self, chunks: Iterator[bytes], where: str, max_row_bytes: int):
        self._chunks, self._where, self._max_row_bytes = chunks, where, max_row_bytes
        self._decode, self._scan = codecs.getincrementaldecoder("utf-8-sig")().decode, json.JSONDecoder().raw_decode
        self._held, self._at = "", 0

    def _more(self) -> bool:
        """Whether there was more to read: at least as much again as is held, so that a large row is not scanned often."""
        parts, num_held = [self._held[self._at :]], len(self._held) - self._at
        before = num_held
        while num_held <= 2 * before:
            chunk = next(self._chunks, None)
            try:
                parts.append(self._decode(chunk or b"", final=chunk is None))
            except UnicodeDecodeError as error:
                raise _not_json(self._where, error) from None
            num_held += len(parts[-1])
            if chunk is None:
                break
        self._held, self._at = "".join(parts), 0
        return num_held > before

    def next_letter(self) -> str:
        """The next one that is not blank; "" at the end."""
        while True:
            while self._at < len(self._held):
                if self._held[self._at] not in BLANK:
                    return self._held[self._at]
                self._at += 1
            if not self._more():
                return ""

    def skip(self, letter: str) -> None:
        if self.next_letter() != letter:
            raise _not_json(self._where, ValueError(f"`{letter}` is missing before {self._held[self._at :][:30]!r}"))
        self._at += 1

    def value(self, where: str) -> Any:
        self.next_letter()
        while True:
            try:
                value, end = self._scan(self._held, self._at)
                if end < len(self._held) or not self._more():  # a number may go on
                    self._at = end
                    return value
            except (ValueError, RecursionError) as error:
                check_row_size(len(self._held) - self._at, f"{where} is not JSON, or", self._max_row_bytes)
                if isinstance(error, RecursionError) or not self._more():
                    raise _not_json(where, error) from None


def csv_rows(stream: IO[bytes], where: str, form: Form, max_row_bytes: int, delimiter: str) -> Iterator[Row]:
    """Raises UserError where the first line does not name the column, or a quote is never closed."""
    csv.field_size_limit(max(csv.field_size_limit(), max_row_bytes))
    # a byte that is no UTF-8 makes its own row bad, and not the file
    reader = csv.reader(
        io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline=""), delimiter=delimiter, strict=True
    )
    rule = f"the first line names the columns, and the column `{form.text_key}` holds one text per row"
    names, line = list[str](), 0
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error) or "field limit" in str(error):
                given = f"{where}:{line} begins a quoted cell that is not closed within {max_row_bytes // MIB} MiB, or at all"
                raise UserError(given, rule, "fix the quotes, or raise `max_row_mib` of the source") from None
            yield BadRow("not CSV", f"{where}:{line} cannot be read: {error}", rule, "fix or remove the line")
            continue
        if cells is None:
            return
        if not names:
            names = _checked_names(cells, where, form, rule)
        elif cells:  # else a blank line
            yield attempted(_text_of_cells, cells, names, where, line, form, rule)


def _checked_names(names: list[str], where: str, form: Form, rule: str) -> list[str]:
    if form.text_key not in OF_ROWS and form.text_key not in names:
        raise no_column(where, "column", form.text_key, names, rule)
    if len(set(names)) < len(names):
        given = f"{where} has several columns of one name: {', '.join(names)}"
        raise UserError(given, rule, "write the file again with each name once")
    return names


def _text_of_cells(cells: list[str], names: list[str], path: str, number: int, form: Form, rule: str) -> str:
    where = f"{path}:{number}"
    if len(cells) != len(names):
        given = f"{where} has {len(cells)} cells, and there are {len(names)} columns"
        raise BadRow("of other columns", given, rule, "fix or remove the line")
    try:
        "".join(cells).encode()
    except UnicodeEncodeError as error:
        given = f"{where} is not UTF-8: byte 0x{ord(error.object[error.start]) & 0xFF:02x}"
        raise BadRow("not UTF-8", given, "text is read as UTF-8", line_in_utf8(path)) from None
    return document_text(dict(zip(names, cells)), where, "column", form, rule)
