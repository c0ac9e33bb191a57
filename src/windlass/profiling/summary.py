"""Where a step's time goes, from the trace of a few steps: `summarize`.

    step = computing + communication that nothing hides + idle

On a GPU its kernels are counted, on CPU the operators, each without those that it calls. A collective is *hidden* while
something is computed. On CPU a collective lasts from when its thread takes it up until the last rank has come, so waiting for
others is in it; on a GPU its kernel waits in the same way.
"""

import contextlib
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from windlass.errors import UserError
from windlass.profiling.intervals import Spans, clipped, common, length, union

MAX_OPERATORS: Final = 15
SUMMARY: Final = "summary.json"
PROFILES: Final = "profiles"
"""The folder of a run directory."""
COPIES: Final = (
    r"copy|memcpy|memset|::(cat|fill_|zero_|clone|to|contiguous)\b|CatArray|FillFunctor|_to_copy|split_with_sizes"
)
ELEMENTWISE: Final = (
    r"elementwise|reduce_kernel|vectorized|norm|::(\w*mul|\w*div|add|sub|rsub|pow|mean|sum|neg|sqrt|rsqrt|silu|gelu|sigmoid|tanh"
    r"|exp|log|cos|sin|max|min|eq|ne|lt|gt|le|ge|abs|clamp|\w*_backward)_?\b"
)
KINDS: Final = {
    "communication": r"nccl|gloo:|c10d|all_gather|allgather|reduce_scatter|all_?reduce|all_?to_?all|record_param_comms",
    "attention": r"flash|fmha|attention|sdpa|flex_",
    "matrix products": r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|wgmma|_mm\b|::(mm|addmm|bmm|baddbmm|linear|mv|dot)\b",
    "optimizer": r"foreach|multi_tensor|adam|::(lerp_|addcdiv_?|addcmul_?)\b",
    "softmax and loss": r"soft_?max|nll_loss|cross_entropy|logsumexp",
    "copies and casts": COPIES,
    "embedding and indexing": r"embedding|index|gather|scatter|::(where|masked_fill_?)\b|sort",
    "compiled": r"triton|compiled|inductor|cpp_fused",
    "elementwise and reductions": ELEMENTWISE,
}
"""Kind -> what the names of its operators and kernels look like; the first that fits. The rest is "other"."""
_PATTERNS: Final = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS.items()]
_KERNELS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_COLLECTIVES: Final = (
    ("all-gather", r"all_?gather"), ("reduce-scatter", r"reduce_?scatter"), ("all-reduce", r"all_?reduce"),
    ("all-to-all", r"all_?to_?all"), ("broadcast", r"broadcast"), ("send/receive", r"send|recv"), ("barrier", r"barrier"),
)  # fmt: skip
_BYTES: Final = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "double": 8, "long": 8, "int64": 8, "bfloat16": 2, "half": 2, "float16": 2,
    "short": 2, "bool": 1, "byte": 1, "char": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


OwnTime = tuple[dict[str, Any], float, float]
"""An operator or a kernel, begin and end in microseconds."""


