"""A sample of the long tests that fits a time: drawn by a seed from seconds that earlier runs recorded.

The order is the seed's alone: a test's place is the hash of the seed and its name, so neither xdist's workers nor a new test
beside it change which of two tests comes first. Tests are taken in that order, each that still fits. `long_seconds.json` holds
the mean seconds of a test function's cells (`make test-all` writes it); a function that it does not know counts as UNKNOWN_S.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

RECORD = Path(__file__).parent / "long_seconds.json"
UNKNOWN_S = 60.0


def function_of(test: str) -> str:
    """tests/a.py::test_b[c-d] -> tests/a.py::test_b"""
    return test.partition("[")[0]


def read_seconds(record: Path = RECORD) -> dict[str, float]:
    return json.loads(record.read_text()) if record.exists() else {}


def sample(tests: Iterable[str], seconds: dict[str, float], budget_s: float, seed: str) -> list[str]:
    """Names of tests whose seconds together are at most `budget_s`, in the seed's order."""
    taken, left_s = [], budget_s
    for test in sorted(tests, key=lambda test: hashlib.sha256(f"{seed} {test}".encode()).digest()):
        cost_s = seconds.get(function_of(test), UNKNOWN_S)
        if cost_s <= left_s:
            taken.append(test)
            left_s -= cost_s
    return taken


def write_seconds(durations: Iterable[tuple[str, float]], record: Path = RECORD) -> None:
    """Replaces the functions that ran in the record, and keeps the others. `durations`: (test, seconds), several a test."""
    cells: dict[str, dict[str, float]] = {}
    for test, duration_s in durations:
        of_function = cells.setdefault(function_of(test), {})
        of_function[test] = of_function.get(test, 0.0) + duration_s
    means = {name: round(sum(found.values()) / len(found), 1) for name, found in cells.items()}
    if means:
        record.write_text(json.dumps(read_seconds(record) | means, indent=1, sort_keys=True) + "\n")
