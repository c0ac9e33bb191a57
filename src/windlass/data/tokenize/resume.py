"""Finished parts of a tokenisation on disk, so that a killed preparation continues where it was.

The ids of a source are gathered into parts of about a million tokens, whole documents each. Each part is written durably under a
name that holds its hash. After a kill, complete parts are read again instead of encoded, and their documents are skipped:
encoding costs a hundred times as much as reading. The result is the same, since a part is a function of the documents. Parts are
beside the preparation, under the fingerprint of all that decides them; with another fingerprint they are deleted. They take 4
bytes per token, until the preparation ends or their shards are there (prepare/shard_tasks). A worker may outlive a killed
parent, and write what the next one writes too: the same bytes, each under a temporary name of its own.
"""

import contextlib
import io
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import xxhash

from windlass.data.files import write_durably
from windlass.data.tokenize.flags import ID_BITS, MASKED

PART_TOKENS: Final = 1 << 20
FINGERPRINT: Final = "fingerprint"
LAST: Final = ".last"  # in the name of a part behind which none comes
REFUSED_AT_ONCE: Final = 100  # texts, behind which a part ends
Encode = Callable[[Iterable[str]], Iterator["np.ndarray | EncodedTexts"]]


class FinishedPart(NamedTuple):
    """Whole documents: their ids, each with its EOS, and the bytes of each one's text, [documents]."""

    ids: np.ndarray
    sizes: np.ndarray
    num_texts: int | None = None
    """Texts that it was made of; None: one a document."""
    refused: Sequence[Sequence[str]] = ()
    """Texts that the chat template refuses, as BadRow(*texts)."""


class PartSize(NamedTuple):
    """A part in numbers."""

    num_ids: int
    num_targets: int
    documents: int
    text_bytes: int
    token_bytes: int
    """Bytes of the text that its ids encode."""
    num_moved: int
    """Documents whose middle is moved (fill_in_middle)."""

    @classmethod
    def of(cls, part: FinishedPart, bytes_V: np.ndarray, marks: Sequence[int] = ()) -> Self:
        """bytes_V: bytes of text per token id, none of `marks`, the first of which is in every document that is moved."""
        ids = part.ids
        return cls(
            num_ids=len(ids),
            num_targets=int(((ids & MASKED) == 0).sum()),
            documents=len(part.sizes),
            text_bytes=int(part.sizes.sum()),
            token_bytes=int(bytes_V[ids & ID_BITS].sum(dtype=np.int64)),
            num_moved=int((ids == marks[0]).sum()) if marks else 0,
        )


class EncodedTexts(NamedTuple):
    """Whole texts as documents."""

    ids: np.ndarray
    """With flags; each document ends by its EOS."""
    num_documents: list[int]
    """The number of documents that each text gives: none where it is refused."""
    refused: list[tuple[str, str, str, str]]
    """What FinishedPart has of the texts that were refused."""


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


def found_once(path: Path, find: Callable[[], Any]) -> Any:
    """What `find` returns, as JSON reads it back: from the file `path`, under its hash, where that is there and undamaged; else
    it is called, and what it returns is kept there."""
    found = found_before(path)
    return keep_found(path, find()) if found is None else found


def found_before(path: Path) -> Any | None:
    """What `keep_found` has kept; None where that is not there, or damaged."""
    with contextlib.suppress(OSError):
        digest, _, data = path.read_bytes().partition(b"\n")
        if digest == xxhash.xxh3_64_hexdigest(data).encode():
            return json.loads(data)
    return None


def keep_found(path: Path, found: Any) -> Any:
    data = json.dumps(found).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, xxhash.xxh3_64_hexdigest(data).encode(), b"\n", data, is_alone=False)
    return json.loads(data)


def kept(directory: Path) -> Iterator[FinishedPart]:
    """The parts up to the first damaged one; that one and all later ones are deleted."""
    for _, part in kept_part_files(directory):
        yield part


def kept_part_files(directory: Path) -> Iterator[tuple[Path, FinishedPart]]:
    """The files of the parts up to the first damaged one, each with its part; that one and all later ones are deleted."""
    paths = sorted(directory.glob("*.part")) if directory.is_dir() else []
    for at, path in enumerate(paths):
        part = read_part(path)
        if part is None or not path.name.startswith(f"{at:06}-"):
            for damaged in paths[at:]:
                damaged.unlink()
            return
        yield path, part


