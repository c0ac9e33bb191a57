"""JSON that hashes itself, and the file names a checkpoint may hold.

A sealed file is one canonical JSON object (sorted keys, no spaces, ASCII) whose key `hash` is the xxh3-128 of the
same object without that key. Reading parses strictly (no NaN, no overflowing number, no key twice, a size cap), takes
the hash out, writes the rest again in canonical form, and compares both the hash and the bytes: a flipped bit
anywhere, even in a blank, is found. xxh3 finds accidents, not attackers: a user who can write the directory can write
a matching hash. So nothing that is read here is ever executed, and every path is checked before use. https://xxhash.com
(28 GB/s a core on an EPYC of Zen 4, 10 on an Emerald Rapids: measured, benchmarks/checkpoint.py).
"""

import json
import math
import re
from typing import Any, NoReturn

import xxhash

from windlass.errors import BadCheckpoint
from windlass.units import format_bytes

MAX_SEALED_BYTES = 1 << 30  # a bound, not a target: the manifest of 5 TB in 4 MiB pieces is about 50 MB

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]*(/[A-Za-z0-9_][A-Za-z0-9._+=@-]*)*")


def digest(data: Any) -> str:
    """xxh3-128 of a bytes-like object, as 32 hexadecimal digits. Releases the GIL while it runs."""
    return xxhash.xxh3_128_hexdigest(data)


def bad(given: str, rule: str) -> BadCheckpoint:
    return BadCheckpoint(given, rule, "use an older checkpoint, or copy this one again from where it is whole")


def check_file_name(name: str, where: str) -> str:
    """`name` if it is a plain relative path (letters, digits, . _ + = @ -, no leading dot), else BadCheckpoint."""
    if len(name) > 512 or not _NAME.fullmatch(name):
        raise bad(
            f"{where} names the file {name[:80]!r}",
            "a checkpoint holds plain relative names only: no `..`, no absolute path",
        )
    return name


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def seal(body: dict[str, Any]) -> bytes:
    """The bytes of a sealed file. A NaN or an infinity in `body` is a ValueError."""
    assert "hash" not in body, "the key `hash` belongs to the seal"
    return _canonical({**body, "hash": digest(_canonical(body))})


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} overflows")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)[:40]!r} occurs twice")
    return result


def parse_strict(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object, or BadCheckpoint with what is wrong in the file `name`."""
    if len(data) > MAX_SEALED_BYTES:
        raise bad(f"{name} has {format_bytes(len(data))}", f"such a file has at most {format_bytes(MAX_SEALED_BYTES)}")
    try:
        value = json.loads(data.decode(), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise bad(f"{name} cannot be read: {str(error)[:120]}", "it must be strict JSON") from None
    if not isinstance(value, dict):
        raise bad(f"{name} holds a {type(value).__name__}", "it must hold one JSON object")
    return value


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """The body of a sealed file, verified; BadCheckpoint if a single bit differs."""
    body = parse_strict(data, name)
    stated = body.pop("hash", None)
    try:
        found, again = digest(_canonical(body)), _canonical({**body, "hash": stated})
    except RecursionError:
        raise bad(f"{name} is nested too deeply", "it must be JSON of a few levels") from None
    if stated != found:
        raise bad(
            f"{name}: hash differs: it states {str(stated)[:40]}, its content has {found}", "a file hashes itself"
        )
    if data != again:
        raise bad(f"{name} is not as it was written: {_first_difference(data, again)}", "a file is canonical JSON")
    return body


def _first_difference(data: bytes, expected: bytes) -> str:
    """Where a file whose content is right has other bytes: a blank, another escape, or its end cut off."""
    at = next(
        (at for at, (one, other) in enumerate(zip(data, expected)) if one != other), min(len(data), len(expected))
    )
    return f"{len(data)} bytes, written with {len(expected)}; the first that differs is byte {at}"
