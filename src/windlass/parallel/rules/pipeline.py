"""What a pipeline allows of a layout, of a precision, of a model and of a batch. No torch.

A pipeline of pp ranks cuts the model into stages of whole blocks, and each rank runs the micro-batches of a step in the order of
its schedule (parallel/rules/schedules.py).
"""

import importlib.metadata
from collections.abc import Iterator
from typing import Final

from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig, Schedule
from windlass.parallel.rules.schedules import KINDS

TORCH_FOR_SPLITS: Final = (2, 13)
"""torch 2.11 runs no autograd function of our own (the head's) with a backward that is cut in two, and fails to set up zbv
on gloo; 2.12 was not tried."""

REFUSED: Final = {
    "prefetch": "the stages of a pipeline are gathered whole and stay gathered; nothing is left to gather ahead",
    "recompute": "what selective keeps can be used once, and this schedule walks each block twice in backward: torch raises",
    "compile": "a compiled block's backward is one piece, and this schedule cuts backward in two: it trains something else",
}


def pipeline_errors(parallel: ParallelConfig) -> Iterator[UserError]:
    """Settings that have no effect, or are not shown to be exact, beside a pipeline."""
    num_ranks, schedule, zero = parallel.pp, parallel.schedule, parallel.zero_stage
    if num_ranks == 1:
        if schedule != "1f1b":
            yield UserError(
                f"parallel.schedule={schedule} with parallel.pp=1",
                "a schedule orders the micro-batches of a pipeline, and here there is none",
                "remove parallel.schedule, or use parallel.pp=2 or more",
            )
        return
    if zero == 3:
        yield UserError(
            f"parallel.zero=3 with parallel.pp={num_ranks}",
            "a pipeline keeps its stages' parameters gathered through the step: shard can cut the optimizer's states (zero 1), "
            "and gradients too (zero 2)",
            "use parallel.zero=1 or 2, or parallel.zero=0 with parallel.replicate",
        )
    splits = KINDS[schedule].splits
    beside = {  # settings as a recipe has them -> whether this one has them
        f"prefetch={parallel.prefetch}": parallel.prefetch > 0,
        "compile=true": parallel.compiles and splits,
        "recompute=selective": parallel.recomputes == "selective" and splits,
    }
    for setting in (setting for setting, is_set in beside.items() if is_set):
        yield UserError(
            f"parallel.{setting} with parallel.pp={num_ranks} and parallel.schedule={schedule}",
            REFUSED[setting.partition("=")[0]],
            f"remove parallel.{setting.partition('=')[0]}, or use parallel.pp=1"
            + (", or parallel.schedule=1f1b" if setting.startswith(("compile", "recompute")) else ""),
        )


def schedule_errors(schedule: Schedule, num_ranks: int) -> Iterator[UserError]:
    """Where the installed torch cannot run the schedule."""
    version = importlib.metadata.version("torch")
    if num_ranks == 1 or not KINDS[schedule].splits:
        return
    if tuple(map(int, version.split(".")[:2])) < TORCH_FOR_SPLITS:
        yield UserError(
            f"parallel.schedule={schedule} with torch {version}",
            "a backward that is cut in two needs torch 2.13: before, it fails at the head's own gradient",
            "install torch 2.13, or use parallel.schedule=1f1b",
        )


def empty_stage_errors(schedule: Schedule, num_ranks: int, num_blocks: int) -> Iterator[UserError]:
    """A pipeline with a stage that would have no block."""
    per_rank = KINDS[schedule].stages_per_rank
    num_stages = num_ranks * per_rank
    if num_ranks == 1 or num_blocks >= num_stages:
        return
    most = num_blocks // per_rank
    remedy = f"use parallel.pp={most}{' or less' * (most > 1)}"
    if per_rank > 1 and num_blocks >= num_ranks:
        remedy = f"use parallel.schedule=1f1b, which has one stage per rank, or{remedy.removeprefix('use')}"
    yield UserError(
        f"parallel.pp={num_ranks} with parallel.schedule={schedule} for a model of {num_blocks} blocks",
        f"every stage holds at least one block, and there are {num_stages} stages, {per_rank} per rank",
        remedy,
    )


def micro_batch_errors(
    schedule: Schedule, num_ranks: int, num_micro: int, tokens_per_micro: int, micro: int, per_sample: int = 1
) -> Iterator[UserError]:
    """Where the schedule cannot run `num_micro` micro-batches per step. `tokens_per_micro`: of one micro-batch over all ranks of
    the batch axes; `micro`: run.micro_batch, a multiple of `per_sample`."""
    if schedule_fits(schedule, num_ranks, num_micro):
        return
    if schedule == "1f1b":
        rule = f"1f1b needs at least as many micro-batches as ranks in the pipeline, {num_ranks}"
    else:
        rule = f"{schedule} runs micro-batches in rounds of as many as there are ranks in the pipeline, {num_ranks}"
    whole = -(-num_micro // num_ranks) * num_ranks
    remedy = f"use run.tokens_per_step={whole * tokens_per_micro}"
    sequences = num_micro * micro  # of one rank
    smaller = [m for m in range(micro - per_sample, 0, -per_sample) if sequences % m == 0]
    fitting = [m for m in smaller if schedule_fits(schedule, num_ranks, sequences // m)]
    if fitting:
        remedy += f"; or, keeping it, run.micro_batch={fitting[0]}"
    yield UserError(
        f"{num_micro} micro-batch{'es' * (num_micro != 1)} per step with parallel.pp={num_ranks} and "
        f"parallel.schedule={schedule}",
        rule,
        f"{remedy}; or parallel.schedule=gpipe, which takes any number",
    )


def schedule_fits(schedule: Schedule, num_ranks: int, num_micro: int) -> bool:
    """Whether the schedule can run `num_micro` micro-batches per step."""
    if num_ranks == 1 or schedule in ("gpipe", "zbv"):
        return True
    return num_micro >= num_ranks if schedule == "1f1b" else num_micro % num_ranks == 0
