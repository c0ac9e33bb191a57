"""Files and texts that were made to hang, fill or break what reads them, each read in a process that may take 200 MiB more.

    python -m tests.hostile FOLDER      one line of JSON per input: [kind, surface, outcome]

The process imports the readers, then forks once per input. The child may map 200 MiB above what its parent has mapped, and use
60 seconds of CPU. Outcome: `refused` (a UserError), `read` (no error), the name of any other exception, or the signal.
"""

import bz2
import gzip
import json
import lzma
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from tests.bombs import BOMBS
from windlass.checkpoint.sealed_json import unseal
from windlass.checkpoint.verify import Checkpoint
from windlass.data.config import SourceConfig
from windlass.data.prepare.manifest import load_prepared
from windlass.data.shards.journal import JOURNAL_NAME, open_journal
from windlass.data.shards.mds import read_shard_index
from windlass.data.sources.known_hashes import KnownHashes
from windlass.data.sources.scan import scan
from windlass.data.sources.source_files import source_of_files
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError
from windlass.model.open_config import StoredSizes, architecture_within, read_hf_config
from windlass.recipe import apply_override, parse_yaml
from windlass.report.events import read_lines
from windlass.status import read_status

ROOM_BYTES = 200 << 20
CPU_S = 60
YAML = {
    **BOMBS,
    "python tag": "a: !!python/object/apply:os.system [touch ran]",
    "python name": "a: !!python/name:os.system",
    "escape": "a: \x1b[31m",
}
JSON = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "closed": b"[" * 100_000 + b"]" * 100_000,
    "digits": b'{"version": ' + b"9" * 100_000 + b"}",
    "constants": b'{"version": NaN, "a": [Infinity, -Infinity, 1e999]}',
    "bytes": b'{"version": "\xff\xfe"}',
    "surrogate": b'{"version": "\\ud800", "\\udfff": 1}',
    "list": b"[]",
    "null": b"null",
    "cut": b'{"version": 2, "shards": [{"sam',
    "other forms": b'{"version": 2, "shards": 3, "sets": 5, "settings": [], "model": 7, "model_type": {}, "kind": [], "step": 0}',
    "escapes": b'{"version": "\\u001b]0;owned\\u0007", "sets": {"\\u001b[31m": {}}, "model_type": "\\u001b[31m"}',
    "NUL": b"\0" * 1000,
}
PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def _file(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def _tokenizer(folder: Path, content: bytes) -> object:
    _file(folder, "tokenizer.json", content)
    return open_tokenizer(folder)


def _model(folder: Path) -> object:
    return architecture_within(read_hf_config(folder), StoredSizes(10, 10_000), folder)


def _documents(path: Path, **settings: object) -> int:
    source = SourceConfig.model_validate({"path": str(path), **settings})
    return sum(map(len, source_of_files(source, scan(source, lambda line: None)).documents()))


SURFACES: dict[str, Callable[[Path, bytes], object]] = {
    "config.json": lambda at, data: _model(_file(at, "config.json", data).parent),
    "MANIFEST": lambda at, data: Checkpoint.open(_file(at, "MANIFEST", data).parent),
    "trainer_state.json": lambda at, data: unseal(data, "trainer_state.json"),
    "index.json": lambda at, data: read_shard_index(_file(at, "index.json", data).parent),
    "prepared.json": lambda at, data: load_prepared(_file(at, "prepared.json", data).parent),
    "journal": lambda at, data: open_journal(_file(at, JOURNAL_NAME, data + b"\n").parent),
    "tokenizer.json": _tokenizer,
    "events.jsonl": lambda at, data: read_lines(_file(at, "events.jsonl", data + b"\n")),
    "status.json": lambda at, data: read_status(_file(at, "status.json", data).parent),
    "sources.json": lambda at, data: KnownHashes(_file(at, "sources.json", data)).is_known(at),
    "rows of text": lambda at, data: _documents(_file(at, "a.jsonl", data)),
    "rows of chat": lambda at, data: _documents(_file(at, "b.jsonl", data), format="chat"),
}


def _override(text: str) -> None:
    apply_override({}, f"run.x={text}")


def inputs(folder: Path) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(kind, surface, what reads it)"""
    for name, text in YAML.items():
        yield name, "recipe", lambda text=text: parse_yaml(text, "recipe")
        yield name, "override", lambda text=text: _override(text)
    for surface, read in SURFACES.items():
        for number, (name, data) in enumerate(JSON.items()):
            yield name, surface, lambda read=read, data=data, at=folder / surface / str(number): read(at, data)
    for end, pack in PACKED.items():
        bomb = pack(b" " * (16 << 20)) * 32  # 512 MiB in members one behind the other
        for name in ("a.jsonl", "a.txt"):
            path = _file(folder / "bombs" / end, f"{name}{end}", bomb)
            yield "512 MiB in one row", f"{name}{end}", lambda path=path: _documents(path)
    for end in (".gz", ".zst"):  # the others are no faster than 30 MB/s
        path = _file(folder / "lines", f"a.jsonl{end}", PACKED[end]((b" " * 1023 + b"\n") * (8 << 10)) * 192)
        yield "1.5 GiB of blank lines", f"a.jsonl{end}", lambda path=path: _documents(path)
    for name, surface in (("MANIFEST", "MANIFEST"), ("config.json", "config.json")):
        at = folder / "sparse" / surface
        os.truncate(_file(at, name, b"{"), 1 << 40)
        read_sparse = {"MANIFEST": Checkpoint.open, "config.json": read_hf_config}[surface]
        yield "1 TiB, sparse", surface, lambda read=read_sparse, at=at: read(at)


def outcome_of(read: Callable[[], object]) -> str:
    """What becomes of it in a child that may map ROOM_BYTES more than this process."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        try:
            read()
            found = "read"
        except UserError as error:
            found = "refused" if str(error).replace("\n", "").isprintable() and len(str(error)) < 4000 else "not shown"
        except BaseException as error:
            found = type(error).__name__
        os.write(send, found.encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as file:
        found = file.read()
    _, status = os.waitpid(child, 0)
    return found or f"signal {os.WTERMSIG(status)}"


def main(folder: Path) -> None:
    for kind, surface, read in inputs(folder):
        print(json.dumps([kind, surface, outcome_of(read)]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
