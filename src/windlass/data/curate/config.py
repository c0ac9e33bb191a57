"""What a recipe may say about the filters of a source, and about duplicates. No torch."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import Field

from windlass.settings import Count, Settings, Violation


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

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (self._local(),)

    def _local(self) -> Iterator[ValueError]:
        if not self.paths or not all(self.paths):
            yield ValueError("`path` is empty; give a file, a directory or a glob")
        elif any("://" in path for path in self.paths):
            yield ValueError(
                "`path` is a URL, and every worker reads these texts on this host: copy them here and name them"
            )

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

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (self._some(), self._lengths())

    def _some(self) -> Iterator[ValueError]:
        if not self.given:
            yield ValueError("`filters` names no filter: name one, such as min_chars: 200, or leave it out")
        if self.language is not None and not all(self.languages or [""]):
            yield ValueError("`language` is empty, and no document is left: give a code, such as en, or leave it out")

    def _lengths(self) -> Iterator[ValueError]:
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            yield ValueError(
                f"`min_chars: {self.min_chars}` is above `max_chars: {self.max_chars}`, and no document is left: swap them"
            )

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

    @property
    def in_words(self) -> str:
        return f"{{similarity: {self.similarity:g}}}"
