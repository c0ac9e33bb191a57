"""Whether a run that goes on may take the sizes of its checkpoint: where its layout and devices are the same, they fit."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.runtime import Runtime

OF_LAYOUT = ("zero", "offload", "blocks_per_unit", "prefetch", "recompute", "activation_gib", "compile")
"""Settings of parallel, besides the axes, that change what a rank holds."""


def fill_open(config: RunConfig, **found: Any) -> RunConfig:
    """The settings that are `auto` as in `found`."""
    run = {"micro_batch": found["micro_batch"]} if "micro_batch" in found and config.run.micro_batch == "auto" else {}
    parallel, names = config.parallel, ("recompute", "compile")
    given = {name: found[name] for name in names if name in found and getattr(parallel, name) == "auto"}
    if "zero" in found and parallel.zero == "auto":
        parallel = parallel.with_zero(found["zero"])
    return config.changed(run=config.run.changed(**run), parallel=parallel.changed(**given))


def sizes_before(trainer_state: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's run computes with, of the four settings."""
    then = trainer_state["config"]
    parallel = {name: then["parallel"][name] for name in ("zero", "recompute", "compile")}
    return {"micro_batch": then["run"]["micro_batch"], **parallel}


def changes_since(config: RunConfig, trainer_state: Mapping[str, Any], runtime: Runtime) -> list[str]:
    """Why the checkpoint's choice may not fit here; empty where it does."""
    device = trainer_state.get("device", "a device that it does not name")
    if (device, trainer_state["world"]) != (runtime.device_name(), runtime.world):
        return [
            f"the checkpoint was written on {trainer_state['world']} x {device} and this run has "
            f"{runtime.world} x {runtime.device_name()}"
        ]
    found, then = sizes_before(trainer_state), trainer_state["config"]
    if still_open := [name for name, value in found.items() if value == "auto"]:
        return [f"the checkpoint itself leaves {', '.join(still_open)} to auto"]
    before = ParallelConfig.model_validate(then["parallel"])
    try:
        filled = fill_open(config, **found)
        now = filled.parallel
        layouts = [parallel.layout(runtime.world) for parallel in (before, now)]
    except UserError:
        return [
            f"the run had parallel.zero={before.zero}, which does not go with parallel.shard={config.parallel.shard}"
        ]
    changed = [
        f"{key} changed from {_plain(old)} to {_plain(new)}"
        for key, old, new in (
            *((f"parallel.{name}", getattr(before, name), getattr(now, name)) for name in OF_LAYOUT),
            ("run.micro_batch", found["micro_batch"], filled.run.micro_batch),
            ("data.sequence_length", then["data"]["sequence_length"], config.data.sequence_length),
        )
        if old != new
    ]
    if not changed:  # zero 0 shards nothing: it alone changes the sizes of axes, too
        axes = [(axis.name, *(getattr(layout, axis.name) for layout in layouts)) for axis in fields(layouts[0])]
        changed = [f"parallel.{axis} changed from {old} to {new}" for axis, old, new in axes if old != new]
    if not changed and config.sequences_per_step % (found["micro_batch"] * layouts[1].batch_ranks):
        changed = [
            f"run.micro_batch={found['micro_batch']} on {layouts[1].batch_ranks} ranks no longer divides the "
            f"{config.sequences_per_step} sequences of run.tokens_per_step={config.run.tokens_per_step}"
        ]
    return changed


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
