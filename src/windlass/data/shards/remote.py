"""A preparation in a store: published so that half of it is nothing, opened through the cache.

    URL/prepared.json             written last; it names every small file with its hash
    URL/tokenizer/, URL/<set>/index.json
    URL/<set>/shard.00000.mds     its hash is in index.json, so one chain of hashes reaches from prepared.json to each byte
    URL/.publishing               there while a preparation is being written: whose it is

Publishing removes prepared.json first, then what an earlier preparation left, and writes it last. Two that publish to one
URL at once cannot lock each other out (a store has no locks); the one whose `.publishing` was replaced gives up before its
prepared.json, so that what is whole is one preparation's. Files that are no preparation's are never removed.
"""

import os
import re
import secrets
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from windlass.data.shards.cache import Cache
from windlass.data.shards.index import INDEX_NAME, Shard, parse_shard_index, unpack_shard
from windlass.errors import BadShard, UserError
from windlass.object_store import Store
from windlass.units import MIB, format_bytes

PREPARED_NAME, TOKENIZER_NAME, CLAIM_NAME = "prepared.json", "tokenizer", ".publishing"
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
SMALL_FILE = re.compile(rf"{TOKENIZER_NAME}/{NAME}|{NAME}/{re.escape(INDEX_NAME)}")
OWN_FILE = re.compile(rf"{SMALL_FILE.pattern}|{NAME}/shard\.\d{{5,}}\.mds|{PREPARED_NAME}|{re.escape(CLAIM_NAME)}")
AGAIN = "prepare the data again to this URL, or copy it again from where it is whole"


class CachedShards:
    """The shards of one set at a URL, through the cache: a reader's ShardSource."""

    def __init__(self, store: Store, name: str, shards: list[Shard], cache: Cache):
        self._store, self._name, self._cache = store, name, cache
        self.where, self.shards = f"{store.url}/{name}", shards
        largest = max(shard.num_bytes for shard in shards)
        self.max_mapped = max(1, cache.limit_bytes // largest - 1)  # what is mapped, and one on its way

    def load(self, number: int) -> np.ndarray:
        shard = self.shards[number]
        return self._cache.load(shard.raw, lambda: self._fetch(shard), f"{self.where}/{shard.stored.name}")

    def _fetch(self, shard: Shard) -> bytes:
        """The shard's raw bytes, verified. What arrives wrong is fetched once more, in case it was spoilt on its way."""
        where = f"{self.where}/{shard.stored.name}"
        for is_last in (False, True):
            try:
                data = self._store.read(f"{self._name}/{shard.stored.name}")
            except FileNotFoundError:
                rule = f"index.json promises {shard.stored.num_bytes} bytes"
                raise BadShard(f"{where} is missing", rule, AGAIN) from None
            try:
                return unpack_shard(shard, data, where, AGAIN)
            except BadShard as error:
                if is_last:
                    raise BadShard(f"{error.given}, fetched twice", error.rule, error.change) from None
        raise AssertionError


class Remote:
    """A preparation at a URL, its small files in a local folder that stays as long as this object."""

    def __init__(self, store: Store, cache: Cache, content: bytes, files: Mapping[str, str]):
        self.store, self.cache = store, cache
        key = xxhash.xxh3_64_hexdigest(store.url.encode() + b"\0" + content)
        self.directory, held = cache.folder(key)
        weakref.finalize(self, os.close, held)
        for name, digest in files.items():
            self._fetch_small(name, digest)

    def _fetch_small(self, name: str, digest: str) -> None:
        where, path = f"{self.store.url}/{name}", self.directory / name
        if not SMALL_FILE.fullmatch(name):
            rule = f"it names files of {TOKENIZER_NAME}/ and an {INDEX_NAME} per set"
            raise BadShard(f"{self.store.url}/{PREPARED_NAME} names the file {name!r}", rule, AGAIN)
        if path.is_file() and xxhash.xxh3_128_hexdigest(path.read_bytes()) == digest:
            return
        try:
            data = self.store.read(name)
        except FileNotFoundError:
            raise BadShard(f"{where} is missing", f"{PREPARED_NAME} names it", AGAIN) from None
        found = xxhash.xxh3_128_hexdigest(data)
        if found != digest:
            rule = f"{PREPARED_NAME} promises xxh3-128 {digest}"
            raise BadShard(f"{where} has the hash xxh3-128 {found}", rule, AGAIN)
        self.cache.put(path, data)

    def shards(self, name: str) -> CachedShards:
        """The set `name`, ready to be read. Raises BadShard."""
        data = (self.directory / name / INDEX_NAME).read_bytes()
        return CachedShards(
            self.store, name, parse_shard_index(data, f"{self.store.url}/{name}/{INDEX_NAME}"), self.cache
        )

    def check_window(self, name: str, shuffle_window: int, num_sources: int = 1) -> None:
        """Raises UserError where one shuffle window (per source of a mixture) and one shard more do not fit into the cache."""
        sizes = sorted((shard.num_bytes for shard in self.shards(name).shards), reverse=True)
        small = sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())
        needed = sum(sizes[: shuffle_window * num_sources + 1]) + small
        if needed > self.cache.limit_bytes:
            each = f" for each of {num_sources} sources" if num_sources > 1 else ""
            raise UserError(
                f"data.cache.limit_mib: {self.cache.limit_bytes // MIB} with data.shuffle_window: {shuffle_window} and "
                f"shards of {format_bytes(sizes[0])}",
                f"one shuffle window{each}, one shard more, and {format_bytes(small)} of tokenizer and index are in the "
                f"cache at once: {format_bytes(needed)}",
                f"set data.cache.limit_mib to {-(-needed // MIB)} or more, or a smaller data.shuffle_window",
            )

    def check_sizes(self, max_missing: Mapping[str, int]) -> None:
        """Every shard of these sets is there, of the right size, but for `max_missing` of each. Raises BadShard."""
        found = self.store.sizes()
        for name, lacking in max_missing.items():
            for shard in self.shards(name).shards:
                where, size = f"{self.store.url}/{name}/{shard.stored.name}", found.get(f"{name}/{shard.stored.name}")
                lacking -= size != shard.stored.num_bytes
                if lacking < 0:
                    given = f"{where} is missing" if size is None else f"{where} has {size} bytes"
                    raise BadShard(given, f"index.json promises {shard.stored.num_bytes} bytes", AGAIN)


