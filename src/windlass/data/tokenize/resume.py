"""Finished parts of a tokenisation on disk, so that a killed preparation continues where it was.

The ids of a source are gathered into parts of about a million tokens, whole documents each. Each part is written durably under a
name that holds its hash. After a kill, complete parts are read again instead of encoded, and their documents are skipped:
encoding costs a hundred times as much as reading. The result is the same, since a part is a function of the documents. Parts are
beside the preparation, under the fingerprint of all that decides them; with another fingerprint they are deleted. They take 4
bytes per token until the preparation ends.
"""

import io
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import xxhash

from windlass.data.files import write_durably

PART_TOKENS: Final = 1 << 20
FINGERPRINT: Final = "fingerprint"
Encode = Callable[[Iterable[str]], Iterator[np.ndarray]]


class FinishedPart(NamedTuple):
    """Whole documents: their ids, each with its EOS, and the bytes of each one's text, [documents]."""

    ids: np.ndarray
    sizes: np.ndarray


def open_parts(directory: Path, fingerprint: str, date: str | None = None) -> Path:
    """`directory` with the parts kept for `fingerprint`; emptied if they were kept for another. `date`: the day that
    the fingerprint covers, if any."""
    if kept_for(directory)[0] != fingerprint:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_durably(directory / FINGERPRINT, f"{fingerprint} {date or ''}".strip().encode())
    return directory


def kept_for(directory: Path) -> tuple[str, str | None]:
    """(the fingerprint that parts are kept for, its date); an empty fingerprint where none are."""
    mark = directory / FINGERPRINT
    fingerprint, _, date = mark.read_text().partition(" ") if mark.is_file() else ("", "", "")
    return fingerprint, date or None


def kept(directory: Path) -> Iterator[FinishedPart]:
    """The parts up to the first damaged one; that one and all later ones are deleted."""
    paths = sorted(directory.glob("*.part")) if directory.is_dir() else []
    for at, path in enumerate(paths):
        data = path.read_bytes()
        if path.name != _name(at, data):
            for damaged in paths[at:]:
                damaged.unlink()
            return
        stream = io.BytesIO(data)
        yield FinishedPart(np.load(stream), np.load(stream))


def _name(number: int, data: bytes) -> str:
    return f"{number:06}-{xxhash.xxh3_64_hexdigest(data)}.part"


def encode_in_parts(
    texts: Iterable[str], encode: Encode, eos_id: int, directory: Path, part_tokens: int | None = None
) -> Iterator[FinishedPart]:
    """The documents as parts: first those kept, then those that `encode` makes of the rest, each kept before it is yielded.

    encode: texts -> arrays of ids in order, with EOS after each document and nowhere else. part_tokens: the size of a part, if
    smaller than PART_TOKENS."""
    number = num_documents = 0
    for part in kept(directory):
        number, num_documents = number + 1, num_documents + len(part.sizes)
        yield part
    directory.mkdir(parents=True, exist_ok=True)
    sizes: deque[int] = deque()

    def counted() -> Iterator[str]:
        for text in islice(texts, num_documents, None):
            sizes.append(len(text.encode()))
            yield text

    held: list[np.ndarray] = []
    for ids in encode(counted()):
        held.append(ids)
        if sum(map(len, held)) >= min(PART_TOKENS, part_tokens or PART_TOKENS):
            joined = np.concatenate(held)
            ends = np.flatnonzero(joined == eos_id) + 1
            if len(ends):
                yield _keep(directory, number, joined[: ends[-1]], sizes, len(ends))
                number, joined = number + 1, joined[ends[-1] :]
            held = [joined]
    rest = np.concatenate([np.empty(0, np.int32), *held])
    if len(rest):
        yield _keep(directory, number, rest, sizes, int((rest == eos_id).sum()))


def _keep(directory: Path, number: int, ids: np.ndarray, sizes: deque[int], num_documents: int) -> FinishedPart:
    part = FinishedPart(ids, np.array([sizes.popleft() for _ in range(num_documents)], np.int64))
    stream = io.BytesIO()
    np.save(stream, part.ids)
    np.save(stream, part.sizes)
    data = stream.getvalue()
    write_durably(directory / _name(number, data), data)
    return part


def limited(parts: Iterable[FinishedPart], eos_id: int, num_tokens: int | None) -> Iterator[FinishedPart]:
    """The parts up to the document that reaches `num_tokens`."""
    left = num_tokens
    for part in parts:
        if left is not None and len(part.ids) >= left:
            ends = np.flatnonzero(part.ids == eos_id) + 1
            last = int(np.searchsorted(ends, left))  # the first document that ends at or after the limit
            yield FinishedPart(part.ids[: ends[last]], part.sizes[: last + 1])
            return
        left = None if left is None else left - len(part.ids)
        yield part
