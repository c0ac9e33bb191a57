"""A row -> its text: under a key, in a nested one, or of several keys as JSON (a conversation, a pair).

Where rows hold conversations or pairs (the keys CONVERSATION and PAIR), the text is their JSON (chat_rows.conversation_of,
preference_rows.pair_of). A key with dots, meta.text, is a key of that name, or else `text` of what `meta` holds. A text is exact:
its UTF-8 bytes are those of the file.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from windlass.data.sources.bad_rows import FETCHED, BadRow, Placed, fetched_text
from windlass.data.sources.chat_rows import CHAT_COLUMNS, Specials, check_specials, conversation_of
from windlass.data.sources.config import CONVERSATION, PAIR
from windlass.data.sources.preference_rows import PAIR_COLUMNS, pair_of
from windlass.data.sources.row_shapes import ABSENT, as_chat_row, as_pair_row, columns_read, value_at, without_nulls
from windlass.data.sources.shape_config import RowsConfig
from windlass.errors import nearest

OF_ROWS: Final = {CONVERSATION: conversation_of, PAIR: pair_of, FETCHED: fetched_text}
COLUMNS_OF: Final = {CONVERSATION: CHAT_COLUMNS, PAIR: PAIR_COLUMNS}


class Form(NamedTuple):
    """What a source's rows are to hold."""

    text_key: str
    specials: Specials = ()
    """Special tokens of the tokenizer, which no message may hold."""
    shape: RowsConfig | None = None
    """Where a conversation is, if not under the usual names."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns of a table that are read; None of `text_key` alone."""
        if self.shape is None:
            return COLUMNS_OF.get(self.text_key)
        return columns_read(self.shape, of_pairs=self.text_key == PAIR)


def document_text(row: Mapping[str, Any], where: str, what: str, form: Form, rule: str) -> str:
    """The document of a row. `what`: a key or a column, for messages. Raises BadRow."""
    key = form.text_key
    if key in OF_ROWS:
        row = without_nulls(row) if what == "column" else row
        if form.shape is not None:
            row = (as_pair_row if key == PAIR else as_chat_row)(row, form.shape, where)
        text = checked_text(OF_ROWS[key](row, where), where, key, rule)
        check_specials(text, where, form.specials)
        return text if key == FETCHED else Placed.at(text, where)
    value = value_at(row, key)
    if value is ABSENT:
        raise no_column(where, what, key, list(map(str, row)), rule)
    return checked_text(value, where, key, rule)


def no_column(where: str, what: str, text_key: str, names: list[str], rule: str) -> BadRow:
    given = f"{where} has no {what} `{text_key}`"
    if "messages" in names or {"prompt", "completion"} <= set(names):
        held = "messages" if "messages" in names else "prompt and completion"
        return BadRow("missing key", given, rule, f"it holds {held}: set `format: chat` of the source")
    if {"chosen", "rejected"} <= set(names):
        change = f"it holds {PAIR}: set `format: preference` of the source"
        return BadRow("missing key", given, rule, change)
    for shape, keys in (("sharegpt", ["conversations"]), ("alpaca", ["instruction", "output"])):
        if set(keys) <= set(names):
            change = f"it holds {' and '.join(keys)}: set `format: chat` and `rows: {shape}` of the source"
            return BadRow("missing key", given, rule, change)
    change = f"{nearest(text_key, names)}set `text` of the source to one of its {what}s: {', '.join(names) or 'none'}"
    return BadRow("missing key", given, rule, change)


def checked_text(text: Any, where: str, text_key: str, rule: str) -> str:
    """`text`, if it is a string of valid Unicode. Raises BadRow."""
    if not isinstance(text, str):
        found = "nothing" if text is None else type(text).__name__
        kind = "null" if text is None else "wrong type"
        raise BadRow(kind, f"{where} has {found} under `{text_key}`", rule, "give one that holds text")
    try:
        text.encode()
    except UnicodeEncodeError:
        given = f"{where} holds half of a surrogate pair"
        raise BadRow("lone surrogate", given, "text must be valid Unicode", "fix it") from None
    return text


def decode(data: bytes, where: str, offset: int) -> str:
    """The text that `data`, which begins at `offset` of the whole text `where`, is in UTF-8. Raises BadRow."""
    return _decoded(data, where, offset, in_utf8(where))


def decode_line(data: bytes, path: str, number: int, offset: int) -> str:
    """The text of a line of a file. Raises BadRow where its bytes are no UTF-8."""
    return _decoded(data, f"{path}:{number}", offset, line_in_utf8(path))


def in_utf8(path: str) -> str:
    """What to do about a file that is in another encoding."""
    return f"convert it: iconv -f LATIN1 -t UTF-8 {path}"


def line_in_utf8(path: str) -> str:
    """What to do about a line that is in another encoding: its file may be in two."""
    return f"fix the line; or, if all of the file is in another encoding, {in_utf8(path)}"


def _decoded(data: bytes, where: str, offset: int, change: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        given = f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset + error.start}"
        raise BadRow("not UTF-8", given, "text is read as UTF-8", change) from None
