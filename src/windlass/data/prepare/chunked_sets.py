"""The sources of all sets that workers read in chunks (chunk_tasks): what each holds, and its ids.

Workers read what is in files on this host where each document is chosen by itself. Where a limit counts documents, or duplicates
are dropped, or a source is read as it arrives, or holds ids already, the parent reads it and workers encode what it sends
(write_set).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from windlass.data.curate.filters import Filters
from windlass.data.prepare.chunk_tasks import ChunkParts, CountChunk, Counted, EncodeChunk, SourceChunk, TextSettings
from windlass.data.sources.bad_rows import BadRows
from windlass.data.sources.select import UNKNOWN, Amount, Selection, measure
from windlass.data.sources.source_files import CHUNKING, Source, chunks_of
from windlass.data.tokenize.encode_rows import RowSettings
from windlass.data.tokenize.pool import TaskRunner
from windlass.data.tokenize.resume import FinishedPart, is_whole, kept

Settings = TextSettings | RowSettings


class ChunkedSource(NamedTuple):
    """A source, and the sets that take documents of it."""

    source: Source
    numbers: dict[str, int]
    """The source's number in each set."""
    rules: dict[str, Selection]
    """Of each set, without its sources."""
    counted: list[dict[str, Amount]]
    """Of each chunk, by set; filled by `ChunkedSets.measure`."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.source.files)

    def chunks(self) -> Iterator[SourceChunk]:
        alone = self.source._replace(num_tokens=None, bad_rows=None)
        for files in chunks_of(self.source.files):
            filters = None if self.source.filters is None else self.source.filters.fresh()
            yield SourceChunk(alone._replace(files=files, filters=filters), self.rules)


class ChunkedSets:
    def __init__(self, selections: Mapping[str, Selection], runner: TaskRunner):
        self._selections, self._runner = selections, runner
        self._found: dict[tuple[str, int], ChunkedSource] = {}
        for name, selection in selections.items():
            for number, source in enumerate(selection.sources):
                if source.is_in_files and selection.dropped is None:
                    self._add(name, number, source, selection._replace(sources=()))

    def _add(self, name: str, number: int, source: Source, rules: Selection) -> None:
        same = (one for one in self._found.values() if one.source.files is source.files and name not in one.numbers)
        found = next(same, None) or ChunkedSource(source, {}, {}, [])
        found.numbers[name], found.rules[name] = number, rules
        self._found[name, number] = found

    def measure(self, unknown: Collection[str] = ()) -> dict[str, list[Amount]]:
        """Documents and bytes of every set, per source. `unknown`: sets that are not read before they are written. Raises
        UserError."""
        return {
            name: [
                UNKNOWN if name in unknown else self._measured(name, number) for number in range(len(selection.sources))
            ]
            for name, selection in self._selections.items()
        }

    def _measured(self, name: str, number: int) -> Amount:
        found = self._found.get((name, number))
        if found is None:
            return measure(self._selections[name].documents_of(number))
        if not found.counted:
            num_rows, bad_rows, filters, parts = 0, found.source.bad_rows, found.source.filters, list[Filters]()
            counts: Iterator[Counted] = self._runner.map(map(CountChunk, found.chunks()), found.num_bytes)
            for chunk in counts:
                if isinstance(bad_rows, BadRows):
                    bad_rows.count(num_rows, chunk.num_rows, chunk.bad)
                num_rows += chunk.num_rows
                if chunk.filters is not None:
                    parts.append(chunk.filters)
                found.counted.append(chunk.amounts)
            if filters is not None:
                filters.count(parts)
        amounts = [chunk[name] for chunk in found.counted]
        return Amount(sum(one.documents for one in amounts), sum(one.bytes for one in amounts))

    def is_chunked(self, name: str, number: int) -> bool:
        found = self._found.get((name, number))
        return found is not None and self._selections[name].sources[number].num_tokens is None

    def parts(
        self, name: str, number: int, settings: Callable[[str], Settings], work: Path, eos_id: int
    ) -> Iterator[FinishedPart]:
        """The ids of one source of one set, in order, kept below `work`; those of the other sets of this source are made
        with them. settings: set -> what encodes it. Raises UserError."""
        found = self._found[name, number]
        sets = [one for one in found.numbers if self.is_chunked(one, found.numbers[one])]
        encoders = {one: settings(one) for one in sets}
        done = self._runner.map(_tasks(found, encoders, work, eos_id), found.num_bytes)
        for at, task in enumerate(done):
            directory, num_parts = _directory(work, name, number, at), 0
            for part in kept(directory):
                num_parts += 1
                yield part
            if not is_whole(directory):  # damaged meanwhile: what was deleted is made again
                task({})
                yield from islice(kept(directory), num_parts, None)


def _directory(work: Path, name: str, number: int, at: int) -> Path:
    # a version with other chunks must not take these parts for its own
    return work / name / f"{number:03}" / f"chunk-{at:06}-by-{CHUNKING}"


def _tasks(found: ChunkedSource, encoders: Mapping[str, Settings], work: Path, eos_id: int) -> Iterator[EncodeChunk]:
    before = dict.fromkeys(encoders, 0)
    for at, chunk in enumerate(found.chunks()):
        sets = {name: chunk.sets[name] for name in encoders}
        parts = {
            name: ChunkParts(_directory(work, name, found.numbers[name], at), encoders[name], before[name])
            for name in encoders
        }
        yield EncodeChunk(chunk._replace(sets=sets), parts, eos_id)
        for name in encoders:
            before[name] += found.counted[at][name].documents
