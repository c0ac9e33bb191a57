"""The orders in which a pipeline's ranks run their micro-batches: what each needs, and where its stages lie. No torch.

P ranks (parallel.pp), M micro-batches per step, F a forward and B a backward of one stage:

    gpipe                     all M forwards, then all M backwards; M micro-batches' activations are kept
    1f1b                      after a warm-up of at most P forwards, one backward per forward; at most P are kept
    interleaved-1f1b          two stages per rank, P apart: the warm-up passes in half the time, twice the messages
    interleaved-zero-bubble   the same, and B is cut in two: the gradient of the input at once, that of the weights later,
                              where the rank would wait
    zbv                       two stages per rank in a V (rank 0 has the first and the last), B cut in two as well

    idle share of a rank, where all stages take the same time and B = 2 F: gpipe and 1f1b (P-1)/(M+P-1), interleaved-1f1b
    (P-1)/(2M+P-1), the other two (P-1)/(6M+P-1) (tests/parallel/test_schedules finds these in what was executed)

Sources: GPipe, Huang et al., arXiv 1811.06965; 1F1B, Narayanan et al., arXiv 1806.03377; interleaved, arXiv 2104.04473;
zero bubble and ZB-V, Qi et al., arXiv 2401.10241. The schedules themselves are torch.distributed.pipelining's.
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from windlass.errors import UserError

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


@dataclass(frozen=True)
class ScheduleKind:
    """`stages_per_rank`; `splits`: whether backward is cut in two; `torch`: the class in torch.distributed.pipelining."""

    stages_per_rank: int
    splits: bool
    torch: str


KINDS: Final[dict[Schedule, ScheduleKind]] = {
    "gpipe": ScheduleKind(1, False, "ScheduleGPipe"),
    "1f1b": ScheduleKind(1, False, "Schedule1F1B"),
    "interleaved-1f1b": ScheduleKind(2, False, "ScheduleInterleaved1F1B"),
    "interleaved-zero-bubble": ScheduleKind(2, True, "ScheduleInterleavedZeroBubble"),
    "zbv": ScheduleKind(2, True, "ScheduleZBVZeroBubble"),
}
TORCH_FOR_SPLITS: Final = (2, 13)
"""torch 2.11 runs no autograd function of our own (the head's) with a backward that is cut in two, and fails to set up zbv
on gloo; 2.12 was not tried."""

REFUSED: Final = {
    "offload": "a pipeline with parameters in host memory is not shown to be exact",
    "prefetch": "the stages of a pipeline are gathered whole and stay gathered; nothing is left to gather ahead",
    "activation_gib": "how many micro-batches' activations a stage keeps depends on the schedule, and the budget counts one",
    "recompute": "what selective keeps can be used once, and this schedule walks each block twice in backward",
    "compile": "a compiled block's backward is one piece, and this schedule cuts backward in two",
}


def owners(schedule: Schedule, num_ranks: int) -> tuple[int, ...]:
    """Stage -> the pipeline rank that holds it."""
    down = tuple(range(num_ranks))
    if KINDS[schedule].stages_per_rank == 1:
        return down
    return down + down[::-1] if schedule == "zbv" else down + down


def check_pipeline(num_ranks: int, schedule: Schedule, zero: int, beside: Mapping[str, bool]) -> None:
    """Settings that have no effect, or are not shown to be exact, beside a pipeline. `beside`: settings of `parallel` -> whether
    the recipe has them. Raises UserError."""
    if num_ranks == 1:
        if schedule != "1f1b":
            raise UserError(
                f"parallel.schedule={schedule} with parallel.pp=1",
                "a schedule orders the micro-batches of a pipeline, and here there is none",
                "remove parallel.schedule, or use parallel.pp=2 or more",
            )
        return
    if zero in (2, 3):
        raise UserError(
            f"parallel.zero={zero} with parallel.pp={num_ranks}",
            "a pipeline keeps its stages' parameters gathered through the step and sums gradients whole over the micro-batches: "
            "what shard cuts then are the optimizer's states (zero 1)",
            "use parallel.zero=1, or parallel.zero=0 with parallel.replicate",
        )
    for setting in (setting for setting, is_set in beside.items() if is_set):
        raise UserError(
            f"parallel.{setting} with parallel.pp={num_ranks} and parallel.schedule={schedule}",
            REFUSED[setting.partition("=")[0]],
            f"remove parallel.{setting.partition('=')[0]}, or use parallel.pp=1"
            + (", or parallel.schedule=1f1b" if setting.startswith(("compile", "recompute")) else ""),
        )


def check_surroundings_of_pipeline(num_ranks: int, schedule: Schedule, zero: int, policy: str) -> None:
    """What other sections of the recipe ask for that is not shown to be exact in a pipeline. Raises UserError."""
    if num_ranks > 1 and KINDS[schedule].splits and zero != 0 and policy in ("bf16", "fp16", "bf16-pure"):
        raise UserError(
            f"parallel.schedule={schedule} with parallel.zero={zero} and precision.policy={policy}",
            f"a backward that is cut in two adds up the gradients of FSDP's gathered weights over the micro-batches in {policy}: "
            "digits are lost with every one",
            "use parallel.zero=0, or parallel.schedule=interleaved-1f1b",
        )


def check_torch(schedule: Schedule, num_ranks: int) -> None:
    """Raises UserError where the installed torch cannot run the schedule."""
    version = importlib.metadata.version("torch")
    if num_ranks == 1 or not KINDS[schedule].splits:
        return
    if tuple(map(int, version.split(".")[:2])) < TORCH_FOR_SPLITS:
        raise UserError(
            f"parallel.schedule={schedule} with torch {version}",
            "a backward that is cut in two needs torch 2.13: before, it fails at the head's own gradient",
            "install torch 2.13, or use parallel.schedule=1f1b",
        )


def check_stages(schedule: Schedule, num_ranks: int, num_blocks: int) -> None:
    """Raises UserError where a stage would have no block."""
    num_stages = len(owners(schedule, num_ranks))
    if num_ranks == 1 or num_blocks >= num_stages:
        return
    per_rank = KINDS[schedule].stages_per_rank
    most = num_blocks // per_rank
    remedy = f"use parallel.pp={most}{' or less' * (most > 1)}"
    if per_rank > 1 and num_blocks >= num_ranks:
        remedy = f"use parallel.schedule=1f1b, which has one stage per rank, or{remedy.removeprefix('use')}"
    raise UserError(
        f"parallel.pp={num_ranks} with parallel.schedule={schedule} for a model of {num_blocks} blocks",
        f"every stage holds at least one block, and there are {num_stages} stages, {per_rank} per rank",
        remedy,
    )


def check_micro_batches(schedule: Schedule, num_ranks: int, num_micro: int, tokens_per_micro: int, micro: int) -> None:
    """Raises UserError where `num_micro` micro-batches per step do not fit the schedule. `tokens_per_micro`: of one
    micro-batch over all ranks of the batch axes; `micro`: run.micro_batch."""
    if num_ranks == 1 or schedule in ("gpipe", "zbv"):
        return
    if schedule == "1f1b":
        if num_micro >= num_ranks:
            return
        rule = f"1f1b needs at least as many micro-batches as ranks in the pipeline, {num_ranks}"
    else:
        if num_micro % num_ranks == 0:
            return
        rule = f"{schedule} runs micro-batches in rounds of as many as there are ranks in the pipeline, {num_ranks}"
    whole = -(-num_micro // num_ranks) * num_ranks
    remedy = f"use run.tokens_per_step={whole * tokens_per_micro}"
    sequences = num_micro * micro  # of one rank
    smaller = [m for m in range(micro - 1, 0, -1) if sequences % m == 0]
    fitting = [m for m in smaller if _fits(schedule, num_ranks, sequences // m)]
    if fitting:
        remedy += f"; or, keeping it, run.micro_batch={fitting[0]}"
    raise UserError(
        f"{num_micro} micro-batch{'es' * (num_micro != 1)} per step with parallel.pp={num_ranks} and "
        f"parallel.schedule={schedule}",
        rule,
        f"{remedy}; or parallel.schedule=gpipe, which takes any number",
    )


def _fits(schedule: Schedule, num_ranks: int, num_micro: int) -> bool:
    return num_micro >= num_ranks if schedule == "1f1b" else num_micro % num_ranks == 0
