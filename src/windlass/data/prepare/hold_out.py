"""A share or an amount of the training documents -> the border of the hashes below which documents are held out (data/held_out).

Documents are taken in the order of the hashes of their texts, so a document moves only where the amount or the corpus before it
changes, and copies of a text stay together. Memory: 40 bytes per document that is held out, and a sample of a mebibyte of text.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import xxhash
from tokenizers import Tokenizer

from windlass.data.config import DataConfig
from windlass.data.held_out import HeldOutConfig
from windlass.data.sources.select import BYTES_PER_ID, HASHES, Border, Selection, Split
from windlass.data.sources.source_files import Document, bytes_of
from windlass.data.tokenize.resume import found_once
from windlass.data.tokenize.tokenizer import TOKENIZER_FILE
from windlass.errors import UserError
from windlass.units import MIB, counted, format_bytes

SAMPLE_BYTES: Final = MIB  # of text, whose tokens are counted: our choice, about 250,000 tokens
SAMPLE_OF_ONE: Final = MIB // 16  # of one document, so that at least 16 are asked


def validation_of(
    config: DataConfig,
    share: float | None,
    tokenizer_files: Sequence[Path],
    log: Callable[[str], None],
    kept: Path,
    is_streamed: bool,
) -> float | Callable[[Selection], Border] | None:
    """What is held out of the training documents, as `select` takes it. `kept`: where what reading all of them finds is kept."""
    amount = config.validation if isinstance(config.validation, HeldOutConfig) else None
    # a share of the first documents must not read all; in a mixture no source's share may hang on those behind it (appended.py)
    if amount is None and (share is None or is_streamed or config.mixture or config.order.held_out_of is not None):
        return share

    def found(documents: Selection) -> Border:
        if amount is not None:
            return border_of(amount, tokenizer_files, log, documents)
        assert share is not None
        return border_of_share(share, log, documents)

    def once(documents: Selection) -> Border:
        border, cut = found_once(kept / "border", lambda: found(documents))
        return Border(border, None if cut is None else Split(*cut))

    return once


def border_of(
    amount: HeldOutConfig,
    tokenizer_files: Sequence[Path],
    log: Callable[[str], None],
    documents: Selection,
    copies: Mapping[int, int] = MappingProxyType({}),
    given: str | None = None,
) -> Border:
    """Where the amount ends among all training documents. `copies`: of each text, by its hash, where they are known; 1 otherwise.
    `given`: what the recipe says, where that is no amount. Of no documents none are held out: whoever counts them says why there
    are none. Raises UserError where nothing is left to train on."""
    wanted = amount.bytes or max(1, int((amount.tokens or 0) * _bytes_per_token(documents, tokenizer_files)))
    lowest, total = _lowest(documents, wanted)
    if not lowest:
        return Border(0)
    held, (digest, size, number) = sum(size for _, size, _ in lowest[:-1]), lowest[-1]
    is_cut = held + size > wanted and documents.sources[number].may_be_cut
    if total <= wanted or (held + size == total and not is_cut):
        rule = "an amount is held out of the training text, of rows whole ones, and more than that is there"
        asked = f"data.validation: {given or amount.in_words}, which is {format_bytes(wanted)} of {format_bytes(total)} of text"
        raise UserError(asked, rule, "hold out less, or give more text; or validation: none")
    alike = copies.get(digest, 1)  # each is cut
    whole, part = len(lowest) - is_cut, max(1, (wanted - held) // alike)
    another = "another document" if whole else "one document"
    of = another if alike == 1 else f"each of {alike} copies of {another}"
    words = [counted(whole, "document")] * bool(whole) + [f"the last {format_bytes(part)} of {of}"] * is_cut
    log(
        f"validation: {format_bytes(held + (part * alike if is_cut else size))} of text held out: {' and '.join(words)}"
    )
    return Border(digest, Split(digest, part)) if is_cut else Border(digest + 1)


def border_of_share(share: float, log: Callable[[str], None], documents: Selection) -> Border:
    """Where the share ends among all hashes. So few texts that one side would have none, such as a single file, give the share
    of their bytes instead."""
    border, total, sides, copies = int(share * HASHES), 0, set[bool](), Counter[int]()
    for digest, document, _ in _hashed(documents):
        total += len(bytes_of(document))
        sides.add(digest < border)
        copies[digest] += 1
        if len(sides) == 2:
            return Border(border)
    if not total or not all(source.may_be_cut for source in documents.sources):
        return Border(border)
    number = copies.total()
    side, texts = ("train" if sides == {True} else "validate"), "1 document" if number == 1 else f"{number} documents"
    log(f"validation: {share:g} of {texts} leaves none to {side} on: {share:g} of their bytes are held out instead")
    return border_of(HeldOutConfig(bytes=max(1, int(share * total))), [], log, documents, copies, f"{share:g}")


def _lowest(documents: Selection, wanted: int) -> tuple[list[tuple[int, int, int]], int]:
    """(hash, bytes and source) of the documents of the lowest hashes, in that order, until they hold `wanted` bytes; and the
    bytes of all documents."""
    heap = list[tuple[int, int, int]]()  # with negative hashes: the highest comes first
    held = total = 0
    for digest, document, number in _hashed(documents):
        size = len(bytes_of(document))
        total += size
        if held < wanted or digest < -heap[0][0]:
            heapq.heappush(heap, (-digest, size, number))
            held += size
        while heap and held - heap[0][1] >= wanted:
            held -= heapq.heappop(heap)[1]
    return sorted((-digest, size, number) for digest, size, number in heap), total


def _hashed(documents: Selection) -> Iterator[tuple[int, Document, int]]:
    for number in range(len(documents.sources)):
        for document in documents.documents_of(number):
            yield xxhash.xxh64_intdigest(bytes_of(document)), document, number


def _bytes_per_token(documents: Selection, tokenizer_files: Sequence[Path]) -> float:
    """Bytes per token, measured on a sample: the ends of the documents with the lowest hashes. Raises UserError where only code
    makes the tokenizer."""
    file = next((file for file in tokenizer_files if file.name == TOKENIZER_FILE), None)
    if file is None:
        given = f"data.validation in tokens, and a tokenizer without a {TOKENIZER_FILE}"
        rule = "a sample of text is encoded before anything else, to know the bytes of a token"
        raise UserError(given, rule, "give validation: {bytes: ...}")
    heap, held = list[tuple[int, Document]](), 0
    for digest, document, _ in _hashed(documents):
        if held < SAMPLE_BYTES or digest < -heap[0][0]:
            sample = document[-SAMPLE_OF_ONE:]
            heapq.heappush(heap, (-digest, sample))
            held += len(sample)
        while held - len(heap[0][1]) >= SAMPLE_BYTES:
            held -= len(heapq.heappop(heap)[1])
    texts = [document for _, document in heap if isinstance(document, str)]
    num_ids = sum(len(document) // BYTES_PER_ID for _, document in heap if isinstance(document, bytes))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    num_tokens = sum(len(one.ids) + 1 for one in encoded) + num_ids  # and the EOS of each text
    return sum(len(bytes_of(document)) for _, document in heap) / max(1, num_tokens)
