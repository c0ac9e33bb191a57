"""A row of ids as a file holds it, and the errors of a file that holds none."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass.errors import UserError


class StoredRow(NamedTuple):
    """`ids`: [N], of any integer type; `where`: the file and row, in words; `first`: the position there of ids[0]."""

    ids: np.ndarray
    where: str
    first: int = 0


def damaged_tokens(path: Path, what: str, rule: str) -> UserError:
    return UserError(f"{path} {what}", rule, "write or copy it again; or name other files in `path`")
