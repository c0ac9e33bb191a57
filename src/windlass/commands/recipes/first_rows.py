"""What the first rows of a file say of it, so that a new recipe runs on it as it is written: what they are, under which keys, and
how many differ. JSON lines and .json, compressed or not; of other files nothing is known here. No torch.

Validation is held out by the hash of a document, equal ones together: 300 rows of three texts are three documents.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from windlass.data.sources.bad_rows import FoundRows
from windlass.data.sources.compression import broken, unpacked_stream, without_compression
from windlass.data.sources.config import SourceConfig
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import source_of_files
from windlass.errors import UserError

Kind = Literal["pretrain", "sft", "dpo"]
Row = Mapping[str, Any]
MANY: Final = 1000
ROWS: Final = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".ldjson", ".json")
BETWEEN: Final = re.compile(r"[\s,]*")
READ_BYTES: Final = 64 << 20  # of a file, to look for rows that are bad
ARRAY_BYTES: Final = 8 << 20  # of a .json file that holds one array: more rows are not looked at


class Shape(NamedTuple):
    """Rows that have all of `keys`: what a run learns from them, the source's settings, and which keys are read."""

    kind: Kind
    keys: frozenset[str]
    settings: Mapping[str, Any]
    read: tuple[str, ...]


SHAPES: Final = (
    Shape("dpo", frozenset({"prompt", "chosen", "rejected"}), {"format": "preference"}, ("prompt", "chosen", "rejected")),
    *(Shape("dpo", frozenset({asked, "chosen", "rejected"}), {"format": "preference", "rows": rows},
            ("system", asked, "input", "chosen", "rejected"))
      for asked, rows in (("conversations", "sharegpt"), ("instruction", "alpaca"),
                          ("question", {"prompt": "question", "system": "system"}))),
    Shape("dpo", frozenset({"chosen", "rejected"}), {"format": "preference"}, ("chosen", "rejected")),
    Shape("sft", frozenset({"messages"}), {"format": "chat"}, ("tools", "messages")),
    Shape("sft", frozenset({"prompt", "completion"}), {"format": "chat"}, ("tools", "prompt", "completion")),
    Shape("sft", frozenset({"conversations"}), {"format": "chat", "rows": "sharegpt"}, ("system", "conversations")),
    Shape("sft", frozenset({"instruction", "output"}), {"format": "chat", "rows": "alpaca"},
          ("system", "instruction", "input", "output")),
    *(Shape("sft", frozenset({prompt, answer}), {"format": "chat", "rows": {"prompt": prompt, "completion": answer}},
            (prompt, answer))
      for prompt, answer in (("question", "answer"), ("prompt", "response"), ("instruction", "response"),
                             ("query", "response"), ("problem", "solution"))),
)  # fmt: skip
WITHOUT: Final = {"pretrain": {}, "sft": {"format": "chat"}, "dpo": {"format": "preference"}}
"""Settings of a source whose rows are not here, or of another shape than is asked for."""


def shape_of_file(file: Path, kind: Kind | None) -> Shape:
    """By the keys of the first row, among those of `kind` where it is given; else texts."""
    row = next(first_rows(file), {})
    found = next((shape for shape in SHAPES if shape.keys <= row.keys()), None)
    if found is not None and kind in (None, found.kind):
        return found
    kind = kind or "pretrain"
    texts = [key for key, value in row.items() if isinstance(value, str)]
    if kind == "pretrain" and "text" not in row and len(texts) == 1:
        return Shape(kind, frozenset(), {"text": texts[0]}, (texts[0],))
    return Shape(kind, frozenset(), WITHOUT[kind], ("text",) if kind == "pretrain" else tuple(row))


def num_distinct(file: Path, shape: Shape) -> int:
    """Documents that differ among the first MANY."""
    rows = islice(first_rows(file), MANY)
    return len({json.dumps([row.get(key) for key in shape.read]) for row in rows})


def bad_rows_note(source: Mapping[str, Any]) -> str | None:
    """A sentence on rows among the first MANY that could not be learned as a source of these settings. None where all could, and
    where its file is large or not here: `prepare` reads all. Raises UserError where none could."""
    found, config = FoundRows(), SourceConfig.model_validate(source)
    path = Path(source.get("path", "")).expanduser()
    if not path.is_file() or path.stat().st_size > READ_BYTES:
        return None
    documents = source_of_files(config, scan(config, lambda _: None))._replace(bad_rows=found).documents()
    num_rows = sum(1 for _ in islice(documents, MANY)) + len(found.bad)
    if not found.bad:
        return None
    _, first = found.bad[0]
    if len(found.bad) == num_rows:
        raise UserError(f"nothing in {path} can be learned: {first.given}", first.rule, first.change)
    are = "1 row is bad" if len(found.bad) == 1 else f"{len(found.bad)} rows are bad"
    share = math.ceil(200 * len(found.bad) / num_rows) / 100  # twice what was seen
    amount = f"{len(found.bad)}" if num_rows < MANY or share >= 1 else f"{share:g}"
    leave_out = f"`bad_rows: {{at_most: {amount}}}` of the source leaves bad rows out"
    return f"of the first {num_rows} rows {are}: {first.given} ({first.rule}): {first.change}. {leave_out}"


def has_rows(file: Path) -> bool:
    return file.is_file() and _stem(file).endswith(ROWS)


def _stem(file: Path) -> str:
    return without_compression(file.name.lower())


def first_rows(file: Path) -> Iterator[Row]:
    """The rows that can be read; `prepare` names the others."""
    if not has_rows(file):
        return
    try:
        with file.open("rb") as stream:
            data = unpacked_stream(stream, file.name.lower(), str(file))
            begin = data.readline(ARRAY_BYTES).removeprefix(b"\xef\xbb\xbf")
            while begin.isspace():
                begin = data.readline(ARRAY_BYTES)
            is_array = _stem(file).endswith(".json") and begin.lstrip()[:1] == b"["
            for value in _of_array(begin + data.read(ARRAY_BYTES)) if is_array else _of_lines(begin, data):
                if isinstance(value, dict):
                    yield value
    except (OSError, UserError):
        return
    except broken():  # damaged: `prepare` says how
        return


def _of_lines(first: bytes, rest: Iterable[bytes]) -> Iterator[Any]:
    for line in chain([first], rest):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def _of_array(data: bytes) -> Iterator[Any]:
    text, decoder = data.decode("utf-8", "ignore"), json.JSONDecoder()
    at = text.index("[") + 1
    while found := BETWEEN.match(text, at):
        try:
            value, at = decoder.raw_decode(text, found.end())
        except (ValueError, RecursionError):  # the end of the array, or of what was read
            return
        yield value
