"""The files of a source: what is known of each, and the documents in those on this host.

scan lists files; fetch copies those that are not on this host. `documents` reads local files and compares each block with its
hash (verified_file), so a file that changes in between is an error, not a mixture.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from windlass.data.curate.filters import Filters
from windlass.data.sources import compression, formats
from windlass.data.sources.bad_rows import BadRows, FoundRows, Row, raised
from windlass.data.sources.chat_rows import Specials, words_of
from windlass.data.sources.config import MAX_ROW_MIB, Format, Kind, SourceConfig, TooLong
from windlass.data.sources.shape_config import FillInMiddleConfig, RowsConfig
from windlass.data.verified_file import BLOCK, BLOCK_BYTES, OtherBytes, VerifiedFile, hash_blocks
from windlass.errors import UserError
from windlass.units import MIB

BINARY_PROBE_BYTES = 8000
READ_BYTES = 256 << 10


class SourceFile(NamedTuple):
    """A file as `scan` found it. `name` is relative to the source; `xxh3` is its hash, or another identity; `text_key` is the key
    or column that holds the text. `path` is a string for a file that is not on this host's disk."""

    path: Path | str
    name: str
    num_bytes: int
    xxh3: str
    text_key: str
    kind: Kind | None = None
    """The file's format, where the recipe overrules its name."""
    max_row_bytes: int = MAX_ROW_MIB * MIB
    specials: Specials = ()
    """Special tokens of the tokenizer, which a message may not hold."""
    shape: RowsConfig | None = None
    """Where a conversation is in a row, if not under the usual names."""
    blocks: bytes = b""
    """Hashes of a file on this host, block by block (verified_file)."""
    first_block: int = 0
    """Which of the file's `blocks` begins with."""
    span: formats.FileSpan | None = None
    """The part of the file that is meant; None: all of it."""


Document = str | bytes
"""A text; or ids that were made before, int32 and little-endian, without the EOS behind them."""


def bytes_of(document: Document) -> bytes:
    return document if isinstance(document, bytes) else document.encode()


class Source(NamedTuple):
    """What `scan` found, and the part of it that the recipe asks for: `rows` first..last, then the first `num_documents` that
    hold text. write_set applies `num_tokens`."""

    files: list[SourceFile]
    rows: tuple[int, int | None] = (0, None)
    num_documents: int | None = None
    num_tokens: int | None = None
    format: Format = "text"
    too_long: TooLong | None = None
    stream: Callable[[], Iterator[Row]] | None = None
    """Yields the documents instead of `files`, for a source that is trained on while it is read."""
    ids: Callable[[], Iterator[bytes]] | None = None
    """Yields documents of ids instead; `rows` are applied already."""
    is_samples: bool = False
    """Whether each document is a sample as it is stored."""
    first_documents: int | None = None
    """Limit on all documents above."""
    bad_rows: BadRows | FoundRows | None = None
    """Collects bad rows. Without it the first one is raised."""
    fill_in_middle: FillInMiddleConfig | None = None
    """How the middle is moved in those of its documents that are trained on."""
    filters: Filters | None = None
    """Removes documents, and counts them; behind every limit but that in tokens."""

    @property
    def is_in_files(self) -> bool:
        """Whether each file gives its documents whatever the others hold: no limit counts across them."""
        is_limited = self.rows != (0, None) or self.num_documents is not None or self.first_documents is not None
        return self.stream is None and self.ids is None and not is_limited

    @property
    def text_of(self) -> Callable[[str], str]:
        """Document -> the text that filters look at."""
        return words_of if self.format == "chat" else str

    @property
    def may_be_cut(self) -> bool:
        """Whether a document may be in two sets by halves: rows and samples may not."""
        return self.format in ("text", "tokens") and not self.is_samples

    def documents(self) -> Iterator[Document]:
        """Every document that is not empty, in order. Raises UserError naming the file that is wrong, or the row."""
        if self.ids is not None:
            return islice(islice(self.ids(), self.num_documents), self.first_documents)
        rows = islice(all_source_rows(self.files), *self.rows) if self.stream is None else self.stream()
        good = raised(rows) if self.bad_rows is None else self.bad_rows.without(rows)
        texts = islice((text for text in good if text), self.num_documents)
        texts = islice(texts, self.first_documents)
        return texts if self.filters is None else self.filters.kept(texts, self.text_of)


def source_of_files(config: SourceConfig, files: list[SourceFile]) -> Source:
    limits = config.slice, config.documents, config.tokens
    source = Source(files, *limits, config.format, config.too_long, is_samples=config.stored == "samples")
    return source._replace(fill_in_middle=config.fill_in_middle)


def is_remote(file: SourceFile) -> bool:
    return isinstance(file.path, str)