@dataclass(frozen=True)
class OperatorTime:
    """A kind of operators, or one operator. Per step: seconds and calls."""

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis of the layout. Per step; `bytes`: what this rank hands in, or takes out where that
    is more."""

    axis: str
    kind: str
    calls: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Summary:
    """Where the time of one rank goes, in seconds per step. `step_s` is from the begin of a step to that of the next."""

    rank: int
    first_step: int
    last_step: int
    device: str
    step_s: float
    computing_s: float
    communicating_s: float
    hidden_s: float
    """The part of communicating_s in which something was computed."""
    idle_s: float
    """Neither: the host prepares, waits for data, or reads."""
    kinds: tuple[OperatorTime, ...]
    operators: tuple[OperatorTime, ...]
    """The MAX_OPERATORS that took longest."""
    traffic: tuple[Traffic, ...]

    @classmethod
    def read(cls, directory: Path) -> "Summary":
        """Raises OSError, ValueError, TypeError or KeyError for what `write` has not written."""
        found = json.loads((directory / SUMMARY).read_text("utf-8"))
        rows = {name: tuple(OperatorTime(**row) for row in found[name]) for name in ("kinds", "operators")}
        return cls(**{**found, **rows, "traffic": tuple(Traffic(**row) for row in found["traffic"])})

    def write(self, directory: Path) -> None:
        """Raises OSError."""
        draft = directory / f"{SUMMARY}.draft"
        draft.write_text(json.dumps(asdict(self), indent=1), "utf-8")
        draft.replace(directory / SUMMARY)


def operator_kind(name: str) -> str:
    """The kind that an operator or a kernel belongs to, by its name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def summarize(directory: Path) -> Summary:
    """The summary of what a StepRecorder has written. Raises UserError where a file is missing or damaged."""
    try:
        facts = json.loads((directory / "facts.json").read_text("utf-8"))
        collectives = json.loads((directory / "collectives.json").read_text("utf-8"))
        with gzip.open(directory / "trace.json.gz", "rt", encoding="utf-8", errors="replace") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
        steps = [event for event in events if event["name"].startswith("step ") and event["cat"] == "user_annotation"]
        return _summary(facts, events, _spans(steps), collectives)
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{directory} holds no complete profile: {type(error).__name__}: {error}",
            "a profile is trace.json.gz, collectives.json and facts.json, as `windlass profile` writes them",
            "delete the directory, and ask again: `windlass profile RUN`",
        ) from None


def _summary(
    facts: Mapping[str, Any], events: Sequence[dict[str, Any]], steps: Spans, collectives: Sequence[dict[str, Any]]
) -> Summary:
    begin, end, num = float(steps[:, 0].min()), float(steps[:, 1].max()), len(steps)
    kernels = [event for event in events if event.get("cat") in _KERNELS]
    if kernels:
        sent = [event for event in kernels if operator_kind(event["name"]) == "communication"]
        computed = [event for event in kernels if operator_kind(event["name"]) != "communication"]
        spans = [(event, event["ts"], event["ts"] + event["dur"]) for event in computed]
        traffic = [_of_kernel(event, facts["axes"]) for event in sent]
    else:
        sent = sorted((event for event in events if event["name"].startswith("gloo:")), key=lambda event: event["ts"])
        computed = [event for event in events if event.get("cat") == "cpu_op" and _computes(event["name"])]
        computed = [event for event in computed if operator_kind(event["name"]) != "communication"]
        spans = _own_times(computed)
        traffic = _of_gloo(sent, collectives, facts["axes"])
    busy = np.array([span[1:] for span in spans], dtype=np.float64).reshape(-1, 2)
    computing, communicating = (union(clipped(spans, begin, end)) for spans in (busy, _spans(sent)))
    hidden = common(computing, communicating)
    idle = end - begin - length(computing) - length(communicating) + hidden
    per_step = 1e-6 / num
    return Summary(
        rank=facts["rank"],
        first_step=facts["first_step"],
        last_step=facts["last_step"],
        device=facts["device"],
        step_s=(end - begin) * per_step,
        computing_s=length(computing) * per_step,
        communicating_s=length(communicating) * per_step,
        hidden_s=hidden * per_step,
        idle_s=idle * per_step,
        kinds=_rows(spans, operator_kind, num),
        operators=_rows(spans, str, num)[:MAX_OPERATORS],
        traffic=_traffic_rows(traffic, num),
    )


def _spans(events: Iterable[Mapping[str, Any]]) -> Spans:
    return np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], dtype=np.float64).reshape(-1, 2)


