"""Checks once, at the start, that all ranks see the same storage.

Every rank writes a file with a token of this start. Every rank must be able to read rank 0's file, and rank 0 every
rank's. Without this check, two hosts that each have a directory of the same name would each write a part of the
checkpoint, and each part would look right on its own host.
"""

import platform
import secrets
import time
from pathlib import Path

import torch.distributed as dist

from windlass.checkpoint.commit import named_errors
from windlass.checkpoint.exchange import Exchange
from windlass.errors import UserError

PATIENCE_S = 3.0  # a network file system may show a new file a moment late


def probe_shared_storage(directory: Path, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Returns when all ranks see the same `directory` and may write there; else UserError, on all ranks, names who."""
    exchange = Exchange(rank, world, group)
    token: str = exchange.from_first(lambda: secrets.token_hex(8))
    files = [directory / f".probe-{token}-{one}" for one in range(world)]

    def write() -> None:
        with named_errors(directory, len(token)):
            directory.mkdir(parents=True, exist_ok=True)
            files[rank].write_text(token)

    def look() -> tuple[str, bool]:
        return platform.node(), not _hidden(files[:1])

    def judge(seen: list[tuple[str, bool]]) -> None:
        blind = {rank for rank, (_, sees) in enumerate(seen) if not sees}
        apart = blind | {files.index(path) for path in _hidden(files)}
        if apart:
            raise _not_shared(directory, [host for host, _ in seen], sorted(apart))

    exchange.reduce(write, lambda _: None)
    try:
        exchange.reduce(look, judge)
    finally:
        files[rank].unlink(missing_ok=True)


def _hidden(paths: list[Path]) -> list[Path]:
    """The paths that do not appear within PATIENCE_S."""
    end_s = time.monotonic() + PATIENCE_S
    hidden = [path for path in paths if not path.exists()]
    while hidden and time.monotonic() < end_s:
        time.sleep(0.05)
        hidden = [path for path in hidden if not path.exists()]
    return hidden


def _not_shared(directory: Path, hosts: list[str], apart: list[int]) -> UserError:
    by_host: dict[str, list[str]] = {}
    for rank in apart:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    named = "; ".join(f"host {host} (rank {', '.join(ranks)})" for host, ranks in by_host.items())
    return UserError(
        f"{directory} is not the same storage on all ranks: {named} and rank 0 on host {hosts[0]} see different files",
        "checkpoints are written by all ranks into one directory",
        "set run.directory to a path on storage that every host mounts",
    )
