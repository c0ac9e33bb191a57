"""`parallel.zero` where it is `auto`: by the count of plan/zero.py; and a word where CPU ranks cut what fits whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.optim.rules import frozen_names
from windlass.parallel.config import Stage
from windlass.plan.memory import RankMemory
from windlass.plan.sizes import StepSize, micro_batches, total_bytes
from windlass.plan.zero import STAGES, choose_stage
from windlass.runtime import Runtime
from windlass.training.parts.device_memory import Room
from windlass.training.sizing.host_memory import available_bytes
from windlass.training.start.model_plan import ModelPlan
from windlass.units import format_bytes

OF_HOST: Final = 0.5
"""The part of a CPU rank's share of its host that may be filled: the rest is for the process, the copy that a save writes from,
and pages of files."""
CUTS: Final[Mapping[Stage, str]] = {
    0: "nothing is cut",
    1: "optimizer states are cut",
    2: "optimizer states and gradients are cut",
    3: "all is cut",
}
COST: Final = (
    "gathers weights with every micro-batch, and gloo copies each message: 2.5 times the processor time of zero 0, in fp32 "
    "(benchmarks/results/layouts.json)"
)


def memory_of(config: RunConfig, plan: ModelPlan, runtime: Runtime) -> RankMemory:
    """The count for `config` on the ranks at hand."""
    return RankMemory(
        plan.architecture,
        config.parallel,
        config.precision,
        config.parallel.layout(runtime.world),
        config.optim.kind,
        frozen_names(plan.rules),
        plan.adapter,
        config.parallel.compiles,
        runtime.device.type == "cuda",
    )


def with_least_zero(
    config: RunConfig, plan: ModelPlan, runtime: Runtime, room: Room | None
) -> tuple[RunConfig, list[str]]:
    """`config` with a number for `parallel.zero`, and a sentence that says why. `room`: of the device; None: that of the host
    counts. Collective."""
    if config.parallel.zero != "auto":
        return config, []
    usual = _cut(config, config.parallel.zero_stage)
    if runtime.world == 1:
        return usual, []  # one rank cuts nothing
    if not memory_of(usual, plan, runtime).is_counted:
        return usual, _said(usual, "what a rank of this layout keeps is not counted")
    limit_bytes = room.limit_bytes if room is not None else _share_of_all(runtime)
    if limit_bytes is None:
        return usual, _said(usual, "this host does not say how much memory it has left")
    needed = _Needs(plan, runtime, room).of(config, STAGES)
    stage = choose_stage(needed, limit_bytes)
    return _cut(config, stage), _said(_cut(config, stage), _reason(needed, stage, limit_bytes))


def cuts_what_fits(config: RunConfig, plan: ModelPlan, runtime: Runtime) -> list[str]:
    """On rank 0 a sentence, where ranks on CPUs cut weights that each could keep whole, were all of them on this host."""
    is_cut = config.parallel.zero == 3 and config.parallel.layout(runtime.world).shard > 1
    free = available_bytes() if is_cut and runtime.rank == 0 and runtime.device.type == "cpu" else None
    if free is None or not memory_of(config, plan, runtime).is_counted:
        return []
    limit_bytes, whole = int(free / runtime.world * OF_HOST), _Needs(plan, runtime, None).of(config, (0,))
    if not whole or whole[0] > limit_bytes:
        return []
    return [
        f"parallel.zero=3 on {runtime.world} CPU ranks {COST}; parallel.zero=auto takes 0 here, which needs "
        f"{format_bytes(whole[0])} of the {format_bytes(limit_bytes)} that a rank may take"
    ]


def _share_of_all(runtime: Runtime) -> int | None:
    """What every rank may take of its host, equal on all; None where one of them does not know. Collective."""
    hosts = runtime.hosts()
    free = available_bytes()
    shares = runtime.gathered(None if free is None else int(free / hosts.count(hosts[runtime.rank]) * OF_HOST))
    known = [share for share in shares if share is not None]
    return min(known) if len(known) == len(shares) else None


@dataclass(frozen=True)
class _Needs:
    """Bytes of a rank at the peak of a step, by stage."""

    plan: ModelPlan
    runtime: Runtime
    room: Room | None

    def of(self, config: RunConfig, stages: Sequence[Stage]) -> dict[Stage, int]:
        """The bytes of each of `stages` that the recipe's other settings allow."""
        found: dict[Stage, int] = {}
        for stage in stages:
            try:
                cut = _cut(config, stage)
                cut.check_layout(self.plan.architecture, self.runtime.world)
            except UserError:
                continue
            found[stage] = total_bytes(
                memory_of(cut, self.plan, self.runtime), self._size(cut), cut.data.sequence_length
            )
        return found

    def _size(self, config: RunConfig) -> StepSize:
        """What a step is to fit with: where it is left open, the least on a CPU, and on a GPU enough tokens without `full`."""
        recompute, micro_batch = config.parallel.recompute, config.micro_batch
        if self.room is not None and config.run.micro_batch == "auto":
            layout = config.parallel.layout(self.runtime.world)
            per_rank = config.sequences_per_step // layout.batch_ranks
            micro_batch = micro_batches(per_rank, micro_batch, config.data.sequence_length)[-1]
        if recompute == "auto":
            recompute = "none" if self.room is None else "selective"
        return StepSize(micro_batch, recompute)


def _cut(config: RunConfig, stage: Stage) -> RunConfig:
    return config.changed(parallel=config.parallel.with_zero(stage))


def _said(config: RunConfig, why: str) -> list[str]:
    return [f"auto: parallel.zero={config.parallel.zero}: {why}"]


def _reason(needed: Mapping[Stage, int], stage: Stage, limit_bytes: int) -> str:
    less = [f"zero {one} {format_bytes(needed[one])}" for one in sorted(needed) if one < stage]
    fits = "" if needed[stage] <= limit_bytes else ", which is too much by the count"
    beside = f"; with less cut: {', '.join(less)}" if less else ""
    return (
        f"{CUTS[stage]}; a step needs {format_bytes(needed[stage])} of the {format_bytes(limit_bytes)} that a rank may take{fits}"
        f"{beside}"
    )
