"""Copies rows that are not on this host, once: of a dataset or of files at URLs, into compressed JSON lines.

`prepare` reads documents several times, and a source must not change meanwhile. So rows are fetched once, into chunks of 64 MiB
of text beside the preparation, about a third of the text's size on disk; the preparation removes them at its end. A chunk is
written whole or not at all. A fetch that was killed continues after the last whole chunk, because a source that cannot change
has the same rows in the same order.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from windlass.data.files import write_durably
from windlass.data.sources.bad_rows import FETCHED, BadRow, BadRows, Placed, Row, attempted, fetched_line, fetched_text
from windlass.data.sources.config import SourceConfig
from windlass.data.sources.growing import Patience, growing_rows
from windlass.data.sources.hub import hub_rows
from windlass.data.sources.source_files import SourceFile, all_source_rows, hash_file
from windlass.data.sources.urls import url_rows
from windlass.errors import UserError
from windlass.units import MIB, format_bytes, format_duration

CHUNK_BYTES: Final = 64 * MIB
BYTES_PER_TOKEN: Final = 8  # fetched for a limit in tokens; more than text has (the demo's Python: 3.1)
ANY_SIZE: Final = 1 << 40  # of a row that is kept: it was measured when it was read
REPORT_EVERY_S: Final = 10.0
WHOLE: Final = "whole"  # a file beside the chunks that holds the number of rows, once none is missing
CHUNK_NAME: Final = re.compile(r"\d+-\d+-\d+-(\d+)\.jsonl\.zst")


def fetch(
    config: SourceConfig,
    files: list[SourceFile],
    directory: Path,
    log: Callable[[str], None],
    patience: Patience | None = None,
    bad_rows: BadRows | None = None,
) -> list[SourceFile]:
    """The rows of a source as local files in `directory`, with `rows` and `documents` applied. Chunks that a killed fetch of the
    same source left there are reused. `patience`: for a source that grows; `bad_rows` collects bad rows, and ends a fetch that is
    of nothing else. Raises UserError."""
    most_bytes = math.inf if config.tokens is None else config.tokens * BYTES_PER_TOKEN
    stream = Stream(config, files, directory, log, patience, most_bytes, is_fetched(directory))
    for _ in stream.rows() if bad_rows is None else bad_rows.without(stream.rows()):
        pass
    if config.grows_until is None:  # of a source that grows, what is listed is read again
        write_durably(directory / WHOLE, str(stream.num_rows).encode())
    return stream.files()


def is_fetched(directory: Path) -> bool:
    """Whether `fetch` has put all rows of its source there."""
    whole = directory / WHOLE
    return whole.is_file() and int(whole.read_bytes()) == _Chunks(directory).rows


class Stream:
    """Rows as they come from a server: written to chunks and yielded at once. Each pass over `texts` starts at the first row;
    only one pass may be active."""

    def __init__(
        self,
        config: SourceConfig,
        files: list[SourceFile],
        directory: Path,
        log: Callable[[str], None],
        patience: Patience | None = None,
        most_bytes: float = math.inf,
        is_whole: bool = False,
    ):
        """`is_whole`: all rows are kept, and nobody is asked for one."""
        self._config, self._log, self._most_bytes = config, log, most_bytes
        self._chunks = _Chunks(directory)
        if is_whole:
            log(f"{config.label}: all {self._chunks.rows} rows were fetched before")
        elif self._chunks.rows:
            log(f"{config.label}: {self._chunks.rows} rows were fetched before; continuing after them")
        first, end = config.slice
        if is_whole:
            self._rows: Iterator[Row] = iter(())
        elif config.grows_until is None:
            self._rows = _rows_of(config, files, first + self._chunks.rows, end)
        else:
            rows = islice(growing_rows(config, patience or Patience(), files[0].specials), first, end)
            self._rows = _behind(self._chunks.kept(), rows, config.label)
        self._most_texts = math.inf if config.documents is None else config.documents
        self._begun_bytes, self._is_whole = self._chunks.bytes, is_whole
        self._start_s = self._logged_s = time.monotonic()

    def advance(self) -> Row | None:
        """The next row, which is kept; None after the last."""
        if self._is_whole:
            return None
        chunks = self._chunks
        may_more = chunks.texts < self._most_texts and chunks.bytes < self._most_bytes
        row = next(self._rows, None) if may_more else None
        if row is None:
            self._is_whole = True
            chunks.flush()
        else:
            chunks.add(row)
        now_s = time.monotonic()
        if self._is_whole or now_s - self._logged_s > REPORT_EVERY_S:
            self._logged_s = now_s
            rate = (chunks.bytes - self._begun_bytes) / max(1e-3, now_s - self._start_s)
            took = f"{format_bytes(rate)}/s, {format_duration(now_s - self._start_s)}"
            self._log(f"{self._config.label}: fetched {chunks.rows} rows, {format_bytes(chunks.bytes)}, {took}")
        return row

    def texts(self) -> Iterator[Row]:
        """Every row but empty ones: first those that are kept, then new ones."""
        return filter(None, self.rows())

    def rows(self) -> Iterator[Row]:
        """Every row: first those that are kept, then new ones."""
        yield from self._chunks.kept()
        while (row := self.advance()) is not None:
            yield row

    @property
    def num_rows(self) -> int:
        """Rows that are kept."""
        return self._chunks.rows

    def files(self) -> list[SourceFile]:
        """The chunks, once all rows are fetched."""
        assert self._is_whole
        return self._chunks.files()


class _Chunks:
    """Rows as files of compressed JSON lines. A file's name counts its rows, texts (neither empty nor bad) and bytes."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._paths = sorted(directory.glob("*.jsonl.zst"))
        counts = [[int(number) for number in path.name.partition(".")[0].split("-")[1:]] for path in self._paths]
        self.rows, self.texts, self.bytes = [sum(column) for column in zip(*counts)] if counts else [0, 0, 0]
        self._begin = (self.rows, self.texts, self.bytes)
        self._held: list[bytes] = []

    def add(self, row: Row) -> None:
        line, is_text = fetched_line(row), row != "" and not isinstance(row, BadRow)
        num_bytes = len(fetched_line(str(row)) if isinstance(row, Placed) else line)  # places are no text
        self._held.append(line)
        self.rows, self.texts, self.bytes = self.rows + 1, self.texts + is_text, self.bytes + num_bytes
        if self.bytes - self._begin[2] >= CHUNK_BYTES:
            self.flush()

    def kept(self) -> Iterator[Row]:
        """Every row so far, empty and bad ones too. No row may be added meanwhile."""
        yield from all_source_rows(self.files())
        for line in self._held:
            yield attempted(fetched_text, json.loads(line), "")

    def flush(self) -> None:
        import zstandard

        if not self._held:
            return
        now = (self.rows, self.texts, self.bytes)
        counts = "-".join(str(after - before) for after, before in zip(now, self._begin))
        self._paths.append(self._directory / f"{len(self._paths):05}-{counts}.jsonl.zst")
        write_durably(self._paths[-1], zstandard.ZstdCompressor(level=1).compress(b"".join(self._held)))
        self._begin, self._held = now, []

    def files(self) -> list[SourceFile]:
        """The chunks that are written."""
        return [hash_file(path, path.name, FETCHED)._replace(max_row_bytes=ANY_SIZE) for path in self._paths]


def fetched_bytes(files: list[SourceFile]) -> int:
    """Bytes of text in the chunks among `files`; 0 where nothing was fetched."""
    names = [CHUNK_NAME.fullmatch(file.name) for file in files]
    return sum(int(name[1]) for name in names if name)


def _rows_of(config: SourceConfig, files: list[SourceFile], first: int, end: int | None) -> Iterator[Row]:
    if config.hub is not None:
        return hub_rows(config, files[0], first, end)
    return islice(url_rows(files), first, None if end is None else max(first, end))


def _behind(kept: Iterator[Row], rows: Iterator[Row], label: str) -> Iterator[Row]:
    """`rows` without the `kept` ones that they start with. Raises UserError where they start otherwise."""
    for number, row in enumerate(kept):
        if next(rows, None) != row:
            rule = "a source that grows keeps the files that were taken, and their order"
            change = "put its files back as they were; or delete the preparation, and begin again"
            raise UserError(f"{label}: row {number} is not the one that was taken before", rule, change)
    yield from rows