def refuse_unlisted(error: OSError) -> None:
    """For os.walk, which leaves out what it cannot list."""
    raise UserError(
        f"{error.filename} cannot be listed: {error.strerror}",
        "a source is all of its files: what cannot be listed may hold some",
        "give this user the right to read it, or name the other files or folders in `path`",
    ) from error


def files_below(directory: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Every file below that is not hidden, outside folders named in `skipped`. Without `skipped`, linked folders too."""
    paths = []
    for folder, subfolders, names in os.walk(directory, followlinks=not skipped, onerror=refuse_unlisted):
        links = [name for name in subfolders if Path(folder, name).is_symlink()]
        loops = {name for name in links if Path(folder).resolve().is_relative_to(Path(folder, name).resolve())}
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped | loops]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return paths


def names_below(directory: Path) -> list[str]:
    """Every file below that is not hidden: its relative path, sorted."""
    return sorted(path.relative_to(directory).as_posix() for path in files_below(directory))


def file_at(path: Path, name: str, config: SourceConfig) -> SourceFile:
    """A text file of any format, hashed. Raises UserError."""
    if is_binary(path, config.file_format):
        raise formats.binary_file(path)
    return as_asked(hash_file(path, name, config.text_key), config)


def as_asked(file: SourceFile, config: SourceConfig) -> SourceFile:
    """The file with the source's own format, limit and names."""
    return file._replace(kind=config.file_format, max_row_bytes=config.max_row_mib * MIB, shape=config.shape)


def is_binary(path: Path, kind: Kind | None = None) -> bool:
    """A compressed file is judged by its content. Raises UserError where it is damaged, or in a compression not read."""
    formats.check_compression(str(path))
    if formats.is_table(path, kind):
        return False
    with _open(path) as file:
        try:
            return b"\0" in formats.unpacked_file(file, str(path)).read(BINARY_PROBE_BYTES)
        except compression.broken() as error:
            raise formats.damaged_file(str(path), error) from None


def _open(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", "windlass reads all files of a source", "fix its permissions"
        ) from None


def hash_file(path: Path, name: str, text_key: str) -> SourceFile:
    with _open(path) as file:
        digest, num_bytes, blocks = hash_blocks(file)
    return SourceFile(path, name, num_bytes, digest, text_key, blocks=blocks)


def all_source_rows(files: list[SourceFile]) -> Iterator[Row]:
    """Every row, empty and bad ones too. Raises UserError for a file that cannot be read, or changed."""
    for file in files:
        known = file.text_key, file.kind, file.max_row_bytes, file.specials, file.shape, file.span
        with _open(Path(file.path)) as stream:
            try:
                verified = VerifiedFile(stream, file.num_bytes, file.blocks, file.first_block)
                yield from formats.read_rows(io.BufferedReader(verified, READ_BYTES), str(file.path), *known)
            except OtherBytes:
                raise _changed(file) from None


@dataclass(frozen=True)
class ListedTexts:
    """The texts in files of this host."""

    files: tuple[SourceFile, ...]

    def __call__(self) -> Iterator[str]:
        """Every text that is not empty. Raises UserError, also for a row that is no text."""
        return filter(None, raised(all_source_rows(list(self.files))))


CHUNKING: Final = formats.CHUNK_BLOCKS
"""Where chunks_of cuts: part of the name of what is kept by chunk."""


def chunks_of(files: Iterable[SourceFile]) -> Iterator[list[SourceFile]]:
    """The files in chunks that can be read each by itself, in order: spans of large ones, and small ones together."""
    held, num_bytes = list[SourceFile](), 0
    for file in files:
        spans = formats.spans_of(str(file.path), file.kind, file.num_bytes, file.blocks)
        for part in [_spanned(file, span) for span in spans] or [file]:
            if held and (spans or num_bytes + file.num_bytes > formats.CHUNK_BLOCKS * BLOCK_BYTES):
                yield held
                held, num_bytes = [], 0
            held.append(part)
            num_bytes += file.num_bytes
    if held:
        yield held


def _spanned(file: SourceFile, span: formats.FileSpan) -> SourceFile:
    """The part of the file, with the blocks that reading it may touch."""
    if formats.is_table(file.path, file.kind):
        return file._replace(span=span)
    first = max(0, span.begin - 1) // BLOCK_BYTES
    behind = (span.end + file.max_row_bytes) // BLOCK_BYTES + 2
    return file._replace(
        span=span, first_block=first, blocks=file.blocks[first * BLOCK.itemsize : behind * BLOCK.itemsize]
    )


def check_unchanged(file: SourceFile, found: str) -> None:
    """Raises UserError where the file's hash or mark differs from that of the scan."""
    if found != file.xxh3:
        raise _changed(file)


def _changed(file: SourceFile) -> UserError:
    rule = "a source stays as it is while it is read"
    return UserError(f"{file.path} changed while it was being prepared", rule, "prepare again when it is complete")
