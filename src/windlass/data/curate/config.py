"""What a recipe may say about the filters of a source, and about duplicates. No torch."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from windlass.settings import BrokenRule, Count, Settings


class DecontaminateConfig(Settings):
    """Texts that must not be learned, such as the questions of a benchmark."""

    path: str | list[str]
    """Local files, directories or globs that hold the texts, read like those of a source: a line of `.jsonl`, a row of a table,
    or any other file as a whole is one text."""
    text: str | None = None
    """The key or column that holds the text; `text` if not given."""
    n: int = Field(default=13, ge=2, le=1000)
    """How many consecutive words are compared, in lower case and without punctuation. A text of fewer words is ignored;
    `prepare` prints how many there are."""

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return (self._local(),)

    def _local(self) -> Iterator[BrokenRule]:
        if not self.paths or not all(self.paths):
            change = "give a file, a directory or a glob as .path"
            yield BrokenRule({"path": self.path}, "`path` names the texts, and is empty", change)
        elif urls := [path for path in self.paths if "://" in path]:
            rule = "every worker reads these texts on this host, and this is a URL"
            yield BrokenRule({"path": urls[0]}, rule, "copy them here, and name them as .path")

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path


class FiltersConfig(Settings):
    """Which documents are left out because of their content. A document that several filters would remove counts for the first
    of them, in this order. Shares and lines are those of Gopher (arXiv 2112.11446), C4 (1910.10683) and FineWeb (2406.17557);
    blank lines do not count."""

    min_chars: Count | None = Field(default=None, ge=1)
    """Removes documents of fewer characters."""
    max_chars: Count | None = Field(default=None, ge=1)
    """Removes documents of more characters."""
    min_words: Count | None = Field(default=None, ge=1)
    """Removes documents of fewer words, separated by white space. Gopher: 50."""
    min_alpha: float | None = Field(default=None, gt=0.0, le=1.0)
    """Removes documents with a smaller share of letters among the characters other than white space. Marks, such as vowel signs
    of Hindi, are not letters."""
    max_symbol_share: float | None = Field(default=None, ge=0.0)
    """Removes documents with more `#`, `...` and `…` per word. Gopher: 0.1."""
    max_line_repetition: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Removes documents with a larger share of lines that occurred before in the document. Gopher: 0.3."""
    min_punctuated_lines: float | None = Field(default=None, gt=0.0, le=1.0)
    """Removes documents with a smaller share of lines that end with a full stop, `!`, `?`, an ellipsis or a closing quotation
    mark. FineWeb: 0.12."""
    max_short_lines: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Removes documents with a larger share of lines of at most 30 characters. FineWeb: 0.67."""
    language: str | list[str] | None = None
    """Removes documents whose first 2,000 characters are in another language than this one, or than these: codes of py3langid
    such as en, de, zh (zxx: no language). Needs the extra `curate`."""
    decontaminate: DecontaminateConfig | None = None
    """Removes documents that share an n-gram of words with one of these texts."""

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return (self._some(), self._lengths())

    def _some(self) -> Iterator[BrokenRule]:
        if not self.given:
            change = "name one, such as .min_chars=200, or leave the section out"
            yield BrokenRule({"": self}, "`filters` names at least one filter", change)
        if self.language is not None and not all(self.languages or [""]):
            change = "give a code, such as .language=en, or remove .language"
            yield BrokenRule({"language": self.language}, "no document has an empty language, and none is left", change)

    def _lengths(self) -> Iterator[BrokenRule]:
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            given = {"min_chars": self.min_chars, "max_chars": self.max_chars}
            change = f"swap them: .min_chars={self.max_chars} and .max_chars={self.min_chars}"
            yield BrokenRule(given, "the shortest is above the longest, and no document is left", change)

    @property
    def languages(self) -> list[str]:
        return [self.language] if isinstance(self.language, str) else self.language or []

    @property
    def given(self) -> list[str]:
        """The filters that are asked for, in the order in which they are applied."""
        return [name for name in type(self).model_fields if getattr(self, name) is not None]


class NearDuplicatesConfig(Settings):
    """Leave out documents that are nearly the same as an earlier one, by MinHash. Needs the extra `curate`."""

    similarity: float = Field(ge=0.1, le=1.0)
    """The estimated Jaccard similarity of two documents' n-grams from which the later document is left out. FineWeb: 0.75; 0.8
    is common."""
    ngram: int = Field(default=5, ge=1, le=100)
    """How many consecutive words are compared, in lower case and without punctuation; in scripts without spaces, such as
    Chinese, how many characters. A shorter text is compared whole."""
    num_perm: Literal[64, 128, 256, 512] = 128
    """Numbers in a document's sketch. The similarity's standard error is at most 0.5 / sqrt(num_perm); time and memory grow
    with it."""
