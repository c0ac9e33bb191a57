"""Raw files of ids: little-endian integers one after the other, as nanoGPT's prepare.py writes them, or behind llm.c's header.

llm.c (dev/data/data_common.py): 256 int32, of which the first three are a magic number, a version and the number of ids. Magic
20240520, version 1: uint16. Magic 20240801, version 7: uint32.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from windlass.data.tokens.stored_row import StoredRow, damaged_tokens
from windlass.errors import UserError

HEADER_BYTES: Final = 1024
HEADERS: Final = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
MAGICS: Final = {magic for magic, _ in HEADERS}
IDS_AT_ONCE: Final = 1 << 20


def raw_rows(path: Path, id_type: str | None) -> Iterator[StoredRow]:
    """The ids, IDS_AT_ONCE at a time. `id_type`: where the recipe gives it. Raises UserError."""
    with open(path, "rb") as file:
        head = np.frombuffer(file.read(12), "<i4") if path.stat().st_size >= HEADER_BYTES else np.empty(0, "<i4")
        begin = HEADER_BYTES if len(head) and int(head[0]) in MAGICS else 0
        found = _type_of(path, head, id_type) if begin else id_type
        if found is None:
            given = f"{path} is raw ids, and nothing says how wide one is"
            change = "set `id_type: uint16` or `uint32` of the source, as what wrote it did"
            raise UserError(given, "a raw file has no header, but for llm.c's", change)
        dtype = np.dtype(found).newbyteorder("<")
        num_ids, rest = divmod(path.stat().st_size - begin, dtype.itemsize)
        if rest:
            raise damaged_tokens(path, f"has {rest} bytes behind {num_ids} ids of {found}", "a raw file is whole ids")
        if begin and int(head[2]) != num_ids:
            raise damaged_tokens(path, f"holds {num_ids} ids", f"its header promises {int(head[2])}")
        file.seek(begin)
        for first in range(0, num_ids, IDS_AT_ONCE):
            yield StoredRow(np.frombuffer(file.read(IDS_AT_ONCE * dtype.itemsize), dtype), str(path), first)


def _type_of(path: Path, head: np.ndarray, id_type: str | None) -> str:
    found = HEADERS.get((int(head[0]), int(head[1])))
    known = ", ".join(f"{magic} with version {version}" for magic, version in HEADERS)
    if found is None:
        raise damaged_tokens(path, f"has llm.c's header of version {int(head[1])}", f"headers that are read: {known}")
    if id_type not in (None, found):
        given = f"`id_type: {id_type}` with {path}, whose header says {found}"
        raise UserError(given, "a header says how wide an id is", "leave `id_type` out")
    return found
