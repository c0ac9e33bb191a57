"""What is counted of a set while it is written: documents, tokens, targets, bytes. Logs progress, and the set in words."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np

from windlass.data.prepare.manifest import SetInfo
from windlass.data.sources.config import HELD
from windlass.data.sources.fetch import BYTES_PER_TOKEN, fetched_bytes
from windlass.data.sources.select import UNKNOWN_BYTES, Selection
from windlass.data.sources.source_files import Source
from windlass.data.tokenize.fitting import Fitting
from windlass.data.tokenize.flags import count_unwritten
from windlass.data.tokenize.preferences import ROWS
from windlass.data.tokenize.resume import FinishedPart, PartSize, limited
from windlass.data.tokens.token_parts import targets_of_samples
from windlass.errors import UserError
from windlass.units import counted, format_bytes, format_count, format_duration

REPORT_EVERY_S: Final = 10.0
T = TypeVar("T")


class CountedSet:
    """Counts documents, tokens and their bytes as they pass; logs progress every ten seconds."""

    def __init__(
        self,
        name: str,
        selection: Selection,
        num_bytes: int,
        known: tuple[np.ndarray, int, int],
        log: Callable[[str], None],
    ):
        """known: bytes per token [V], EOS id, targets per sequence."""
        self._name, self._num_bytes, self._log = name, num_bytes, log
        self._bytes_V, self._eos_id, self._length = known
        self.is_masked = any(source.format in HELD for source in selection.sources)
        self._is_pairs = any(source.format == "preference" for source in selection.sources)
        self.documents = self.tokens = self.bytes = self.text_bytes = self.left_out = self.cut = 0
        self.by_source: list[list[int]] = []
        self._of_sources: list[str] = []
        self._num_sources = len(selection.sources)
        self.unwritten: Counter[str] = Counter()
        self._start_s = self._logged_s = time.monotonic()

    def go_on(self, info: SetInfo) -> None:
        """What was counted of the sources whose shards are kept counts, too."""
        self.documents, self.tokens, self.text_bytes = info.documents, info.tokens, info.bytes
        self.bytes = info.bytes  # as many as of the text, or there are none to count (appended)
        self.left_out, self.cut = info.left_out, info.cut
        self.by_source = list(info.by_source)
        self.unwritten.update(info.unwritten)

    def through(
        self, parts: Iterator[FinishedPart], source: Source, number: int, marks: Sequence[int] = ()
    ) -> Iterator[np.ndarray]:
        """The ids of one source up to its limit in tokens; of pairs and conversations those that fit. `marks`: ids that are no
        text."""
        bytes_V = self._bytes_V.copy()
        bytes_V[list(marks)] = 0
        fit: Iterator[FinishedPart] = _check_limit(source, parts)
        fitting = None
        if source.format == "chat" or source.format == "preference":
            fitting = Fitting(self._eos_id, self._length, source.format, source.too_long)
            fit = fitting.through(fit, self._name)

        def sizes() -> Iterator[tuple[np.ndarray, PartSize]]:
            for part in limited(fit, self._eos_id, source.num_tokens):
                ids = targets_of_samples(part.ids, self._eos_id) if source.is_samples else part.ids
                if self.is_masked:
                    self.unwritten += count_unwritten(part.ids)
                yield part.ids, PartSize.of(part._replace(ids=ids), bytes_V, marks)

        yield from self.of_sizes(sizes(), number, bool(marks))
        if source.stream is not None and source.filters is not None and self._name == "train":
            source.filters.end(self._log)  # only now is it read to its end
        if fitting is not None:
            fitting.check(self._name)  # also where the limit in tokens came before the end
            self.left_out += fitting.num_dropped
            self.cut += fitting.num_cut
            self._of_sources += [f"source {number}: {line}" for line in fitting.report()]

    def of_sizes(self, parts: Iterable[tuple[T, PartSize]], number: int, is_moved: bool) -> Iterator[T]:
        """The parts of source `number`, counted by their sizes. `is_moved`: whether the middle of some documents is moved."""
        before, num_targets, num_moved = (self.documents, self.tokens), 0, 0
        for part, size in parts:
            self.documents += size.documents
            self.tokens += size.num_ids
            self.text_bytes += size.text_bytes
            self.bytes += size.token_bytes
            num_targets += size.num_targets
            num_moved += size.num_moved
            self._log_progress()
            yield part
        where, num_documents, num_tokens = f"source {number}: ", self.documents - before[0], self.tokens - before[1]
        self.by_source.append([num_documents, num_tokens])
        if is_moved:
            self._log(
                f"{self._name}: {where}the middle of {num_moved} of {num_documents} documents is moved behind the end"
            )
        samples = num_tokens / (
            self._length * (ROWS if self._is_pairs else 1)
        )  # sources share a sample at their border
        self._of_sources.append(
            f"{where}{counted(num_documents, 'document')}, {num_tokens} tokens, {num_targets} of them targets, "
            f"{samples:.1f} samples full"
        )

    def _log_progress(self) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s > REPORT_EVERY_S:
            self._logged_s = now_s
            rate = self.text_bytes / (now_s - self._start_s)
            done = f"{format_bytes(self.text_bytes)} of {format_bytes(self._num_bytes)}"
            left = format_duration(max(0, self._num_bytes - self.text_bytes) / rate) if rate else "?"
            left = f", {left} left"
            if self._num_bytes >= UNKNOWN_BYTES:
                done, left = format_bytes(self.text_bytes), ""
            self._log(f"{self._name}: {done}, {format_bytes(rate)}/s{left}")

    def end(self, num_samples: int, num_targets: int, max_documents: int, shards: list[int]) -> SetInfo:
        """Logs and returns the set in numbers. `num_targets`: targets that a sample has room for."""
        info = SetInfo(
            documents=self.documents,
            tokens=self.tokens,
            bytes=self.text_bytes,
            samples=num_samples,
            padding=num_samples * num_targets - self.tokens,
            bytes_add_up=self.bytes == self.text_bytes and not self.is_masked,
            max_documents=max_documents,
            source_shards=shards,
            left_out=self.left_out,
            cut=self.cut,
            by_source=self.by_source,
            unwritten=dict(self.unwritten),
        )
        self._log_end(info, num_targets)
        return info

    def _log_end(self, info: SetInfo, num_targets: int) -> None:
        took = format_duration(time.monotonic() - self._start_s)
        amount = (
            f"{counted(info.documents, 'document')}, {format_bytes(info.bytes)}, {format_count(info.tokens)} tokens"
        )
        fill = 100 * info.tokens / (info.samples * num_targets)
        self._log(
            f"{self._name}: {amount}, {counted(info.samples, 'sample')} ({fill:.2f} % full, {info.padding} positions are empty), "
            f"{took}"
        )
        for line in self._of_sources if self.is_masked or self._num_sources > 1 else ():
            self._log(f"{self._name}: {line}")
        for field, count in info.unwritten.items():
            answers = "1 answer holds" if count == 1 else f"{count} answers hold"
            self._log(f"{self._name}: {answers} `{field}`, which the chat template does not write: it is not learned")
        if self.is_masked:
            learned = (
                "of a pair only the answers count" if self._is_pairs else "of conversations only answers are learned"
            )
            if self._name == "train":  # once for all sets
                self._log(f"{learned}: there are no bits per byte")
        elif not info.bytes_add_up:
            difference = self.bytes - info.bytes
            rewrites = f"this tokenizer rewrites text (its tokens add up to {difference:+d} bytes)"
            self._log(f"{self._name}: {rewrites}: bits per byte are not exact and are left out")


def _check_limit(source: Source, parts: Iterable[FinishedPart]) -> Iterator[FinishedPart]:
    """`parts`, unchanged. Raises UserError where they end before the source's limit in tokens because fetching stopped."""
    num_tokens = 0
    for part in parts:
        num_tokens += len(part.ids)
        yield part
    fetched = fetched_bytes(source.files)
    removed = "" if source.filters is None else ", or its filters remove too much"
    if source.num_tokens is not None and num_tokens < source.num_tokens <= fetched // BYTES_PER_TOKEN:
        raise UserError(
            f"`tokens: {source.num_tokens}` of a source; {format_bytes(fetched)} of its text were fetched, {num_tokens} tokens",
            f"for a limit in tokens {BYTES_PER_TOKEN} bytes of text are fetched for each, and this text has more{removed}",
            "give the limit as `documents` or `rows`",
        )
