"""Several settings of one row, on one device in one start: the first that fits, or all that fit, of which the fastest is kept.

Not measured, each with its reason in the row:

    what cannot fit by floor.least_bytes, and what runs out of memory
    what repeats more than a candidate that ran, in products no larger. Larger products count as no slower up to 16,384 tokens per
    micro-batch, where they have reached their rate (gpu-ground-truth.json); beyond it both are measured
    other precisions than that of the first that ran: they are there for devices on which it does not fit
    what the row's time is not enough for, at the pace of the candidates before
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import floor
import torch
from cells import free, plain
from step import Setup, measure_setup, memory_of

from windlass.units import GIB

USABLE = 0.98  # of the device's memory; the rest are its context and what the allocator cannot join
FULL_RATE_TOKENS = 16_384
REPEATED = ("none", "selective", "full")  # the more the further back


def measure_first_fit(setups: Sequence[Setup], device: torch.device, seconds: float) -> dict[str, Any]:
    """The first of `setups` that has enough memory. One that cannot fit by floor.least_bytes is not tried."""
    before: list[list[Any]] = []
    for setup in setups:
        found = _tried(setup, device, seconds)
        if not isinstance(found, str):
            return found | {"before": before}
        before.append([asdict(setup), found])
    raise torch.OutOfMemoryError(f"none of {len(setups)} settings fits: {before[-1][1]}")


def measure_best(setups: Sequence[Setup], device: torch.device, seconds: float, budget_s: float) -> dict[str, Any]:
    """The fastest of `setups`, with `candidates`: (setup, tokens/s or why there is none) of each. `budget_s`: of all of them; the
    first that fits is measured anyway."""
    start_s, measured, candidates = time.monotonic(), [], []
    for setup in setups:
        why = _not_worth_it([one for one, _ in measured], setup)
        longest_s = max((took_s for _, (_, took_s) in measured), default=0.0)
        if why is None and measured and time.monotonic() - start_s + longest_s > budget_s:
            why = f"no time: {budget_s:.0f} s are for all candidates"
        if why is None:
            begun_s = time.monotonic()
            found = _tried(setup, device, seconds)
            free(device)
            if not isinstance(found, str):
                measured.append((setup, (found, time.monotonic() - begun_s)))
            why = found if isinstance(found, str) else found["tokens_per_s"]
        candidates.append([asdict(setup), why])
    if not measured:
        raise torch.OutOfMemoryError(f"none of {len(setups)} settings fits: {candidates[-1][1]}")
    best = max((found for _, (found, _) in measured), key=lambda found: found["tokens_per_s"])
    return best | {"candidates": candidates}


def smaller(setup: Setup, micro_batches: Sequence[int]) -> list[Setup]:
    """The same step with each of these micro-batches, in order."""
    return [replace(setup, micro_batch=size) for size in micro_batches]


def _tried(setup: Setup, device: torch.device, seconds: float) -> dict[str, Any] | str:
    """Its figures, or how it does not fit."""
    architecture = setup.architecture()
    is_counted = setup.adapter is None and not architecture.num_experts  # as floor.py knows models
    needed, there = floor.least_bytes(architecture, setup.work()) if is_counted else 0.0, USABLE * memory_of(device)
    if needed > there:
        return f"needs {needed / GIB:.1f} GiB at least, of {there / GIB:.1f}"
    try:
        return measure_setup(setup, device, seconds)
    except torch.OutOfMemoryError as error:
        message = plain(str(error))[:200]
    free(device)  # behind the except block, whose traceback holds the tensors
    return message


def _not_worth_it(measured: Sequence[Setup], setup: Setup) -> str | None:
    """Why `setup` cannot be faster than one of `measured`; None where it may be."""
    for one in measured:
        if one.policy != setup.policy:
            return f"precision {setup.policy} is for devices on which {one.policy} does not fit"
        repeats_no_more = REPEATED.index(one.recompute) <= REPEATED.index(setup.recompute)
        is_at_rate = one.micro_batch * one.sequence_length <= FULL_RATE_TOKENS
        is_as_large = one.micro_batch == setup.micro_batch or (is_at_rate and one.micro_batch > setup.micro_batch)
        if repeats_no_more and is_as_large:
            return f"repeats no less than {one.recompute} x{one.micro_batch}, in products no larger"
    return None
