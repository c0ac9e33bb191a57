"""The small files of a preparation, known by their hashes: the tokenizer's and every index.json.

Shards carry their hashes in their index.json. What nothing else vouches for is that file, which says which shards there are and
in what order, and the tokenizer: two ids of it that change places give other text for the same ids. So prepared.json keeps their
hashes, and whoever opens the preparation compares them.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash

from windlass.data.shards.index import INDEX_NAME, REPAIR
from windlass.data.shards.remote import PREPARED_NAME, TOKENIZER_NAME
from windlass.errors import BadShard


def hashes_of(directory: Path, sets: Iterable[str] | None = None) -> dict[str, str]:
    """The tokenizer's files and every index.json (or those of `sets`) -> xxh3-128, by their path below the directory."""
    indices = directory.glob(f"*/{INDEX_NAME}") if sets is None else [directory / name / INDEX_NAME for name in sets]
    small = [path for path in (*(directory / TOKENIZER_NAME).glob("*"), *indices) if path.is_file()]
    hashes = {path.relative_to(directory).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in small}
    return dict(sorted(hashes.items()))


def check_small_files(directory: Path, promised: Mapping[str, str]) -> None:
    """Raises BadShard unless the files are those that were written: none changed or gone, no further one of the tokenizer."""
    found = hashes_of(directory)
    rule = f"{PREPARED_NAME} keeps the hashes of the tokenizer's files and of each {INDEX_NAME}, which stay as they are"
    for name, digest in promised.items():
        if name not in found:
            raise BadShard(f"{directory / name} is missing", rule, REPAIR)
        if found[name] != digest:
            given = f"{directory / name} has the hash xxh3-128 {found[name]}, and was written with {digest}"
            raise BadShard(given, rule, REPAIR)
    for name in found.keys() - promised.keys() if promised else ():
        if name.startswith(f"{TOKENIZER_NAME}/") and not name.startswith(f"{TOKENIZER_NAME}/."):
            raise BadShard(f"{directory / name} was not there when the data was prepared", rule, REPAIR)
