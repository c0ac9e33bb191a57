"""What to change next in a run: each lever looks at what was observed and answers with its gain, or with None.

A gain is what the run's tokens per second become more, as a share of what they are. It is *measured* where the run's own times or
the counts of its data say it, *estimated* where the rates below do, which were not measured on the run's machine, and unknown
where neither can: then `windlass profile` measures what it would need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from windlass.advice.observed import Observed
from windlass.advice.traffic import Sent, traffic
from windlass.hardware import find_device
from windlass.parallel.config import ParallelConfig
from windlass.report.config import ReportConfig
from windlass.units import MIB, format_bytes


@dataclass(frozen=True)
class Lever:
    """`name`: what is slow. `gain`: 0.25 for a quarter more tokens per second."""

    name: str
    seen: str
    change: str
    gain: float | None
    source: Literal["measured", "estimated", "unknown"]


@dataclass(frozen=True)
class Rates:
    """The rates of one rank, which only estimates use."""

    flops: float
    link_bytes_s: float
    call_s: float
    operator_s: float
    full_tokens: int
    """Tokens of a micro-batch from which on matrix products reach their rate."""


# call_s, link: 25 us and 330 GB/s on NVLink, a fit to published NCCL figures (Megatron-LM PR 5596, NCCL issues); between hosts
# 400 Gb/s per GPU at half its rate. Half the peak for products. 5 us to launch an operator eagerly. CPU: round figures for gloo
# on one host and two threads of AVX2.
CPU: Final = Rates(flops=50e9, link_bytes_s=1e9, call_s=1e-4, operator_s=5e-6, full_tokens=64)
NVLINK_BYTES_S, NETWORK_BYTES_S, GPU_CALL_S, GPU_OPERATOR_S, GPU_TOKENS = 330e9, 25e9, 25e-6, 5e-6, 2048
UNKNOWN_PEAK: Final = 100e12  # of a GPU that hardware.py does not know: between T4 and A100

# Shares of a step from which a lever is named. Chosen: two runs on one machine differ by 3 to 10 % (docs/performance.md), so that
# less cannot be seen; the remedy for logging costs nothing.
LEAST_WAIT, LEAST_LOG, LEAST_FILLED, LEAST_SENT, LEAST_LAUNCH = 0.05, 0.005, 0.9, 0.1, 0.1
# Measured on two Zen 4 cores, a 2-block model of 64 channels: 0.9 by the rates at 64 tokens, where 4 times the rows brought 2.8
# times the tokens/s; 0.6 at 256 tokens, where they brought 1.4 times.
LEAST_CALLED: Final = 0.75
USUAL_EVERY: Final[int] = ReportConfig.model_fields["every_steps"].default
USUAL_BUCKET_MIB: Final[float] = ParallelConfig.model_fields["bucket_mib"].default
MOST_SHARE: Final = 0.95  # of a step that a lever may take away: a gain of twenty times, more than anybody believes
MOST_ESTIMATED: Final = 0.5  # the same of an estimate, which then says twice at most
PLENTY: Final = 0.5  # of a device's memory: less is in use, so that recomputing less is worth a try
MANY: Final = 4  # times as many micro-batches, rows or calls: a proposal, not the best
SMALL_MESSAGE: Final = MIB  # its bytes take 3 us on NVLink, an eighth of the call


def find_levers(run: Observed) -> list[Lever]:
    """The largest gain first; those whose gain is unknown come last."""
    found = [lever for look in LOOKS if (lever := look(run)) is not None]
    return sorted(found, key=lambda lever: (lever.gain is None, -(lever.gain or 0.0)))


def rates_of(run: Observed) -> Rates:
    if not run.on_gpu:
        return CPU
    device = find_device(run.facts.device)
    peak = device.peak_flops if device is not None else UNKNOWN_PEAK
    link = NVLINK_BYTES_S if run.facts.hosts == 1 else NETWORK_BYTES_S
    return Rates(0.5 * peak, link, GPU_CALL_S, GPU_OPERATOR_S, GPU_TOKENS)


def without(share: float) -> float:
    """The gain where `share` of a step falls away."""
    return 1 / (1 - min(share, MOST_SHARE)) - 1


def starved(run: Observed) -> Lever | None:
    share = run.wait_s / run.step_s
    if share < LEAST_WAIT:
        return None
    own = " The source is the script's own." if "source" in run.script else ""
    return Lever(
        "the loader is starved",
        f"a step waits {1e3 * run.wait_s:.3g} ms for its batch, {share:.0%} of it.{own}",
        "keep data.directory, or data.cache, on a local disk; do the work of a source of your own in `windlass prepare`",
        without(share),
        "measured",
    )


def logging(run: Observed) -> Lever | None:
    every, share = run.setting("report", "every_steps"), run.log_s / run.step_s
    if every >= USUAL_EVERY or share < LEAST_LOG:
        return None
    drained = "; on a GPU each line also drains the device's queue, which is not in it" if run.on_gpu else ""
    return Lever(
        "logging every step" if every == 1 else f"logging every {every} steps",
        f"making and writing lines takes {1e3 * run.log_s:.3g} ms of a step, {share:.1%}{drained}",
        f"report.every_steps={USUAL_EVERY}",
        without(share * (1 - every / USUAL_EVERY)),
        "measured",
    )


def host_reads(run: Observed) -> Lever | None:
    if not run.reads:
        return None
    check = run.setting("parallel", "check")
    who = "parallel.check compares ranks at every step" if check else "something reads numbers back inside the step"
    who += f" ({run.script})" if run.script else ""
    share = run.profile.idle_s / run.profile.step_s if run.profile is not None and run.on_gpu else None
    on_cpu = "" if run.on_gpu else "; on CPU a read waits for nothing and costs little"
    return Lever(
        "the host reads from the device",
        f"{run.reads} read{'s' * (run.reads > 1)} in a step that is not logged: {who}{on_cpu}",
        "parallel.check=false once the run is trusted" if check else "keep .item(), float() and `if tensor:` out of the step; "
        "return tensors, which are read on logging steps",
        None if share is None else without(share),
        "unknown" if share is None else "measured",
    )  # fmt: skip


def unequal_rows(run: Observed) -> Lever | None:
    filled = run.facts.filled
    if filled >= LEAST_FILLED:
        return None
    return Lever(
        "rows of unequal length",
        f"{1 - filled:.0%} of the positions of all rows are padding, which is multiplied like any token",
        "a shorter data.sequence_length, near the longest pair"
        if run.setting("objective", "kind") == "dpo"
        else "data.packing=concatenate, or a longer data.sequence_length, which best-fit fills better",
        1 / filled - 1,
        "measured",
    )


def sent(run: Observed) -> Sent:
    """Per step and rank, by formula."""
    return traffic(run.facts, run.setting("parallel", "zero"))


def small_messages(run: Observed) -> Lever | None:
    now = sent(run)
    if run.setting("parallel", "zero") == 0:
        better, change = Sent(run.facts.usual_buckets, now.bytes), f"parallel.bucket_mib={USUAL_BUCKET_MIB:g}"
    else:
        blocks = run.facts.units - run.facts.end_units
        per_unit = max(1, min(blocks, round(SMALL_MESSAGE / max(1.0, now.bytes / max(1, now.calls)))))
        calls = now.calls * (-(-blocks // per_unit) + run.facts.end_units) // run.facts.units
        better, change = Sent(calls, now.bytes), f"parallel.blocks_per_unit={per_unit}"
    if now.calls < MANY * max(1, better.calls) or now.bytes / now.calls >= SMALL_MESSAGE:
        return None
    return Lever(
        "tiny buckets",
        f"{now.calls:,} collectives a step of {format_bytes(now.bytes / now.calls)} each on average",
        f"{change}: {better.calls:,} collective{'s' * (better.calls != 1)} for the same bytes",
        without((now.calls - better.calls) * rates_of(run).call_s / run.step_s),
        "estimated",
    )


def no_accumulation(run: Observed) -> Lever | None:
    now, rates, facts = sent(run), rates_of(run), run.facts
    flops = run.setting("run", "tokens_per_step") / facts.ranks * (facts.flops_per_token + facts.recomputed_flops)
    sending, computing = now.bytes / rates.link_bytes_s, flops / rates.flops
    share = sending / (sending + computing)
    source: Literal["measured", "estimated"] = "estimated"
    if run.profile is not None:
        share, source = (run.profile.communicating_s - run.profile.hidden_s) / run.profile.step_s, "measured"
    if facts.ranks == 1 or share < LEAST_SENT:
        return None
    zero, again = run.setting("parallel", "zero"), facts.accumulation
    if zero >= 2 and again > 1:
        change, left = "parallel.zero=1, or a larger run.micro_batch: each micro-batch sends all of it", 1 / again
    else:
        change = (
            f"run.tokens_per_step={MANY} times as large: gradients are summed over {MANY} micro-batches and sent once. "
            "It changes the maths: a larger global batch wants another learning rate"
        )
        left = 1 / MANY
    return Lever(
        "no accumulation" if again == 1 else "communication is not hidden",
        f"a rank sends {format_bytes(now.bytes)} in {now.calls:,} call{'s' * (now.calls != 1)} for "
        f"{flops / max(1.0, now.bytes):,.0f} FLOPs a byte, "
        f"{share:.0%} of its time",
        change,
        without(share * (1 - left)),
        source,
    )


def tiny_micro_batch(run: Observed) -> Lever | None:
    rates, tokens, num_micro_batches = rates_of(run), run.tokens_per_micro_batch, run.facts.accumulation
    if num_micro_batches == 1 or tokens >= rates.full_tokens:
        return None
    factor = min(num_micro_batches, -(-rates.full_tokens // tokens))
    launch_share = None if run.operators is None else run.operators * rates.operator_s * (1 - 1 / factor) / run.step_s
    if launch_share is not None and launch_share < LEAST_LAUNCH and run.on_gpu:
        return None
    counted = "" if run.operators is None else f" and {run.operators:,} operators"
    return Lever(
        "tiny micro-batches",
        f"a step is {num_micro_batches} micro-batches of {tokens} tokens{counted}: too few rows for the matrix products",
        f"run.micro_batch={run.setting('run', 'micro_batch') * factor}: the same result in fewer, larger products"
        + _room(run),
        None if launch_share is None else without(min(launch_share, MOST_ESTIMATED)),
        "unknown" if launch_share is None else "estimated",
    )


def tiny_step(run: Observed) -> Lever | None:
    """An operator that takes little longer than calling it does next to nothing."""
    rates, again, rows = rates_of(run), run.facts.accumulation, run.setting("run", "micro_batch")
    if run.operators is None or tiny_micro_batch(run) is not None:
        return None
    operator_s = (run.step_s - run.wait_s - run.log_s) / run.operators
    share = min(1.0, rates.operator_s / operator_s) if operator_s > 0 else 1.0
    if share < LEAST_CALLED:
        return None
    factor = MANY if again == 1 else min(again, MANY)
    change = f"run.micro_batch={rows * factor}"
    if again == 1:
        tokens = run.setting("run", "tokens_per_step") * factor
        change += f" with run.tokens_per_step={tokens}. It changes the maths: a larger global batch wants another learning rate"
    else:
        change += f": the same result in fewer operators{_room(run)}"
    return Lever(
        "tiny steps",
        f"{run.operators:,} operators in a step of {again} x {run.tokens_per_micro_batch} tokens take {1e6 * operator_s:.2g} us "
        f"each, of which calling one is about {1e6 * rates.operator_s:.0f}: more rows would cost little",
        change,
        without(min(share * (1 - 1 / factor), MOST_ESTIMATED)),
        "estimated",
    )


def recomputing(run: Observed) -> Lever | None:
    device, facts = find_device(run.facts.device), run.facts
    has_room = device is None or run.memory_bytes < PLENTY * device.memory_bytes
    if not facts.recomputed_flops or not run.on_gpu or not has_room:
        return None
    return Lever(
        "blocks are computed twice",
        f"recompute: full does {facts.recomputed_flops / facts.flops_per_token:.0%} more than the maths needs{_room(run)}",
        "parallel.recompute=selective, or none with parallel.activation_gib as a bound",
        facts.recomputed_flops / facts.flops_per_token,
        "estimated",
    )


def eager(run: Observed) -> Lever | None:
    if not run.on_gpu or run.setting("parallel", "compile"):
        return None
    seen = "nothing is compiled: each elementwise operator reads and writes its tensors"
    return Lever("operators one by one", seen, "parallel.compile=true", None, "unknown")


def full_precision(run: Observed) -> Lever | None:
    device = find_device(run.facts.device)
    if device is None or run.facts.gathered_bytes < 4:
        return None
    return Lever(
        "products in fp32",
        f"{device.name} multiplies {device.peak_dtype} many times as fast",
        f"precision.policy={device.peak_dtype}",
        None,
        "unknown",
    )


def _room(run: Observed) -> str:
    device = find_device(run.facts.device)
    if device is None:
        return ""
    return f"; {format_bytes(run.memory_bytes)} of {format_bytes(device.memory_bytes)} are in use at the peak"


LOOKS: Final[tuple[Callable[[Observed], Lever | None], ...]] = (
    starved, logging, host_reads, unequal_rows, small_messages, no_accumulation, tiny_micro_batch, tiny_step, recomputing,
    eager, full_precision,
)  # fmt: skip
