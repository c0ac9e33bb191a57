"""Shards of texts, which workers write: nothing but numbers passes through the parent.

    parts, in order    | 1,048,611 ids | 1,049,002 | 1,048,580 | ...      on disk, encoded by workers (chunk_tasks)
    the stream         EOS . . . . . . . . . . . . . . . . . . . . .
    shards             |  S T + 1 ids  |    neighbours share one id: packing's `concatenate`, cut at every S samples of T

Shard k needs the ids from k S T to (k + 1) S T alone. So it is written as soon as those are encoded, by whoever is free, and
parts are deleted as soon as their shards are there. Where documents are packed best-fit, the parent knows where those of each
part end, and decides which go into which sample; a shard needs the parts that its documents are in.

A shard is made beside the parts, under the hash of what it is made of, and linked into its set by the parent. So one that is
there after a kill is not made again, and a worker that outlives a killed parent harms no set.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from windlass.data import packing
from windlass.data.files import write_durably
from windlass.data.shards.shard_format import ShardFormat
from windlass.data.tokenize.resume import found_before, keep_found, read_part

MOST_IDS: Final = 1 << 24
"""Ids of a shard that a worker writes; it holds some 24 bytes of each. A larger one is written by the parent, alone."""


class PartSlice(NamedTuple):
    """Ids `begin` to `end` of a part."""

    path: Path
    begin: int
    end: int


class WrittenShard(NamedTuple):
    entry: dict[str, Any]
    """In index.json."""
    num_samples: int
    most_documents: int
    """In one sample."""


class Joined(NamedTuple):
    """Samples of slices of parts, one behind the other."""

    slices: list[PartSlice]
    is_first: bool
    """Whether the stream begins here, with an EOS."""

    @property
    def parts(self) -> list[Path]:
        return [path for path, _, _ in self.slices]

    def made_of(self) -> list[Any]:
        # a part's name has the hash of what is in it
        return [[[path.name, begin, end] for path, begin, end in self.slices], self.is_first]

    def samples(self, ids: list[np.ndarray], eos_id: int, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
        found = [part[begin:end] for part, (_, begin, end) in zip(ids, self.slices)]
        stream = np.concatenate([np.array([eos_id] * self.is_first, np.int32), *found])
        return packing.samples_of(stream, eos_id, sequence_length)


class Fitted(NamedTuple):
    """Samples of documents that were packed best-fit."""

    parts: list[Path]
    pieces_P5: np.ndarray
    """A row per document, or piece of one: sample, number of the part, begin and end in it, whether it is the rest of a cut
    one."""

    def made_of(self) -> list[Any]:
        return [[path.name for path in self.parts], xxhash.xxh3_64_hexdigest(self.pieces_P5.tobytes())]

    def samples(self, ids: list[np.ndarray], eos_id: int, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
        pieces: list[list[tuple[np.ndarray, bool]]] = [[] for _ in range(int(self.pieces_P5[-1, 0]) + 1)]
        for sample, part, begin, end, is_rest in self.pieces_P5.tolist():
            pieces[sample].append((ids[part][begin:end], bool(is_rest)))
        return packing.samples_of_pieces(pieces, eos_id, sequence_length)


class WriteShard(NamedTuple):
    made: Joined | Fitted
    number: int
    directory: Path
    """Where the shard is made."""
    eos_id: int
    format: ShardFormat

    @property
    def path(self) -> Path:
        known = json.dumps([*self.made.made_of(), self.number, self.eos_id, self.format])
        return self.directory / f"{self.number:05}-{xxhash.xxh3_64_hexdigest(known.encode())}"

    def __call__(self, _kept: object) -> WrittenShard | None:
        """None where it is not there, and a part is damaged or gone."""
        path = self.path
        record = path.with_name(f"{path.name}.json")
        before = found_before(record)
        if before is not None and _has_hash(path, before[0]):
            return WrittenShard(*before)
        written = self._write(path)
        if written is not None:
            keep_found(record, written)
        return written

    def _write(self, path: Path) -> WrittenShard | None:
        ids = []
        for file in self.made.parts:
            part = read_part(file)
            if part is None:
                return None
            ids.append(part.ids)
        ids_NL, labels_NL = self.made.samples(ids, self.eos_id, self.format.num_ids - 1)
        entry, stored = self.format.encoded(self.number, [ids_NL, labels_NL])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, *stored, is_alone=False)
        return WrittenShard(entry, len(ids_NL), packing.most_documents(ids_NL == self.eos_id, labels_NL))


def _has_hash(path: Path, entry: dict[str, Any]) -> bool:
    """Whether the shard of an entry is there, whole."""
    try:
        digest = xxhash.xxh64_hexdigest(path.read_bytes())
    except FileNotFoundError:
        return False
    return bool(digest == (entry["zip_data"] or entry["raw_data"])["hashes"]["xxh64"])


def slices_of_shards(parts: Iterable[tuple[Path, int]], num_ids: int) -> Iterator[tuple[list[PartSlice], list[Path]]]:
    """parts: their files and numbers of ids. num_ids: S T, the ids from one shard to the next. Yields what each shard is made of,
    and the parts that no later one needs; the first shard begins with an EOS besides."""
    # with the positions in the stream of a part's first id, and of the one behind its last
    held: deque[tuple[Path, int, int]] = deque()
    begin, end = 0, 1
    for path, count in parts:
        held.append((path, end, end + count))
        end += count
        while end - begin > num_ids:
            slices, consumed = _cut(held, begin, begin + num_ids + 1), []
            begin += num_ids
            while held and held[0][2] <= begin:
                consumed.append(held.popleft()[0])
            yield slices, consumed
    if end - begin > 1:
        yield _cut(held, begin, end), [path for path, _, _ in held]


def _cut(held: Iterable[tuple[Path, int, int]], begin: int, end: int) -> list[PartSlice]:
    found = (PartSlice(path, max(begin, start) - start, min(end, stop) - start) for path, start, stop in held)
    return [one for one in found if one.begin < one.end]


def joined_shards(parts: Iterable[tuple[Path, int]], num_ids: int) -> Iterator[tuple[Joined, list[Path]]]:
    """What each shard is made of, where texts are concatenated. As `slices_of_shards`."""
    for number, (slices, consumed) in enumerate(slices_of_shards(parts, num_ids)):
        yield Joined(slices, number == 0), consumed


def fitted_shards(
    parts: Iterable[Path], ends_of: Callable[[Path], Iterable[int]], sequence_length: int, num_samples: int
) -> Iterator[tuple[Fitted, list[Path]]]:
    """What each shard of `num_samples` is made of, where documents are packed best-fit, and the parts that no later one needs.
    The samples are those of packing.pack_best_fit. ends_of: a part -> where its documents end."""
    files, left, waiting = list[Path](), list[int](), list[list[_Piece]]()

    def pieces() -> Iterator[_Piece]:
        for number, path in enumerate(parts):
            found = list(packing.ranges_of(ends_of(path), sequence_length))
            files.append(path)
            left.append(len(found))
            for begin, end, is_rest in found:
                yield range(begin, end), is_rest, number

    def shard() -> tuple[Fitted, list[Path]]:
        rows = [
            (sample, number, ids.start, ids.stop, is_rest)
            for sample, held in enumerate(waiting[:num_samples])
            for ids, is_rest, number in held
        ]
        del waiting[:num_samples]
        pieces_P5 = np.array(rows, np.int32)
        numbers, pieces_P5[:, 1], counts = np.unique(pieces_P5[:, 1], return_inverse=True, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist()):
            left[number] -= count
        used = [files[number] for number in numbers]
        return Fitted(used, pieces_P5), [path for path, number in zip(used, numbers) if not left[number]]

    for samples in packing.best_fit(pieces(), sequence_length):
        waiting += samples
        while len(waiting) >= num_samples:
            yield shard()
    if waiting:
        yield shard()


_Piece = tuple[range, bool, int]
"""Ids of a part, whether they are the rest of a document, and the part's number."""
