"""The filters of a source: a table of functions, each of one text and its limit; what each removed is counted.

A filter looks at one document alone. So workers filter what they read, a document that is removed is in no set, and the counts
are the same whoever reads. The table is in the order of FiltersConfig: cheap filters come first.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from windlass.data.curate.config import FiltersConfig
from windlass.data.curate.decontaminate import Listed, Texts
from windlass.data.curate.language import check_languages, is_in_another
from windlass.errors import UserError

LINE_ENDS: Final = tuple(".!?…\"'”’»。！？」")
SHORT_LINE: Final = 30  # characters: FineWeb's
SYMBOLS: Final = ("#", "...", "…")

FILTERS: Final[dict[str, Callable[[str, Any], bool]]] = {
    "min_chars": lambda text, least: len(text) < least,
    "max_chars": lambda text, most: len(text) > most,
    "min_words": lambda text, least: len(text.split()) < least,
    "min_alpha": lambda text, least: share(map(str.isalpha, "".join(text.split()))) < least,
    "max_symbol_share": lambda text, most: sum(map(text.count, SYMBOLS)) > most * len(text.split()),
    "max_line_repetition": lambda text, most: repeated(lines_of(text)) > most,
    "min_punctuated_lines": lambda text, least: share(line.endswith(LINE_ENDS) for line in lines_of(text)) < least,
    "max_short_lines": lambda text, most: share(len(line) <= SHORT_LINE for line in lines_of(text)) > most,
    "language": is_in_another,
    "decontaminate": lambda text, listed: listed.is_shared(text),
}
"""Filter -> whether it removes a text, for the value that the recipe gives."""


def lines_of(text: str) -> list[str]:
    """The lines that are not blank, without white space around them."""
    return [line for line in map(str.strip, text.splitlines()) if line]


def share(flags: Iterable[bool]) -> float:
    """The share of those that are set; 0 of none."""
    found = list(flags)
    return sum(found) / max(1, len(found))


def repeated(lines: list[str]) -> float:
    """The share of lines that occurred before; 0 of none."""
    return (len(lines) - len(set(lines))) / max(1, len(lines))


class Removed(NamedTuple):
    """Documents that were looked at, and what each filter removed of them."""

    num_documents: int
    counts: dict[str, int]


class Filters:
    """The filters of one source, and how many documents each removed. Every pass over the documents begins at the first; each is
    counted once."""

    def __init__(self, config: FiltersConfig, label: str, texts: Texts | None = None):
        """`label`: the source, in messages. `texts`: what reads those of `decontaminate`; equal where it reads the same."""
        self.config, self.label, self._texts = config, label, texts
        self.num_documents = 0
        self.counts = dict.fromkeys(config.given, 0)
        self._limits = {name: getattr(config, name) for name in config.given}
        if "language" in self._limits:
            self._limits["language"] = config.languages
        if config.decontaminate is not None:
            assert texts is not None
            self._limits["decontaminate"] = Listed(texts, config.decontaminate.n)

    def check(self, log: Callable[[str], None]) -> None:
        """Raises UserError where a filter cannot be applied on this machine, or has nothing to compare with."""
        if "language" in self._limits:
            check_languages(self.config.languages)
        if "decontaminate" in self._limits:
            self._limits["decontaminate"].check(self.label, log)

    def removed_by(self, text: str) -> str | None:
        """The first filter that removes a document; None where it is kept."""
        return next((name for name, limit in self._limits.items() if FILTERS[name](text, limit)), None)

    def kept(self, documents: Iterable[str], text_of: Callable[[str], str] = str) -> Iterator[str]:
        """The documents that no filter removes. `text_of`: document -> the text that is looked at."""
        for number, document in enumerate(documents, 1):
            is_new = number > self.num_documents
            self.num_documents = max(number, self.num_documents)
            name = self.removed_by(text_of(document))
            if name is None:
                yield document
            elif is_new:
                self.counts[name] += 1

    def fresh(self) -> "Filters":
        """A copy with nothing counted: for a part of the source."""
        return Filters(self.config, self.label, self._texts)

    @property
    def removed(self) -> Removed:
        return Removed(self.num_documents, self.counts)

    def count(self, parts: Iterable[Removed]) -> None:
        """Takes the counts of all parts of the source, in place of what was counted of its first documents."""
        whole = list(parts)
        self.num_documents = sum(part.num_documents for part in whole)
        self.counts = {name: sum(part.counts[name] for part in whole) for name in self.counts}

    def end(self, log: Callable[[str], None]) -> None:
        """Logs what was removed, once the source was read to its end. Raises UserError where nothing is left."""
        num_removed, words = sum(self.counts.values()), removed_in_words(self.counts)
        found = f"{num_removed:,} of {self.num_documents:,} documents of {self.label} are removed by its filters"
        if num_removed == self.num_documents > 0:
            rule = "filters leave at least one document of a source"
            raise UserError(f"{found} ({words})", rule, "loosen the filter that removes most, or leave the source out")
        log(f"{found}: {words}")


def removed_in_words(counts: Mapping[str, int]) -> str:
    """What each filter removed, in the order in which they are applied."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