def _own_times(calls: Iterable[dict[str, Any]]) -> list[OwnTime]:
    """When operators did something themselves: without what the operators that they call did. Every operator has its last span,
    be it empty."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in sorted(calls, key=lambda event: (event["ts"], -event["dur"])):
        threads[event["tid"]].append(event)
    return [span for events in threads.values() for span in _own_times_of_thread(events)]


def _own_times_of_thread(events: Sequence[dict[str, Any]]) -> Iterator[OwnTime]:
    stack: list[dict[str, Any]] = []
    at = 0.0
    for event in [*events, None]:
        now = event["ts"] if event is not None else float("inf")
        while stack and (end := stack[-1]["ts"] + stack[-1]["dur"]) <= now:
            yield stack.pop(), at, max(at, end)
            at = max(at, end)
        if event is None:
            return
        if stack:
            yield stack[-1], at, now
        stack.append(event)
        at = now


def _computes(name: str) -> bool:
    """Whether it is an operator; the nodes of autograd around them wait for collectives, too."""
    return ("::" in name and not name.startswith("autograd::")) or operator_kind(name) == "compiled"


def newest(run_directory: Path) -> Summary | None:
    """The summary that was written last of a run's profiles; None where there is none."""
    files = sorted((run_directory / PROFILES).glob(f"*/{SUMMARY}"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return Summary.read(file.parent)
    return None


def _collective(name: str) -> str:
    return next((kind for kind, pattern in _COLLECTIVES if re.search(pattern, name, re.IGNORECASE)), name)


def _of_kernel(event: Mapping[str, Any], axes: Mapping[str, str]) -> tuple[str, str, float, float]:
    """(axis, kind, bytes, microseconds) of a kernel of NCCL; torch has written into it what was sent. Bytes of a kernel that does
    not say are 0."""
    facts = event["args"]
    group = str(facts.get("Process Group Name", ""))
    axis = axes.get(group) or str(facts.get("Process Group Description", "")) or "unknown"
    most = max(facts.get("In msg nelems", 0), facts.get("Out msg nelems", 0))
    size = most * _BYTES.get(str(facts.get("dtype", "")).lower(), 0)
    return axis, _collective(str(facts.get("Collective name", event["name"]))), size, event["dur"]


def _of_gloo(
    sent: Sequence[Mapping[str, Any]], collectives: Sequence[Mapping[str, Any]], axes: Mapping[str, str]
) -> list[tuple[str, str, float, float]]:
    """(axis, kind, bytes, microseconds) of gloo's collectives: the flight recorder knows group and sizes, the trace how long
    each took; both have a name and a shape, and those that are alike come in the same order."""
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in sent:
        shapes = [dims for dims in event["args"].get("Input Dims", []) if dims]
        durations[event["name"], str(shapes)].append(event["dur"])
    found = []
    for entry in collectives:
        name, group = entry["profiling_name"], entry["process_group"][0]
        waiting = durations[name, str([dims for dims in entry["input_sizes"] if dims])]
        size = max(_bytes(entry, "input"), _bytes(entry, "output"))
        found.append((axes.get(group, "other groups"), _collective(name), size, waiting.pop(0) if waiting else 0.0))
    return found


def _bytes(entry: Mapping[str, Any], side: str) -> float:
    sizes, types = entry[f"{side}_sizes"], entry[f"{side}_dtypes"]
    return float(sum(np.prod(size, dtype=float) * _BYTES.get(str(kind).lower(), 0) for size, kind in zip(sizes, types)))


def _rows(spans: Iterable[OwnTime], name_of: Callable[[str], str], num_steps: int) -> tuple[OperatorTime, ...]:
    """A row per name, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, set[int]] = defaultdict(set)
    for event, begin, end in spans:
        name = name_of(event["name"])
        seconds[name] += (end - begin) * 1e-6
        calls[name].add(id(event))
    rows = [OperatorTime(name, seconds[name] / num_steps, len(calls[name]) / num_steps) for name in seconds]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _traffic_rows(found: Iterable[tuple[str, str, float, float]], num_steps: int) -> tuple[Traffic, ...]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for axis, kind, size, took in found:
        row = sums[axis, kind]
        row[0], row[1], row[2] = row[0] + 1, row[1] + size, row[2] + took
    rows = [
        Traffic(axis, kind, calls / num_steps, size / num_steps, took * 1e-6 / num_steps)
        for (axis, kind), (calls, size, took) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))
