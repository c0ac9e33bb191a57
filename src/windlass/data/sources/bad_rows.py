"""Bad rows: a reader yields a row that is no document as a value, BadRow, and goes on behind it.

A row is bad by itself: it is not JSON, has no text or a null, is of another shape, or holds a special token in a user's words.
What makes a whole file unreadable (damaged compression, a missing column, a line beyond `max_row_mib`) is raised as an error.

BadRows counts those of one source by kind and names the first hundred, before anything is encoded. `bad_rows.at_most` decides at
the end whether they are left out or refused. Which rows are bad does not depend on it, and so neither do the shards.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Self

from windlass.data.sources.config import BadRowsConfig
from windlass.errors import UserError

FEW: Final = 3  # rows in an error
NAMED: Final = 100  # rows of a source that are named before
FETCHED: Final = "text, or bad_row"  # the key of a fetched row: see `fetched_line`
HOPELESS: Final = (
    1000  # rows: where the first ones are all bad and too many, a setting is wrong, and the rest is not read
)
REPORTED: Final = frozenset({"source", "kind", "row", "rule", "change"})  # keys of a line of a report


class BadRow(UserError):
    """A row that is no document. Readers yield it in the row's place; where nothing collects bad rows it is raised."""

    def __init__(self, kind: str, given: str, rule: str, change: str):
        """`kind`: what is counted together, in words that follow a number: "2 null"."""
        super().__init__(given, rule, change)
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BadRow) and self.as_texts() == other.as_texts()

    def __hash__(self) -> int:
        return hash(self.as_texts())

    def as_texts(self) -> tuple[str, str, str, str]:
        return self.kind, self.given, self.rule, self.change


class Placed(str):
    """A text that knows its row, for a message that is found when the row is encoded."""

    __slots__ = ("place",)
    place: str
    """Where the row is, as a BadRow has it: a.jsonl:12."""

    @classmethod
    def at(cls, text: str, where: str) -> Self:
        """`where`: as messages begin with it, perhaps with a comma behind it."""
        placed = cls(text)
        placed.place = where.removesuffix(",")
        return placed


Row = str | BadRow
"""A row's text, "" where it is empty; or why it is none."""


class TooManyBadRows(UserError):
    """More bad rows than a recipe allows. What was fetched and encoded before stays for the next attempt."""


def attempted(read: Callable[..., Any], *arguments: Any) -> Any:
    """read(*arguments); the BadRow that it raises as a value, without the data that its traceback holds."""
    try:
        return read(*arguments)
    except BadRow as error:
        return BadRow(*error.as_texts())


def raised(rows: Iterable[Row]) -> Iterator[str]:
    """The texts among `rows`. Raises the first BadRow."""
    for row in rows:
        if isinstance(row, BadRow):
            del rows  # which closes its file, though the error's traceback lives on
            raise row
        yield row


def fetched_line(row: Row) -> bytes:
    """A row of a source that is not on this host, as a line to keep."""
    if isinstance(row, BadRow):
        return json.dumps({"bad_row": row.as_texts()}).encode() + b"\n"
    place = {"place": row.place} if isinstance(row, Placed) else {}
    return json.dumps({"text": row, **place}, ensure_ascii=False).encode() + b"\n"


def fetched_text(row: Mapping[str, Any], _where: str) -> str:
    """What `fetched_line` kept. Raises BadRow where it was one."""
    if "bad_row" in row:
        raise BadRow(*row["bad_row"])
    text: str = row["text"]
    return Placed.at(text, row["place"]) if "place" in row else text


