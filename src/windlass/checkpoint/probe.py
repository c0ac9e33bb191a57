"""Do all ranks see the same storage? Asked once, at the start, before anything is written that only one host could
read.

Every rank writes a file with a token of this start; rank 0's token must be readable by every rank, and every rank's
file by rank 0. Nothing else tells: two hosts may each have a directory of the same name, and a checkpoint would then
be written in parts to both, each part looking right where it lies.
"""

import platform
import secrets
import time
from pathlib import Path

import torch.distributed as dist

from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.store import named_errors
from windlass.errors import UserError

PATIENCE_S = 3.0  # a network file system may show a new file a moment late


def probe_shared_storage(directory: Path, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """Returns when all ranks see the same `directory` and may write there; else UserError on all ranks names who
    not.
    """
    exchange = Exchange(rank, world, group)
    token: str = exchange.from_first(lambda: secrets.token_hex(8))
    mine = directory / f".probe-{token}-{rank}"
    first = directory / f".probe-{token}-0"

    def write() -> None:
        with named_errors(directory, len(token)):
            directory.mkdir(parents=True, exist_ok=True)
            mine.write_text(token)

    def look() -> tuple[str, bool]:
        return platform.node(), _appears(first)

    def judge(seen: list[tuple[str, bool]]) -> None:
        theirs = [(rank, _appears(directory / f".probe-{token}-{rank}")) for rank in range(world)]
        blind = [rank for rank, (_, sees) in enumerate(seen) if not sees]
        hidden = [rank for rank, visible in theirs if not visible and rank not in blind]
        if blind or hidden:
            raise _not_shared(directory, [host for host, _ in seen], sorted(blind + hidden))

    exchange.reduce(write, lambda _: None)
    try:
        exchange.reduce(look, judge)
    finally:
        mine.unlink(missing_ok=True)


def _appears(path: Path) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.05)
    return True


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
