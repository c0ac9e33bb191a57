"""A source of tokens in the recipe -> its files, each hashed once and kept by its hash (sources/known_hashes).

An index comes right before the files that it describes. What it promises of them, size and hash, is compared when a file is first
seen, or has changed.
"""

import glob
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from windlass.data.config import TokenizerConfig
from windlass.data.shards.index import INDEX_NAME
from windlass.data.sources.config import SourceConfig, TokensKind
from windlass.data.sources.known_hashes import KnownHashes
from windlass.data.sources.source_files import SourceFile, files_below
from windlass.data.tokenize.tokenizer import copy_loaded, open_tokenizer, vocab_size_of
from windlass.data.tokens.documents import IdVocabulary
from windlass.data.tokens.mosaic_mds import read_mosaic_index, verify_shard
from windlass.data.tokens.stored_row import damaged_tokens
from windlass.errors import AbsentSource, UserError

RULE: Final = (
    "a source of tokens is a directory with the index.json of MDS, or .bin files, with an .idx (Megatron) or raw"
)


def scan_tokens(source: SourceConfig, hashes: KnownHashes) -> list[SourceFile]:
    """The files of a source, in reading order. Raises UserError where they are of no known kind, or of several."""
    found: dict[Path, tuple[TokensKind, Path]] = {}
    for pattern in source.paths:
        for kind, path, root in _match(pattern, source):
            found.setdefault(path.resolve(), (kind, path.relative_to(root)))
    kinds = {kind for kind, _ in found.values()}
    if len(kinds) > 1:
        given = f"{', '.join(source.paths)} holds {' and '.join(sorted(kinds))} files"
        raise UserError(given, "the files of a source of tokens are of one kind", "make each kind a source of its own")
    _check_settings(source, kinds.pop())
    files: list[SourceFile] = []
    for path, (kind, name) in found.items():
        shards = {one.file: one for one in read_mosaic_index(path)} if path.name == INDEX_NAME else {}
        for file in (path, *(path.parent / one for one in shards)):
            if not file.is_file():
                raise damaged_tokens(file, "is missing", f"{path} lists it")
            if file.name in shards and not hashes.is_known(file):
                verify_shard(file, shards[file.name])
            beside = name.with_name(file.name).as_posix()
            files.append(hashes.file(file, beside, source.text or "")._replace(kind=kind))
    return files


def id_vocabulary(config: TokenizerConfig, loaded: list[Path], source: SourceConfig) -> IdVocabulary:
    """What the ids of `source` mean. `loaded`: the tokenizer's files. Raises UserError where none is named."""
    if config.from_ is None:
        given = f"`format: tokens` of {source.label} with `tokenizer: {{train: {config.train}}}`"
        rule = "ids that were made before belong to the tokenizer that made them"
        raise UserError(given, rule, "name it: tokenizer: {from: ...}")
    with tempfile.TemporaryDirectory() as scratch:
        copy_loaded(loaded, config, Path(scratch) / "tokenizer", log=lambda _line: None)
        opened, eos_id = open_tokenizer(Path(scratch) / "tokenizer")
    return IdVocabulary(config.from_, vocab_size_of(opened), eos_id)


def _match(pattern: str, source: SourceConfig) -> Iterator[tuple[TokensKind, Path, Path]]:
    """(kind, file, the folder that its name begins at); of Megatron's two files the .idx first."""
    path = Path(pattern).expanduser()
    if path.is_dir() and (path / INDEX_NAME).is_file():
        yield "mds", path / INDEX_NAME, path
        return
    if path.is_dir():
        names, root = sorted(one for one in files_below(path) if one.suffix == ".bin" or one.name == INDEX_NAME), path
    else:
        names = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))
        root = next(folder for folder in path.parents if not glob.has_magic(str(folder)))
    for one in names:
        if one.is_dir() and (one / INDEX_NAME).is_file():
            yield "mds", one / INDEX_NAME, root
        elif one.name == INDEX_NAME:
            yield "mds", one, root
        elif one.suffix == ".bin" and one.with_suffix(".idx").is_file() and source.file_format != "bin":
            yield "megatron", one.with_suffix(".idx"), root
            yield "megatron", one, root
        elif one.suffix == ".bin" or source.file_format == "bin":
            yield "bin", one, root
    if not names:
        raise AbsentSource(f"`path: {pattern}` holds no tokens", RULE, "fix `path`")


def _check_settings(source: SourceConfig, kind: TokensKind) -> None:
    """Raises UserError where a setting has no effect on files of this kind, or another one is named."""
    of = f"{', '.join(source.paths)}, which is {kind}"
    if source.file_format not in (None, kind):
        raise UserError(f"`file_format: {source.file_format}` with {of}", RULE, f"write `file_format: {kind}`, or none")
    wrong = {
        "text": kind != "mds" and source.text is not None,
        "id_type": kind == "megatron" and source.id_type is not None,
        "rows": kind == "bin" and source.slice != (0, None),
        "stored": kind == "bin" and source.stored in ("documents", "samples"),
    }
    for name in [name for name, is_wrong in wrong.items() if is_wrong]:
        rule = "a raw file has no rows: its ids are a stream, cut at EOS" if kind == "bin" else RULE
        given = f"`{name}: {getattr(source, name)}` has no effect on {of}"
        raise UserError(
            given, rule, f"leave `{name}` out; `packing: concatenate` cuts a stream every sequence_length ids"
        )
