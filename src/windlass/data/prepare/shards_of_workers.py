"""The shards of a set of texts, written by the workers that encode them (shard_tasks)."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np

from windlass.data.packing import document_ends
from windlass.data.prepare.chunk_tasks import TextSettings
from windlass.data.prepare.chunked_sets import ChunkedSets, Settings
from windlass.data.prepare.counted_set import CountedSet
from windlass.data.prepare.shard_tasks import (
    MOST_IDS,
    Fitted,
    Joined,
    WriteShard,
    WrittenShard,
    fitted_shards,
    joined_shards,
)
from windlass.data.shards.mds import Writer
from windlass.data.shards.shard_format import ShardFormat
from windlass.data.sources.bad_rows import BadRows
from windlass.data.sources.source_files import Source
from windlass.data.tokenize.resume import found_once, read_part

TOKEN_BYTES_NAME: Final = "token_bytes.npy"


class SettingsOf(Protocol):
    def of_set(self, name: str) -> Settings:
        """What encodes the source in a set."""


class ShardsOfWorkers(NamedTuple):
    chunked: ChunkedSets | None
    name: str
    """The name of the set."""
    sources: Sequence[Source]
    work: Path
    known: tuple[int, np.ndarray]
    """EOS id, bytes per token [V]."""
    log: Callable[[str], None]

    def can_write(self, numbers: Sequence[int], shard: ShardFormat) -> bool:
        """Whether workers read all sources `numbers`, those are plain text, and a worker can hold a shard."""
        return shard.samples_per_shard * shard.num_ids <= MOST_IDS and all(
            self.chunked is not None
            and self.chunked.is_chunked(self.name, number)
            and self.sources[number].format == "text"
            for number in numbers
        )

    def write(
        self, settings: Mapping[int, SettingsOf], writer: Writer, counted: CountedSet, is_best_fit: bool
    ) -> tuple[int, int]:
        """The sources of these numbers, one stream, as the next shards -> samples, most documents in one. Raises UserError."""
        assert self.chunked is not None
        np.save(self.work / TOKEN_BYTES_NAME, self.known[1])
        first, made, all_consumed = writer.num_shards, self.work / self.name / "shards", deque[list[Path]]()
        T, num_samples, eos_id = writer.format.num_ids - 1, writer.samples_per_shard, self.known[0]

        def tasks() -> Iterator[WriteShard]:
            parts = (part for number in settings for part in self._parts(number, settings[number], counted))
            shards: Iterator[tuple[Joined | Fitted, list[Path]]] = (
                fitted_shards((path for path, _ in parts), self._ends_of, T, num_samples)
                if is_best_fit
                else joined_shards(parts, num_samples * T)
            )
            for number, (made_of, consumed) in enumerate(shards, first):
                all_consumed.append(consumed)
                yield WriteShard(made_of, number, made, eos_id, writer.format)

        num_bytes = sum(self.chunked.num_bytes_of(self.name, number) for number in settings)
        written_samples = most_documents = 0
        for task, shard in self.chunked.run(tasks(), num_bytes):
            written = shard or self._again(task)
            writer.adopt(written.entry, task.path)
            for part in all_consumed.popleft():
                part.unlink(missing_ok=True)
            written_samples += written.num_samples
            most_documents = max(most_documents, written.most_documents)
        return written_samples, most_documents

    def _parts(self, number: int, settings: SettingsOf, counted: CountedSet) -> Iterator[tuple[Path, int]]:
        """(file, ids) of each part of a source, counted."""
        assert self.chunked is not None
        of_text = settings.of_set(self.name)
        is_moved = isinstance(of_text, TextSettings) and of_text.middles is not None
        where = settings.of_set, self.work, self.known[0], self.work / TOKEN_BYTES_NAME
        chunks = self.chunked.encoded(self.name, number, *where)
        sizes = (((path, size.num_ids), size) for parts in chunks for path, size in parts)
        yield from counted.of_sizes(sizes, number, is_moved)
        if isinstance(bad_rows := self.sources[number].bad_rows, BadRows):
            bad_rows.end(self.log)

    def _ends_of(self, path: Path) -> list[int]:
        """Where the documents of a part end; known after a kill too, when the part may be deleted."""

        def find() -> list[int]:
            assert self.chunked is not None
            part = read_part(path)
            if part is None:  # damaged since it was written
                self.chunked.encode_again(path)
                part = read_part(path)
            if part is None:
                raise _damaged_again(path.parent)
            return document_ends(part.ids, self.known[0])

        found: list[int] = found_once(path.with_suffix(".ends"), find)
        return found

    def _again(self, task: WriteShard) -> WrittenShard:
        """Writes the shard from its parts, after encoding anew those that were damaged after they were written, or deleted for a
        shard that is damaged. Raises OSError where a part is damaged again."""
        assert self.chunked is not None
        for path in task.made.parts:
            if read_part(path) is None:
                self.chunked.encode_again(path)
        written = task(None)
        if written is None:
            raise _damaged_again(task.directory)
        return written


def _damaged_again(directory: Path) -> OSError:
    return OSError(f"{directory}: ids were written twice and are damaged again")