def read_part(path: Path) -> FinishedPart | None:
    """The part in a file; None where it is damaged, or gone."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if xxhash.xxh3_64_hexdigest(data) != path.stem.removesuffix(LAST).partition("-")[2]:
        return None
    stream = io.BytesIO(data)
    ids, sizes = np.load(stream), np.load(stream)
    num_texts, refused = json.loads(stream.read() or b"[null, []]")
    return FinishedPart(ids, sizes, num_texts, refused)


def _name(number: int, data: bytes, is_last: bool = False) -> str:
    return f"{number:06}-{xxhash.xxh3_64_hexdigest(data)}{LAST if is_last else ''}.part"


def is_whole(directory: Path) -> bool:
    """Whether the last part is there that a PartWriter called so."""
    return any(directory.glob(f"*{LAST}.part"))


def encode_in_parts(
    texts: Iterable[str], encode: Encode, eos_id: int, directory: Path, part_tokens: int | None = None
) -> Iterator[FinishedPart]:
    """The documents as parts: first those kept, then those that `encode` makes of the rest, each kept before it is yielded.

    encode: texts -> arrays of ids in order, with EOS after each document and nowhere else; or EncodedTexts.
    part_tokens: the size of a part, if
    smaller than PART_TOKENS."""
    number = num_documents = 0
    for part in kept(directory):
        num_texts = len(part.sizes) if part.num_texts is None else part.num_texts
        number, num_documents = number + 1, num_documents + num_texts
        yield part
    writer = PartWriter(directory, eos_id, number, part_tokens)

    def counted() -> Iterator[str]:
        for text in islice(texts, num_documents, None):
            writer.sizes.append(len(text.encode()))
            yield text

    for found in encode(counted()):
        full = writer.add(found)
        if full is not None:
            yield full
    rest = writer.end()
    if rest is not None:
        yield rest


class PartWriter:
    """Gathers what is encoded, and keeps it as parts."""

    def __init__(self, directory: Path, eos_id: int, number: int, part_tokens: int | None = None):
        """`number`: of the next part; `part_tokens`: its size, if smaller than PART_TOKENS."""
        directory.mkdir(parents=True, exist_ok=True)
        self.sizes: deque[int] = deque()
        """The sizes of the texts that are given to be encoded."""
        self._directory, self._number, self._tokens = directory, number, min(PART_TOKENS, part_tokens or PART_TOKENS)
        self._gathered = _Gathered(eos_id, self.sizes)

    def add(self, found: "np.ndarray | EncodedTexts") -> FinishedPart | None:
        """The part that is full with it, if any."""
        self._gathered.add(found)
        is_full = self._gathered.num_ids >= self._tokens or self._gathered.is_refused
        return self._keep(self._gathered.take()) if is_full else None

    def end(self, is_last: bool = False) -> FinishedPart | None:
        """The rest. `is_last`: it is marked so, and written though it is empty (`is_whole`)."""
        rest = self._gathered.take()
        nothing = FinishedPart(np.empty(0, np.int32), np.empty(0, np.int64), 0) if is_last else None
        return self._keep(rest or nothing, is_last)

    def _keep(self, part: FinishedPart | None, is_last: bool = False) -> FinishedPart | None:
        if part is None:
            return None
        stream = io.BytesIO()
        np.save(stream, part.ids)
        np.save(stream, part.sizes)
        stream.write(json.dumps([part.num_texts, part.refused]).encode())
        data = stream.getvalue()
        write_durably(self._directory / _name(self._number, data, is_last), data, is_alone=False)
        self._number += 1
        return part


class _Gathered:
    """What was encoded and is in no part yet."""

    def __init__(self, eos_id: int, sizes: deque[int]):
        """`sizes`: those of the texts that were read, and are not encoded yet."""
        self._eos_id, self._sizes = eos_id, sizes
        self._held: list[np.ndarray] = []
        self._done: list[int] = []
        self._refused: list[tuple[str, str, str, str]] = []
        self._num_texts = self.num_ids = 0

    @property
    def is_refused(self) -> bool:
        return len(self._refused) >= REFUSED_AT_ONCE

    def add(self, found: np.ndarray | EncodedTexts) -> None:
        if isinstance(found, np.ndarray):
            found = EncodedTexts(found, [1] * int((found == self._eos_id).sum()), [])
        for count in found.num_documents:
            self._done += [self._sizes.popleft(), *[0] * (count - 1)][:count]  # a text's bytes count once
        self._num_texts += len(found.num_documents)
        self._refused += found.refused
        self._held.append(found.ids)
        self.num_ids += len(found.ids)

    def take(self) -> FinishedPart | None:
        """The whole documents among them; None where there are none, and nothing is refused."""
        joined = np.concatenate([np.empty(0, np.int32), *self._held])
        ends = np.flatnonzero(joined == self._eos_id) + 1
        if not len(ends) and not self._refused:
            self._held = [joined]
            return None
        end = int(ends[-1]) if len(ends) else 0
        part = FinishedPart(joined[:end], np.array(self._done, np.int64), self._num_texts, self._refused)
        self._held, self.num_ids = [joined[end:]], len(joined) - end
        self._done, self._num_texts, self._refused = [], 0, []
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
