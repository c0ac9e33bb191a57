"""Files of columns: Parquet, and Arrow as `datasets` and Feather write it. Rows come a few at a time, of the columns asked for.

Memory: a batch of 256 rows of Parquet and its pages; of Arrow, whose buffers are not copied, a record batch.
"""

import traceback
from collections.abc import Iterator
from typing import IO, Any, Final, Literal

from windlass.data.sources.bad_rows import BadRow, Row, attempted
from windlass.data.sources.row_shapes import BESIDE
from windlass.data.sources.row_text import Form, document_text, no_column
from windlass.errors import UserError

Table = Literal["parquet", "arrow"]
NAMES: Final = {"parquet": "Parquet", "arrow": "Arrow"}
ROWS_AT_ONCE: Final = 256
FILE_MAGIC: Final = b"ARROW1"  # https://arrow.apache.org/docs/format/Columnar.html; a stream has none


def table_rows(
    stream: IO[bytes], where: str, kind: Table, form: Form, span: tuple[int, int, int] | None = None
) -> Iterator[Row]:
    """Every row, or those of a `span` of row groups: the first, the one behind the last, rows before. Raises
    UserError for a file that cannot be read, or lacks the column."""
    import pyarrow

    rule = f"the column `{form.text_key}` of {'a' if kind == 'parquet' else 'an'} {NAMES[kind]} file holds one text per row"
    number = 0 if span is None else span[2]
    try:
        for batch in (
            _parquet(stream, where, form, rule, span) if kind == "parquet" else _arrow(stream, where, form, rule)
        ):
            for row in _each(batch):
                number += 1
                yield attempted(_text_of_row, row, f"{where}, row {number},", form, rule)
    except (pyarrow.ArrowException, OSError) as error:
        if not isinstance(error, pyarrow.ArrowException) and not _is_of_arrow(error):
            raise
        said = str(error).splitlines()[0]
        raise UserError(f"{where} cannot be read as {NAMES[kind]}: {said}", rule, "bring the file again") from None


def _parquet(stream: IO[bytes], where: str, form: Form, rule: str, span: tuple[int, int, int] | None) -> Iterator[Any]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(stream)
    columns = _columns(file.schema_arrow, where, form, rule)
    groups = None if span is None else range(*span[:2])
    yield from file.iter_batches(ROWS_AT_ONCE, groups, columns)


def row_groups(path: str, num_bytes: int) -> list[tuple[int, int, int]]:
    """Spans of the row groups of a Parquet file, of about `num_bytes` each; none of one that cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        known = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):  # said when its rows are read
        return []
    found, begin, before, rows, held = list[tuple[int, int, int]](), 0, 0, 0, 0
    for number in range(known.num_row_groups):
        group = known.row_group(number)
        rows, held = rows + group.num_rows, held + group.total_byte_size
        if held >= num_bytes or number == known.num_row_groups - 1:
            found.append((begin, number + 1, before))
            begin, before, held = number + 1, rows, 0
    return found


def _arrow(stream: IO[bytes], where: str, form: Form, rule: str) -> Iterator[Any]:
    import pyarrow.ipc

    is_file = stream.read(len(FILE_MAGIC)) == FILE_MAGIC
    stream.seek(0)
    opened = pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream)
    tops = list(
        dict.fromkeys(
            name if name in opened.schema.names else name.partition(".")[0]
            for name in _columns(opened.schema, where, form, rule)
        )
    )
    for batch in map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened:
        chosen = batch.select(tops)
        for first in range(0, len(chosen), ROWS_AT_ONCE):
            yield chosen.slice(first, ROWS_AT_ONCE)


def _columns(schema: Any, where: str, form: Form, rule: str) -> list[str]:
    """The columns to read; of a nested one its path. Raises UserError where there is none, or several of one name."""
    names = list(schema.names)
    held = form.columns
    if held is None and form.text_key not in names and not _has_nested(schema, form.text_key):
        raise no_column(where, "column", form.text_key, names, rule)
    wanted = [form.text_key] if held is None else [name for name in names if name in held]
    wanted += [name for name in held or () if name not in names and _has_nested(schema, name)]
    beside = {"tools", *BESIDE} if held is not None and form.shape is None else set()
    if not set(wanted) - beside:  # each row is bad, and says what it has
        wanted = names
    twice = [name for name in names if name in wanted]
    if len(set(twice)) < len(twice):
        given = f"{where} has several columns of one name: {', '.join(twice)}"
        raise UserError(given, rule, "write the file again with each name once")
    return wanted


def _has_nested(schema: Any, path: str) -> bool:
    import pyarrow.types

    head, *rest = path.split(".")
    if head not in schema.names:
        return False
    found = schema.field(head).type
    for part in rest:
        if not pyarrow.types.is_struct(found) or found.get_field_index(part) < 0:
            return False
        found = found.field(part).type
    return True


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


def _text_of_row(row: dict[str, Any] | UnicodeDecodeError, where: str, form: Form, rule: str) -> str:
    if isinstance(row, UnicodeDecodeError):
        given = f"{where} holds text that is not UTF-8: byte 0x{row.object[row.start]:02x}"
        raise BadRow("not UTF-8", given, "text is read as UTF-8", "write the file again with a text column")
    return document_text(row, where, "column", form, rule)


def _is_of_arrow(error: OSError) -> bool:
    """Whether Arrow raised it (it raises OSError for damaged pages too), not the file or store that it reads."""
    origin = traceback.extract_tb(error.__traceback__)[-1].filename
    return error.errno is None and origin.startswith("pyarrow/")