def claim(store: Store) -> bytes:
    """Announces a preparation before it is made, so that a store that cannot be written costs nothing. Raises UserError.

    -> what `publish` takes.
    """
    store.check_writable()
    found = store.sizes()
    foreign = sorted(name for name in found if not OWN_FILE.fullmatch(name))
    if foreign or (found and PREPARED_NAME not in found and CLAIM_NAME not in found):
        given = f"data.directory {store.url} holds what windlass did not prepare: {', '.join((foreign or sorted(found))[:5])}"
        raise UserError(given, "it is replaced as a whole when data is prepared", "give a URL of its own")
    token = secrets.token_hex(16).encode()
    store.write(CLAIM_NAME, token)
    return token


def publish(directory: Path, store: Store, token: bytes, report: Callable[[str], None]) -> None:
    """Copies the preparation in `directory` to the store, in place of an earlier one. Raises UserError."""
    _check_claim(store, token)
    old = set(store.sizes()) - {CLAIM_NAME}
    store.remove(sorted(old, key=lambda name: name != PREPARED_NAME))  # prepared.json first
    files = {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}
    # hashes of sources may be beside a local preparation, and mean nothing elsewhere
    paths = {name: path for name, path in files.items() if OWN_FILE.fullmatch(name)}
    last = paths.pop(PREPARED_NAME)
    total = sum(path.stat().st_size for path in paths.values())
    report(f"writing {len(paths) + 1} files, {format_bytes(total)}, to {store.url}")
    for name, path in sorted(
        paths.items(), key=lambda item: item[0].endswith(INDEX_NAME)
    ):  # index.json behind its shards
        store.write(name, path)
    _check_claim(store, token)
    store.write(PREPARED_NAME, last)
    store.remove([CLAIM_NAME])


def _check_claim(store: Store, token: bytes) -> None:
    try:
        found = store.read(CLAIM_NAME)
    except FileNotFoundError:
        found = b""
    if found != token:
        rule = "one preparation is written to a URL at a time; the one that began last goes on"
        raise UserError(f"{store.url} was taken over by another preparation", rule, "wait for it, or give another URL")
