"""Checks on the text of documents: wrong decoding, special tokens as text, copies up to white space and case.

Mojibake is UTF-8 that was read as Latin-1 or Windows-1252 and written again: `Ã©` for `é`, `â€™` for `’`. A decoder writes U+FFFD
for bytes that are not UTF-8. Both are found by pattern, and are a finding if a document holds several.

A tokenizer that does not rewrite text encodes a decoded text to the same ids again. Ids of another tokenizer, or of two, decode
to text that encodes to others.
"""

import re
from collections.abc import Iterable
from typing import Final

import xxhash
from tokenizers import Tokenizer

from windlass.data.lint.check_ids import SHORT, Vocabulary, Where
from windlass.data.lint.documents import Document
from windlass.data.lint.findings import Findings

MOJIBAKE: Final = re.compile(
    "Ã[\u0080-\u00bfƒ‚„…†‡ˆ‰Š‹Œ‘’“”•–—˜™š›œžŸ]|â\x80[\x80-\xbf]|â€[\u0080-\u00bf™œžš˜“”¦¢]|Â[\u00a0-\u00bf]|ï»¿|\ufffd"
)
MANY: Final = 3  # in one document: a text about encodings may hold a few
PER_CHARACTERS: Final = 2000  # at least one per this many characters
FREE_TO_STAND: Final = (
    "<unk>",
    "<pad>",
    "[UNK]",
    "[PAD]",
    "[MASK]",
    "<mask>",
)  # these end nothing: texts about language models hold them
DECODED_AT_ONCE: Final = 64
LONGEST_TOKENS: Final = 1 << 16  # of a document that are checked
ENCODED_AGAIN: Final = 200_000  # tokens: ten documents show a wrong tokenizer, and encoding costs 20 times decoding
OTHER_IDS: Final = 0.2  # share of documents that may encode to other ids: an id may be damaged
BYTE_ORDER_MARK: Final = "\ufeff"
Folded = dict[int, tuple[int, int]]
"""Hash of a document's text without case and white space -> (hash of the exact text, sample)."""
OfTrain = tuple[Folded, Where]
"""The training set's documents, and the position of its samples."""


class TextChecks:
    """Decodes whole documents until the budget of tokens is spent; later ones are not checked."""

    def __init__(
        self,
        found: Findings,
        vocabulary: Vocabulary,
        tokenizer: Tokenizer,
        where: Where,
        token_budget: int,
        encodes_again: bool = False,
        of_train: OfTrain | None = None,
    ):
        """encodes_again: whether the tokenizer keeps text as it is, and documents are text. of_train: for the other sets."""
        self._found, self._tokenizer, self._where, self._left = found, tokenizer, where, token_budget
        self._size = vocabulary.size
        texts = [text for text in vocabulary.specials.values() if text not in FREE_TO_STAND]
        self._specials = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
        self.folded: Folded = {}
        self._of_train = of_train
        self._waiting: list[Document] = []
        self._encodes_again, self._again_left = encodes_again, ENCODED_AGAIN
        self._num_again = self._num_other = 0
        self._first_other = ""
        self.num_tokens = 0

    def add(self, document: Document) -> None:
        if self._left <= 0 or not document.is_whole or not len(document.ids_N):
            return
        self._left -= len(document.ids_N)
        self._waiting.append(document)
        if len(self._waiting) >= DECODED_AT_ONCE:
            self._check_batch()

    def end(self) -> None:
        """Call it after the checks on ids: faults that they name also make text that encodes to other ids."""
        self._check_batch()
        has_errors = any(finding.severity == "error" for finding in self._found.list())
        if self._num_other > 1 and self._num_other > OTHER_IDS * self._num_again and not has_errors:
            what = f"the text of {self._num_other} of {self._num_again} documents encodes to other ids than the shards hold"
            self._found.add("ids-of-another-tokenizer", what, self._first_other)

    def _check_batch(self) -> None:
        batch = [document.ids_N[:LONGEST_TOKENS] for document in self._waiting]
        known = [ids_N[(ids_N >= 0) & (ids_N < self._size)].tolist() for ids_N in batch]
        self.num_tokens += sum(map(len, known))
        for document, ids, text in zip(self._waiting, known, self._decode(known)):
            self._check(document, text, self._where(document.sample))
            if self._encodes_again and len(ids) == len(document.ids_N) and self._again_left > 0:
                self._encode_again(ids, self._where(document.sample))
        self._waiting = []

    def _encode_again(self, ids: list[int], where: str) -> None:
        self._again_left -= len(ids)
        self._num_again += 1
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        if self._tokenizer.encode(text, add_special_tokens=False).ids != ids:
            self._first_other = self._first_other or where
            self._num_other += 1

    def _decode(self, batch: list[list[int]]) -> Iterable[str]:
        texts: list[str] = self._tokenizer.decode_batch(batch, skip_special_tokens=True)
        return texts

    def _check(self, document: Document, text: str, where: str) -> None:
        if not text.strip():
            self._found.add("empty-documents", "a document of white space", where)
            return
        damaged = MOJIBAKE.findall(text[:-4] if len(document.ids_N) > LONGEST_TOKENS else text)
        if len(damaged) >= MANY and len(damaged) * PER_CHARACTERS >= len(text):
            shown = " ".join(sorted(set(damaged))[:5])
            self._found.add("damaged-text", f"a document holds {len(damaged)} damaged characters: {shown}", where)
        if (zeros := text.count("\0")) >= MANY:
            self._found.add(
                "damaged-text", f"a document holds {zeros} characters U+0000 (UTF-16, read as UTF-8?)", where
            )
        if text.startswith(BYTE_ORDER_MARK):
            self._found.add("damaged-text", "a document begins with a byte order mark (U+FEFF)", where)
        special = self._specials.search(text)
        if special is not None:
            self._found.add("special-token-as-text", f"a document holds the text {special[0]}", where)
        if len(document.ids_N) < SHORT:
            return
        exact = xxhash.xxh3_64_intdigest(text.encode())
        folded = xxhash.xxh3_64_intdigest(" ".join(text.casefold().split()).encode())
        other, sample = self.folded.setdefault(folded, (exact, document.sample))
        if other != exact:
            what = f"a document equals {self._where(sample)} up to white space and case"
            self._found.add("near-duplicates", what, where)
        if self._of_train is not None:
            train, train_where = self._of_train
            other, sample = train.get(folded, (exact, 0))
            if other != exact:  # check_ids reports exact copies
                what = f"a document equals {train_where(sample)} of train up to white space and case"
                self._found.add("near-duplicates", what, where)
