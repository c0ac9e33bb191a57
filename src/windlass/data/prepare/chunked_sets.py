"""The sources of all sets that workers read in chunks (chunk_tasks): what each holds, and its ids.

Workers read what is in files on this host where each document is chosen by itself. Where a limit counts documents, or duplicates
are dropped, or a source is read as it arrives, or holds ids already, the parent reads it and workers encode what it sends
(write_set).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from windlass.data.prepare.chunk_tasks import (
    ChunkParts,
    CountChunk,
    Counted,
    EncodeChunk,
    EncodedParts,
    SourceChunk,
    TextSettings,
)
from windlass.data.sources.bad_rows import BadRows
from windlass.data.sources.select import UNKNOWN, Amount, Selection, amount_of
from windlass.data.sources.source_files import CHUNKING, Source, chunks_of
from windlass.data.tokenize.encode_rows import RowSettings
from windlass.data.tokenize.pool import TaskRunner
from windlass.data.tokenize.resume import FinishedPart, PartSize, found_once, is_whole, kept

Settings = TextSettings | RowSettings


class ChunkedSource(NamedTuple):
    """A source, and the sets that take documents of it."""

    source: Source
    numbers: dict[str, int]
    """The source's number in each set."""
    rules: dict[str, Selection]
    """The selection of each set, without its sources."""
    counted: list[dict[str, Amount]]
    """The amount in each chunk, by set; filled by `ChunkedSets.measure`."""
    encoded: list[tuple[EncodeChunk, EncodedParts]]
    """The task and the parts of each chunk; filled by `ChunkedSets.encoded`."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.source.files)

    def chunks(self) -> Iterator[SourceChunk]:
        alone = self.source._replace(num_tokens=None, bad_rows=None)
        for files in chunks_of(self.source.files):
            filters = None if self.source.filters is None else self.source.filters.fresh()
            yield SourceChunk(alone._replace(files=files, filters=filters), self.rules)


class ChunkedSets:
    def __init__(self, selections: Mapping[str, Selection], runner: TaskRunner, counts: Path):
        """`counts`: a directory that keeps what is counted."""
        self._selections, self._runner, self._counts = selections, runner, counts
        self._found: dict[tuple[str, int], ChunkedSource] = {}
        for name, selection in selections.items():
            for number, source in enumerate(selection.sources):
                if source.is_in_files and selection.dropped is None:
                    self._add(name, number, source, selection._replace(sources=()))

    def _add(self, name: str, number: int, source: Source, rules: Selection) -> None:
        same = (one for one in self._found.values() if one.source.files is source.files and name not in one.numbers)
        found = next(same, None) or ChunkedSource(source, {}, {}, [], [])
        found.numbers[name], found.rules[name] = number, rules
        self._found[name, number] = found

    def measure(self, unknown: Collection[str] = (), only_chunked: bool = False) -> dict[str, list[Amount]]:
        """Documents and bytes of every set, per source. `unknown`: sets that are not read before they are written;
        `only_chunked`: nor are sources that workers do not read themselves. Raises UserError."""
        return {
            name: [
                UNKNOWN
                if name in unknown or (only_chunked and (name, number) not in self._found)
                else self._measured(name, number)
                for number in range(len(selection.sources))
            ]
            for name, selection in self._selections.items()
        }

    def _measured(self, name: str, number: int) -> Amount:
        found = self._found.get((name, number))
        if found is None:
            return amount_of(self._selections[name].documents_of(number))
        if not found.counted:
            bad_rows, filters = found.source.bad_rows, found.source.filters

            def count() -> list[Any]:
                counts: Iterator[Counted] = self._runner.map(map(CountChunk, found.chunks()), found.num_bytes)
                return [chunk.as_json() for chunk in _noted(counts, bad_rows)]  # a hopeless source ends it

            kept = map(Counted.of_json, found_once(self._counts / f"{name}-{number:03}-by-{CHUNKING}", count))
            chunks = list(_noted(kept, bad_rows))
            found.counted.extend(chunk.amounts for chunk in chunks)
            if filters is not None:
                filters.count(chunk.removed for chunk in chunks)
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
        done = self._runner.pairs(self._tasks(found, settings, work, eos_id), found.num_bytes)
        for at, (task, _) in enumerate(done):
            directory, num_parts = _directory(work, name, number, at), 0
            for part in kept(directory):
                num_parts += 1
                yield part
            if not is_whole(directory):  # damaged meanwhile: what was deleted is made again
                task({})
                yield from islice(kept(directory), num_parts, None)

    def encoded(
        self, name: str, number: int, settings: Callable[[str], Settings], work: Path, eos_id: int, token_bytes: Path
    ) -> Iterator[list[tuple[Path, PartSize]]]:
        """The encoded parts of a set by chunk, in numbers: they are not opened here, and may be deleted by the caller.
        token_bytes: the file of the bytes of text per token id. Raises UserError."""
        found = self._found[name, number]
        if len(found.encoded) < len(found.counted):  # else with another set
            tasks = self._tasks(found, settings, work, eos_id, token_bytes)
            for task, parts in self._runner.pairs(tasks, found.num_bytes):
                found.encoded.append((task, parts))
                yield parts[name]
            return
        yield from (parts[name] for _, parts in found.encoded)

    def encode_again(self, damaged: Path) -> None:
        """What is missing of the chunk of this part, which `encoded` gave."""
        done = (task for found in self._sources for task, _ in found.encoded)
        next(task for task in done if any(of_set.directory == damaged.parent for of_set in task.parts.values())).again()

    def share_sources(self, one: str, other: str) -> bool:
        """Whether workers encode documents of both sets in one reading."""
        return any({one, other} <= found.numbers.keys() for found in self._sources)

    def num_bytes_of(self, name: str, number: int) -> int:
        """Bytes of the files of source `number` in set `name`."""
        return self._found[name, number].num_bytes

    def run(self, tasks: Iterable[Any], num_bytes: int) -> Iterator[tuple[Any, Any]]:
        """Each task with its result, by the workers that encode."""
        return self._runner.pairs(tasks, num_bytes)

    @property
    def _sources(self) -> list[ChunkedSource]:
        return list({id(one): one for one in self._found.values()}.values())

    @property
    def num_chunks(self) -> int:
        """The number of chunks of all sources, once they are measured."""
        return sum(len(one.counted) for one in self._sources)

    @property
    def num_bytes(self) -> int:
        """Bytes of all sources' files."""
        return sum(one.num_bytes for one in self._sources)

    def rest(self) -> list[tuple[str, int]]:
        """(set, number of its source) of all that is not encoded by `tasks`."""
        every = [(name, number) for name, one in self._selections.items() for number in range(len(one.sources))]
        return [one for one in every if not self.is_chunked(*one)]

    def tasks(self, settings: Callable[[Source, str], Settings], work: Path, eos_id: int) -> Iterator[EncodeChunk]:
        """What encodes the chunks of all sources, which `measure` has counted, into `work`. settings: (source, set) -> what
        encodes it."""
        for found in self._sources:
            yield from self._tasks(found, partial(settings, found.source), work, eos_id)

    def _tasks(
        self,
        found: ChunkedSource,
        settings: Callable[[str], Settings],
        work: Path,
        eos_id: int,
        token_bytes: Path | None = None,
    ) -> Iterator[EncodeChunk]:
        names = [name for name, number in found.numbers.items() if self.is_chunked(name, number)]
        encoders, before = {name: settings(name) for name in names}, dict.fromkeys(names, 0)
        for at, chunk in enumerate(found.chunks()):
            parts = {
                name: ChunkParts(_directory(work, name, found.numbers[name], at), encoders[name], before[name])
                for name in names
            }
            sets = {name: chunk.sets[name] for name in names}
            yield EncodeChunk(chunk._replace(sets=sets), parts, eos_id, token_bytes)
            for name in names:
                before[name] += found.counted[at][name].documents


def _directory(work: Path, name: str, number: int, at: int) -> Path:
    # a version with other chunks must not take these parts for its own
    return work / name / f"{number:03}" / f"chunk-{at:06}-by-{CHUNKING}"


def _noted(chunks: Iterable[Counted], bad_rows: Any) -> Iterator[Counted]:
    """`chunks`, from the first on; those that are new have their bad rows added to `bad_rows`, the source's. Raises
    TooManyBadRows."""
    num_rows = 0
    for chunk in chunks:
        if isinstance(bad_rows, BadRows):
            bad_rows.count(num_rows, chunk.num_rows, chunk.bad)
        num_rows += chunk.num_rows
        yield chunk
