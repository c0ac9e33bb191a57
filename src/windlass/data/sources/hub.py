"""Rows of a dataset that the library `datasets` can load: from the Hugging Face hub by name, or from a local directory.

A name is pinned to a commit when it is scanned, and the commit identifies the rows. They are streamed: nothing is kept in the
hub's cache, and with `rows`, `documents` or `tokens` only those rows are read. A local directory is the output of
`save_to_disk`, or a folder of data files; the hash of all its files identifies it.

No code of a dataset runs: `datasets` 4 and later has no loading scripts.
"""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import xxhash

from windlass.data.sources.bad_rows import Row, attempted
from windlass.data.sources.config import DEFAULT_SPLIT, SourceConfig
from windlass.data.sources.row_text import Form, document_text
from windlass.data.sources.source_files import READ_BYTES, SourceFile
from windlass.errors import AbsentSource, UserError, nearest
from windlass.hub.client import refused_dataset, resolve_dataset
from windlass.hub.config import NAME

MARKERS: Final = ("dataset_info.json", "dataset_dict.json", "state.json")
RULE: Final = "`hub` is a dataset of the hub (org/name), or a local directory that `datasets` can load"


def scan_hub(config: SourceConfig, log: Callable[[str], None], known: str | None) -> SourceFile:
    """The dataset as one file, identified by its commit (`known`, where given) or by the hash of its directory. `path` is
    name@commit. Raises UserError."""
    assert config.hub is not None
    what = f"{config.subset or ''}/{config.split or DEFAULT_SPLIT}"
    text_key = config.text_key
    directory = Path(config.hub).expanduser()
    if directory.is_dir():
        digest, num_bytes = _hash_directory(directory)
        return SourceFile(config.hub, f"{directory.name}/{what}", num_bytes, digest, text_key)
    if not NAME.fullmatch(config.hub):
        raise AbsentSource(f"`hub: {config.hub}` is neither a directory here nor a name", RULE, "give org/name")
    if known is not None:
        log(f"{config.hub}: {config.revision or 'main'} was {known[:12]} when it was prepared: kept")
    commit = known or resolve_dataset(config.hub, config.revision, log)
    identity = xxhash.xxh3_128_hexdigest(json.dumps([config.hub, commit, what]).encode())
    return SourceFile(f"{config.hub}@{commit}", f"{config.hub}/{what}", 0, identity, text_key)


def commit_of(file: SourceFile) -> str | None:
    """The commit that a dataset of the hub is pinned to."""
    return str(file.path).partition("@")[2] or None


def _hash_directory(directory: Path) -> tuple[str, int]:
    digest, num_bytes = xxhash.xxh3_128(), 0
    is_saved = any((directory / name).is_file() for name in MARKERS)
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if any(part.startswith(".") for part in name.split("/")):
            continue
        if is_saved and path.name.startswith("cache-") and path.suffix == ".arrow":
            continue  # `datasets` writes these beside saved data while it works
        digest.update(f"{name}\0".encode())
        with open(path, "rb") as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
    return digest.hexdigest(), num_bytes


def split_names(config: SourceConfig, file: SourceFile) -> list[str]:
    """The splits of the dataset. Raises UserError."""
    return list(_open(config, file))


def hub_rows(config: SourceConfig, file: SourceFile, first: int, end: int | None) -> Iterator[Row]:
    """Rows first..end, empty and bad ones too. Raises UserError where the dataset cannot be read."""
    splits = _open(config, file)
    split = config.split or DEFAULT_SPLIT
    if split not in splits:
        change = f"{nearest(split, list(splits))}set `split` of the source to one of: {', '.join(splits)}"
        raise UserError(f"{config.label} has no split `{split}`", "a source of a dataset is one of its splits", change)
    rows = iter(splits[split].skip(first) if first else splits[split])
    rule = f"the column `{file.text_key}` of the dataset holds one text per row"
    form = Form(file.text_key, file.specials, config.shape)
    wanted = None if end is None else max(0, end - first)
    for number, row in enumerate(islice(_stepwise(config, file, rows), wanted), first):
        where = f"{config.label}, split {split}, row {number},"
        yield attempted(document_text, row, where, "column", form, rule)


def _stepwise(config: SourceConfig, file: SourceFile, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while (row := _attempt(config, file, lambda: next(rows, None))) is not None:
        yield row


def _open(config: SourceConfig, file: SourceFile) -> dict[str, Any]:
    """Every split as a stream of rows. Raises UserError."""
    import datasets

    commit = commit_of(file)
    if commit is not None:
        return _attempt(config, file, lambda: _streamed(datasets.load_dataset, config, revision=commit))
    assert config.hub is not None
    directory = Path(config.hub).expanduser()
    if not any((directory / name).is_file() for name in MARKERS):
        return _attempt(config, file, lambda: _streamed(datasets.load_dataset, config))
    if config.subset is not None:
        rule = "what save_to_disk wrote has splits, and no subsets"
        raise UserError(f"`subset: {config.subset}` with {config.hub}", rule, "leave `subset` out")
    saved = _attempt(config, file, lambda: datasets.load_from_disk(str(directory)))
    if isinstance(saved, dict):
        return dict(saved)
    own = DEFAULT_SPLIT if saved.split is None else str(saved.split)
    return {DEFAULT_SPLIT if config.split is None else own: saved}  # a saved split has one name only


def _streamed(load: Callable[..., Any], config: SourceConfig, **settings: Any) -> dict[str, Any]:
    return dict(load(config.hub, config.subset, streaming=True, **settings))


def _attempt(config: SourceConfig, file: SourceFile, operation: Callable[[], Any]) -> Any:
    """operation(), with errors of `datasets` and the hub as a UserError."""
    import pyarrow
    from datasets.exceptions import DatasetsError
    from httpx2 import TransportError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    assert config.hub is not None
    try:
        return operation()
    except (HfHubHTTPError, TransportError, OfflineModeIsEnabled) as error:
        raise refused_dataset(error, config.hub, commit_of(file)) from None
    except (DatasetsError, ValueError, OSError, RuntimeError, pyarrow.ArrowException) as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, HfHubHTTPError | TransportError | OfflineModeIsEnabled):
            raise refused_dataset(cause, config.hub, commit_of(file)) from None
        said = " ".join(str(error).split())[:400] or type(error).__name__
        raise UserError(f"{config.label}: {said}", RULE, "fix `hub`, `subset` and `revision`") from None
