"""The shards of a set whose texts are concatenated, written by the workers that encode them (shard_tasks)."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np

from windlass.data.prepare.chunk_tasks import TextSettings
from windlass.data.prepare.chunked_sets import ChunkedSets, Settings
from windlass.data.prepare.counted_set import CountedSet
from windlass.data.prepare.shard_tasks import MOST_IDS, WriteShard, WrittenShard, slices_of_shards
from windlass.data.shards.mds import Writer
from windlass.data.shards.shard_format import ShardFormat
from windlass.data.sources.bad_rows import BadRows
from windlass.data.sources.source_files import Source
from windlass.data.tokenize.resume import read_part

TOKEN_BYTES_NAME: Final = "token_bytes.npy"


class SettingsOf(Protocol):
    def of_set(self, name: str) -> Settings:
        """What encodes the source in a set."""


class ShardsOfWorkers(NamedTuple):
    chunked: ChunkedSets | None
    name: str
    """Of the set."""
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

    def write(self, settings: Mapping[int, SettingsOf], writer: Writer, counted: CountedSet) -> tuple[int, int]:
        """The sources of these numbers, one stream, as the next shards -> samples, most documents in one. Raises UserError."""
        assert self.chunked is not None
        np.save(self.work / TOKEN_BYTES_NAME, self.known[1])
        first, made, all_consumed = writer.num_shards, self.work / self.name / "shards", deque[list[Path]]()

        def tasks() -> Iterator[WriteShard]:
            parts = (
                (path, size) for number in settings for path, size in self._parts(number, settings[number], counted)
            )
            cut = slices_of_shards(parts, writer.samples_per_shard * (writer.format.num_ids - 1))
            for number, (slices, consumed) in enumerate(cut, first):
                all_consumed.append(consumed)
                yield WriteShard(slices, number == first, number, made, self.known[0], writer.format)

        num_bytes = sum(self.chunked.num_bytes_of(self.name, number) for number in settings)
        num_samples = most_documents = 0
        for task, shard in self.chunked.run(tasks(), num_bytes):
            written = shard or self._again(task)
            writer.adopt(written.entry, task.path)
            for part in all_consumed.popleft():
                part.unlink(missing_ok=True)
            num_samples, most_documents = num_samples + written.num_samples, max(most_documents, written.most_documents)
        return num_samples, most_documents

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

    def _again(self, task: WriteShard) -> WrittenShard:
        """Of parts that were damaged after they were written, or deleted for a shard that is damaged."""
        assert self.chunked is not None
        for path, _, _ in task.slices:
            if read_part(path) is None:
                self.chunked.encode_again(path)
        written = task(None)
        if written is None:
            raise OSError(f"{task.directory}: ids were written twice and are damaged again")
        return written
