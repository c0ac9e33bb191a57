"""MANIFEST: what a checkpoint is, and what each of its files must be; and the names of things. No torch."""

import re
import secrets
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from windlass.checkpoint.hashed_file import Count, FileEntry
from windlass.checkpoint.sealed_json import digest

SCHEMA = 3
MANIFEST, INDEX, TRAINER_STATE = "MANIFEST", "index.json", "trainer_state.json"
HEADER_BYTES = 64

_STEP = re.compile(r"step-(\d{8,12})")
_RANK = re.compile(r"rank-\d{5,7}\.bin")
_HEADER = re.compile(rb'windlass \{"token":"[0-9a-f]{16}","index_bytes":(\d{1,10})\} *\n')


class Problem(NamedTuple):
    """What is wrong with one file. `what`: size, hash, missing, extra, stale, link, unreadable, manifest."""

    file: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}: {self.detail}"


class Manifest(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    schema_version: Count
    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    step: Count
    world: Annotated[int, Field(ge=1, le=10**7)]
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    time: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    """When it was committed, ISO 8601, UTC."""
    metric: float | None
    """Validation loss in nats, if it was known: lower is better."""
    files: dict[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """100 for step-00000100, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def rank_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def is_rank_name(name: str) -> bool:
    return _RANK.fullmatch(name) is not None


def rank_header(token: str, index_bytes: int) -> bytes:
    """The first HEADER_BYTES of a rank's file: which save it belongs to, and how long the index behind them is."""
    header = b'windlass {"token":"%s","index_bytes":%d}' % (token.encode(), index_bytes)
    assert len(header) < HEADER_BYTES
    return header.ljust(HEADER_BYTES - 1) + b"\n"


def index_bytes_of(header: bytes) -> int | None:
    """None where it is no header of a rank's file."""
    match = _HEADER.fullmatch(header)
    return int(match[1]) if match else None


def new_token(run_id: str) -> str:
    """8 digits for the run, 8 by chance."""
    return digest(run_id.encode())[:8] + secrets.token_hex(4)
