"""Everything `windlass data lint` can find: a stable code, its severity, and what to change.

error     training would fail, or learn something that nobody intends: `train` refuses to start
warning   training works, perhaps not on the data that was intended: one line before step 0
"""

from typing import Final, Literal, NamedTuple

Severity = Literal["error", "warning"]


class FindingKind(NamedTuple):
    severity: Severity
    change: str


AGAIN: Final = "prepare again into another data.directory"

KINDS: Final[dict[str, FindingKind]] = {
    "ids-out-of-vocabulary": FindingKind("error", f"the shards belong to another tokenizer, or are damaged: {AGAIN}"),
    "labels-are-other-ids": FindingKind(
        "error", f"labels are the ids themselves, unshifted, or -100: the loader shifts; {AGAIN}"
    ),
    "mask-empty": FindingKind("error", "nothing of it would be learned: fix what wrote the labels, or leave it out"),
    "mask-full": FindingKind(
        "error", "prompts would be learned like answers: see that the chat template marks the answers"
    ),
    "mask-holes": FindingKind("error", f"in text every token is a target: {AGAIN}"),
    "leak-across-documents": FindingKind("error", f"isolated documents do not predict each other: {AGAIN}"),
    "ids-of-another-tokenizer": FindingKind(
        "error", f"the shards were written with another tokenizer than the one beside them: {AGAIN}"
    ),
    "eos-missing": FindingKind("error", f"documents would run into each other: {AGAIN}"),
    "eos-doubled": FindingKind(
        "error", "the text already ends with EOS: take it out of the text, since one EOS is added after it"
    ),
    "eos-of-another": FindingKind(
        "error", f"documents end by the tokenizer's own EOS: fix its eos_token, then {AGAIN}"
    ),
    "bos-doubled": FindingKind(
        "error", "the text begins twice: the template writes its beginning, so nothing else may"
    ),
    "template-round-trip": FindingKind("error", "fix the chat template of the tokenizer, or take another"),
    "tokenizer-of-another-model": FindingKind(
        "error", "set data.tokenizer.from to what model.from names, and prepare again"
    ),
    "pair-of-equals": FindingKind("error", "a pair prefers one answer to another, so they must differ: leave it out"),
    "pair-of-two-prompts": FindingKind(
        "error", f"both answers of a pair continue the same prompt: fix what wrote them; {AGAIN}"
    ),
    "pair-contradicted": FindingKind("warning", "one pair teaches the opposite of the other: leave one of them out"),
    "model-ends-otherwise": FindingKind(
        "warning", "the model learned another end: set eos_token in the tokenizer's tokenizer_config.json to it"
    ),
    "empty-documents": FindingKind("warning", "leave them out of the source"),
    "duplicate-documents": FindingKind("warning", "leave the copies out of the source"),
    "near-duplicates": FindingKind(
        "warning", "they differ only in white space, case or the last token: leave the copies out of the source"
    ),
    "validation-in-train": FindingKind(
        "warning", "the validation loss looks too good: take them out of the training documents"
    ),
    "repeated-token": FindingKind("warning", "leave such documents out of the source"),
    "damaged-text": FindingKind(
        "warning",
        "it was decoded wrongly once, or keeps a byte order mark: read it again in the encoding it was written in",
    ),
    "special-token-as-text": FindingKind(
        "warning", "it is plain text here; where it was meant to end or mark something, take it out of the text"
    ),
    "documents-cut": FindingKind("warning", "raise data.sequence_length, or shorten the documents"),
    "mostly-padding": FindingKind("warning", "lower data.sequence_length, or pack by concatenation"),
}


class Finding(NamedTuple):
    """One fault of one set, however often it occurs."""

    code: str
    where: str
    """The set, and the first position of the fault: "train: shard.00003.mds, sample 17"."""
    what: str
    times: int

    @property
    def severity(self) -> Severity:
        return KINDS[self.code].severity

    @property
    def change(self) -> str:
        return KINDS[self.code].change

    @property
    def line(self) -> str:
        return f"{self.severity} {self.code}: {self.what} ({self.where})"


class Findings:
    """Collects the findings of one set: the first of each code in words, the others as a count."""

    def __init__(self, name: str):
        self.name = name
        self._first: dict[str, tuple[str, str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, code: str, what: str, where: str = "", count: int = 1) -> None:
        assert code in KINDS, code
        self._first.setdefault(code, (what, where))
        self._counts[code] = self._counts.get(code, 0) + count

    def __contains__(self, code: str) -> bool:
        return code in self._counts

    def list(self) -> list[Finding]:
        """Errors first."""
        found = []
        for code, (what, where) in self._first.items():
            more = self._counts[code] - 1
            text = f"{what}; {more:,} more of the kind" if more else what
            found.append(Finding(code, f"{self.name}: {where}" if where else self.name, text, self._counts[code]))
        return sorted(found, key=lambda finding: finding.severity)
