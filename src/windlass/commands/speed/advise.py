"""`windlass advise RUN`: where the time of a run goes, what to change next and what it brings, what its MFU means. No torch.

All of it is read from the run's directory, so the run may go on, or be over, or have been copied from elsewhere.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from windlass.advice.levers import Lever, find_levers
from windlass.advice.mfu import LIMIT, Level, levels
from windlass.advice.observed import Observed, observe
from windlass.hardware import Device, find_device
from windlass.units import format_count, format_duration

SHOWN: Final = "NVIDIA H100 80GB HBM3"
"""The device that `advise` estimates for where the run's own device has no known peak."""
HEALTHY: Final = "nothing slow was found"


def advise(run_directory: Path, in_json: bool = False) -> Iterator[str]:
    """Lines to print. Raises UserError where the run has no step to look at."""
    run = observe(run_directory)
    found, parts = find_levers(run), where(run)
    device, table = _levels(run)
    if in_json:
        yield json.dumps(_as_dict(run, parts, found, device, table))
        return
    yield from _times(run, parts)
    yield ""
    yield from _next(found)
    yield ""
    yield from _mfu(run, device, table)


def where(run: Observed) -> dict[str, float]:
    """Part of a step -> seconds; they add up to the step. With a profile, computing and communication are two parts."""
    parts = {"waiting for data": run.wait_s, "writing lines": run.log_s}
    rest = max(0.0, run.step_s - sum(parts.values()))
    if run.profile is None or not run.profile.step_s:
        return {"computing and communication": rest, **parts}
    share = (run.profile.communicating_s - run.profile.hidden_s) / run.profile.step_s
    exposed = min(rest, share * run.step_s)
    return {"computing": rest - exposed, "communication, not hidden": exposed, **parts}


def _levels(run: Observed) -> tuple[Device, list[Level]]:
    """A device with a known peak, and what the run's model does on it."""
    device = find_device(run.facts.device) or find_device(SHOWN)
    assert device is not None
    return device, levels(run.facts.flops_per_token, device.peak_flops)


def _times(run: Observed, parts: dict[str, float]) -> Iterator[str]:
    ranks = f"{run.facts.ranks} x {run.facts.device}"
    yield f"{ranks}: {format_count(run.tokens_per_s)} tok/s, the mean of {run.steps} steps up to step {run.last_step}"
    yield f"  {'step':<34}{1e3 * run.step_s:10.2f} ms {1:7.1%}"
    for name, seconds in parts.items():
        yield f"  {f'  {name}':<34}{1e3 * seconds:10.2f} ms {seconds / run.step_s:7.1%}"
    whole = sum(run.ledger.values())
    listed = ", ".join(
        f"{name} {seconds / whole:.1%}" for name, seconds in run.ledger.items() if seconds >= 0.001 * whole
    )
    yield f"of {format_duration(whole)} since the start: {listed}"


def _next(found: Sequence[Lever]) -> Iterator[str]:
    if not found:
        yield f"{HEALTHY}: data is in time, rows are full, nothing is read back, and little is sent beside what is computed"
        yield "windlass profile RUN says which kernels a step is made of"
        return
    for number, lever in enumerate(found):
        title = "next" if number == 0 else "then"
        yield f"{title}: {lever.name}, {gain(lever)}"
        yield f"      {lever.seen}"
        yield f"      change: {lever.change}"


def gain(lever: Lever) -> str:
    if lever.gain is None:
        return "its gain is not known from the events: windlass profile RUN measures it"
    return f"{lever.gain:+.1%} tok/s ({lever.source})"


def _mfu(run: Observed, device: Device, table: Sequence[Level]) -> Iterator[str]:
    if run.mfu is None:
        yield f"MFU: n/a, no peak is known for {run.facts.device} at this precision. On one {device.name} this model would do"
    else:
        limit = 2 * LIMIT if run.setting("precision", "policy") == "fp8" else LIMIT  # whose peak is twice that of bf16
        wrong = ": above the limit of bf16, so something is counted wrongly" if run.mfu > limit else ""
        again = run.facts.recomputed_flops / run.facts.flops_per_token
        hardware = f" (HFU {run.mfu * (1 + again):.1%}, with what is computed twice)" if again else ""
        yield f"MFU: {run.mfu:.1%}{hardware}{wrong}. On one {device.name} this model does"
    for level in table:
        rate = f"{format_count(level.tokens_per_s)} tok/s"
        yield f"  at {level.mfu:.0%}  {rate:>12}  {level.hours:9.3g} h for 1 G tokens  {level.meaning}"


def _as_dict(
    run: Observed, parts: dict[str, float], found: Sequence[Lever], device: Device, table: Sequence[Level]
) -> dict[str, Any]:
    return {
        "steps": run.steps,
        "last_step": run.last_step,
        "step_s": run.step_s,
        "tokens_per_s": run.tokens_per_s,
        "mfu": run.mfu,
        "where_s": parts,
        "ledger_s": dict(run.ledger),
        "levers": [asdict(lever) for lever in found],
        "levels": {"device": device.name, "rows": [asdict(level) for level in table]},
    }