class Report:
    """A file that lists bad rows as they are found, a line of JSON each."""

    def __init__(self, path: str):
        """Empties the file. Raises UserError where it cannot be written, and where it holds anything but an earlier report."""
        self._path = Path(path).expanduser()
        try:
            if not _is_report(self._path):
                raise UserError(
                    f"`bad_rows.report: {path}` exists and is not a report of bad rows",
                    "every preparation rewrites the report, and never overwrites a file of yours",
                    "name another file, or move this one away",
                )
            self._path.write_text("")
        except OSError as error:
            given = f"`bad_rows.report: {path}` cannot be written: {error.strerror}"
            rule = "the report is a file in a directory that is there"
            raise UserError(given, rule, "make its directory, or name another file") from None

    def add(self, source: str, row: BadRow) -> None:
        entry = {"source": source, "kind": row.kind, "row": row.given, "rule": row.rule, "change": row.change}
        with open(self._path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def _is_report(path: Path) -> bool:
    """Whether a report may be written there: no file, an empty one, or one whose first line is a report's. Raises OSError."""
    if not path.exists():
        return True
    with open(path, "rb") as file:
        line = file.readline(1 << 20)
    try:
        return not line or set(json.loads(line)) == REPORTED
    except (ValueError, TypeError, RecursionError):
        return False


class FoundRows:
    """Bad rows of a part of a source, for BadRows of the whole."""

    def __init__(self) -> None:
        self.num_rows, self.bad = 0, list[tuple[int, BadRow]]()
        """`bad`: with the number of each, from 1."""

    def without(self, rows: Iterable[Row]) -> Iterator[str]:
        """The texts among `rows`."""
        for number, row in enumerate(rows, 1):
            self.num_rows = number
            if isinstance(row, BadRow):
                self.bad.append((number, row))
            else:
                yield row


class BadRows:
    """The bad rows of one source. Every pass over its rows begins at the first; each row is counted once."""

    def __init__(
        self,
        use: str,
        label: str,
        config: BadRowsConfig,
        report: Report | None = None,
        is_streamed: bool = False,
    ):
        """`use`: its key in the recipe, sources.0. `is_streamed`: nothing reads the source to its end before it is encoded; so
        the row that is one too many is refused at once."""
        self.use, self.label, self.at_most = use, label, config.at_most
        self._report, self._is_streamed = report, is_streamed
        self.num_rows = self._num_late = 0
        self.counts: Counter[str] = Counter()
        self.named: list[BadRow] = []
        """The first rows."""
        self.examples: dict[str, BadRow] = {}
        """The first row of each kind."""

    def without(self, rows: Iterable[Row]) -> Iterator[str]:
        """The texts among `rows`, which begin at the first. Raises TooManyBadRows where no later row can change it."""
        for number, row in enumerate(rows, 1):
            is_new = number > self.num_rows
            self.num_rows = max(number, self.num_rows)
            if not isinstance(row, BadRow):
                yield row
            elif is_new and not self._add(row):
                del rows  # which closes its file, though the error's traceback lives on
                raise too_many_bad_rows([self])

    def count(self, before: int, num_rows: int, bad: Iterable[tuple[int, BadRow]]) -> None:
        """`num_rows` rows behind the first `before`, and the bad ones among them with their numbers, from 1. Raises as `without`
        does."""
        for number, row in bad:
            is_new = before + number > self.num_rows
            self.num_rows = max(before + number, self.num_rows)
            if is_new and not self._add(row):
                raise too_many_bad_rows([self])
        self.num_rows = max(before + num_rows, self.num_rows)

    def leave_out(self, rows: Iterable[BadRow], log: Callable[[str], None]) -> None:
        """Adds rows that turn out to be bad when they are encoded, and names them. Raises TooManyBadRows where it is `_add` that
        says so."""
        for row in rows:
            self._num_late += 1
            if len(self.named) < NAMED:
                log(f"bad row: {row.given}")
            if not self._add(row):
                raise too_many_bad_rows([self])

    def check_late(self) -> None:
        """Raises TooManyBadRows where rows were found bad when they were encoded, and one is too many."""
        if self._num_late and self.is_too_many:
            raise too_many_bad_rows([self])

    def end(self, log: Callable[[str], None]) -> None:
        """Once a set of the source is encoded. Raises TooManyBadRows where more rows were left out than may be."""
        self.check_late()
        if self._num_late:
            log(f"{self.in_words()}, and left out (bad_rows.at_most: {self.at_most:g})")

    def _add(self, row: BadRow) -> bool:
        """Whether reading goes on."""
        self.counts[row.kind] += 1
        self.examples.setdefault(row.kind, row)
        if len(self.named) < NAMED:
            self.named.append(row)
        if self._report is not None:
            self._report.add(self.use, row)
        is_hopeless = self.num == self.num_rows == HOPELESS and isinstance(self.at_most, int)
        return not (self.is_too_many and (self._is_streamed or is_hopeless))

    @property
    def num(self) -> int:
        return sum(self.counts.values())

    @property
    def is_too_many(self) -> bool:
        if isinstance(self.at_most, int):
            return self.num > self.at_most
        return self.num > Fraction(repr(self.at_most)) * self.num_rows  # 0.29 of 100 is 29, as written

    def in_words(self) -> str:
        return f"{self.num:,} of {self.num_rows:,} rows of {self.label} are bad ({bad_rows_in_words(self.counts)})"


def bad_rows_in_words(counts: dict[str, int]) -> str:
    """Counts by kind, the largest first."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items(), key=_by_count))


def _by_count(pair: tuple[str, int]) -> tuple[int, str]:
    return -pair[1], pair[0]


def judge(found: Sequence[BadRows], log: Callable[[str], None]) -> None:
    """Names the first bad rows of each source. Raises TooManyBadRows where a source has more than it may."""
    refused = [one for one in found if one.is_too_many]
    num = sum(one.num for one in found)
    if num > 1 or not refused:  # one that is refused is in the error
        for row in (row for one in found for row in one.named):
            log(f"bad row: {row.given}")
    if any(one.num > NAMED for one in found):
        log(f"bad rows: the first {NAMED} of a source are named; `bad_rows: {{report: FILE}}` lists all")
    for one in found:
        if one.num and not one.is_too_many:
            log(f"{one.in_words()}, and left out (bad_rows.at_most: {one.at_most:g})")
    if refused:
        raise too_many_bad_rows(refused)


def too_many_bad_rows(refused: Sequence[BadRows]) -> TooManyBadRows:
    first_of_kinds = [row for one in refused for row in one.examples.values()]
    rows = [*first_of_kinds, *(row for one in refused for row in one.named if row not in first_of_kinds)]
    first, num = rows[0], sum(one.num for one in refused)
    needed = f"`bad_rows: {{at_most: {max(one.num for one in refused)}}}` of the source"
    if num == 1:
        return TooManyBadRows(first.given, first.rule, f"{first.change}; or leave it out: {needed}")
    examples = "; ".join(row.given for row in rows[:FEW])
    given = f"{'; '.join(one.in_words() for one in refused)}: {examples}{'; ...' if num > FEW else ''}"
    limits = ", ".join(dict.fromkeys(f"{one.at_most:g}" for one in refused))
    rule = f"a source leaves out at most `bad_rows.at_most` of its rows, {limits} here"
    if any(one.num == one.num_rows == HOPELESS for one in refused):
        rule += f"; where the first {HOPELESS:,} are all bad, no more are read"
        return TooManyBadRows(given, rule, first.change)
    return TooManyBadRows(given, rule, f"of the first: {first.change}; or leave them out: {needed}")
