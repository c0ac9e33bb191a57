"""Step lines of events.jsonl, many at a time, as arrays: one per quantity that the page draws.

A line has about 26 numbers; Python's json takes 13 s for a million lines, pyarrow's reader a third of that. pyarrow is strict
(one type per field, no NaN), so lines that it refuses are parsed again by Python, which also names the bad line. It takes 0.3 s
to load (with pandas, where that is installed), so a few lines are Python's too.

A number that was not finite is a gap; so is the throughput of warm-up windows, which measure compilation.
"""

import io
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from windlass.report.events import Event

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

AXES: Final = ("step", "time", "tokens")
DRAWN: Final = (
    "loss", "router_loss", "gradient_norm", "learning_rate", "tokens_per_s", "tokens_per_s_per_gpu", "mfu",
    "memory_bytes", "reward_chosen", "reward_rejected", "margin", "accuracy", "pairs",
)  # fmt: skip
GROUPS: Final = ("source_losses", "expert_shares", "memory_parts")
"""Fields that hold a number per name: each becomes a quantity `group.name`."""
READ: Final = (*AXES, *DRAWN, "data_wait_s", "step_s")
STEADY: Final = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu")  # not drawn in warm-up
MAX_NAMES: Final = 32  # of a group: more are no chart
_LEDGER: Final = re.compile(rb', "ledger": \{[^{}]*\}')
FEW: Final = 2000  # lines that Python has parsed before pyarrow is there


@dataclass(frozen=True)
class Columns:
    """n step lines, in the order written. Quantities without a number in any line are left out; NaN where one line has none."""

    step: Floats
    time: Floats
    """Unix seconds."""
    tokens: Floats
    """NaN where the writer counts none."""
    values: dict[str, Floats]
    gaps: dict[str, Flags]
    """Where a quantity was measured and was not finite, or belongs to warm-up."""

    def take(self, keep: Flags) -> "Columns":
        return Columns(
            self.step[keep],
            self.time[keep],
            self.tokens[keep],
            {name: column[keep] for name, column in self.values.items()},
            {name: column[keep] for name, column in self.gaps.items()},
        )


def read_columns(lines: Sequence[bytes], parse: Callable[[bytes, int], Event], few: int = FEW) -> Columns:
    """`lines`: whole step lines. `parse`: (line, its index) -> the event, or an error that names the line.
    `few`: pyarrow is not loaded for this many lines or fewer."""
    table = _read_table(lines) if len(lines) > few else None
    raw = {} if table is None else {name: _floats(table.column(name)) for name in READ}
    if table is None or table.num_rows != len(lines) or np.isnan(raw["step"]).any() or np.isnan(raw["time"]).any():
        return step_columns([parse(line, index) for index, line in enumerate(lines)])
    for group in set(GROUPS) & set(table.column_names):
        if _is_struct(table.column(group).type):
            parts = table.column(group).combine_chunks()
            raw |= {f"{group}.{name}": _floats(parts.field(name)) for name in _numbers_of(parts.type)}
    loads = table.column("expert_loads")
    if loads.null_count < len(lines):
        raw |= _loads(loads.to_pylist())
    return _derive(raw, _flags(table.column("warm_up")), _non_finite(table))


def _read_table(lines: Sequence[bytes]) -> Any:
    """Arrow's table of them; None where it refuses one."""
    import pyarrow as pa
    import pyarrow.json

    text = _LEDGER.sub(b"", b"\n".join(lines))  # a third of a line, and not drawn
    others = "infer" if any(name.encode() in text for name in (*GROUPS, "non_finite")) else "ignore"
    numbers = [(name, pa.float64()) for name in READ]
    schema = pa.schema([*numbers, ("warm_up", pa.bool_()), ("expert_loads", pa.list_(pa.float64()))])
    try:
        return pa.json.read_json(
            io.BytesIO(text + b"\n"),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(text) + 2),
            parse_options=pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others),
        )
    except pa.ArrowInvalid:
        return None


def step_columns(events: Sequence[Event]) -> Columns:
    """The columns of step lines that are parsed already."""
    raw = {name: np.array([_number(event.get(name)) for event in events]) for name in READ}
    for group in GROUPS:
        held = [value if isinstance(value := event.get(group), Mapping) else {} for event in events]
        for name in sorted({str(name) for value in held for name in value})[:MAX_NAMES]:
            raw[f"{group}.{name}"] = np.array([_number(value.get(name)) for value in held])
    if any(event.get("expert_loads") for event in events):
        raw |= _loads([event.get("expert_loads") for event in events])
    named = [event.get("non_finite") or {} for event in events]
    lost = {name: np.array([name in one for one in named]) for name in sorted({name for one in named for name in one})}
    for name, column in raw.items():  # another writer's NaN
        bad = np.array([isinstance(value := event.get(name), float) and not np.isfinite(value) for event in events])
        if bad.any():
            lost[name] = lost.get(name, np.zeros(len(events), bool)) | bad
            column[bad] = np.nan
    return _derive(raw, np.array([bool(event.get("warm_up")) for event in events]), lost)


def _derive(raw: dict[str, Floats], warm_up: Flags, lost: Mapping[str, Flags]) -> Columns:
    """Shares and steady figures from what the lines hold; empty quantities go."""
    step, time, tokens = (raw.pop(name) for name in AXES)
    wait_s, step_s = raw.pop("data_wait_s"), raw.pop("step_s")
    with np.errstate(divide="ignore", invalid="ignore"):
        raw["wait_share"] = np.where(step_s > 0, wait_s / step_s, np.nan)
    gaps = {name: flags for name, flags in lost.items() if name in raw and flags.any()}
    if warm_up.any():
        for name in STEADY:
            if np.isfinite(raw[name]).any():
                raw[name] = np.where(warm_up, np.nan, raw[name])
                gaps[name] = gaps.get(name, np.zeros(len(step), bool)) | warm_up
    values = {name: column for name, column in raw.items() if name in gaps or np.isfinite(column).any()}
    return Columns(step, time, tokens, values, gaps)


def _floats(column: Any) -> Floats:
    """An arrow column of numbers, NaN for null."""
    return np.array(column.cast("double").to_numpy(zero_copy_only=False), dtype=np.float64)


def _flags(column: Any) -> Flags:
    return np.asarray(column.fill_null(False).to_numpy(), dtype=bool)


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<")


def _numbers_of(struct: Any) -> list[str]:
    fields = [struct.field(index) for index in range(struct.num_fields)]
    return sorted(str(one.name) for one in fields if str(one.type) in ("double", "int64"))[:MAX_NAMES]


def _non_finite(table: Any) -> dict[str, Flags]:
    if "non_finite" not in table.column_names or not _is_struct(table.column("non_finite").type):
        return {}
    named = table.column("non_finite").combine_chunks()
    fields = [named.type.field(index).name for index in range(named.type.num_fields)]
    return {
        name: np.asarray(named.field(name).is_valid().to_numpy(zero_copy_only=False), dtype=bool) for name in fields
    }


def _loads(lists: Sequence[Any]) -> dict[str, Floats]:
    """How many tokens the busiest expert of a layer gets, over the mean of all: of the worst layer, and of the middle one."""
    held = [[_number(load) for load in loads] if isinstance(loads, list) else [] for loads in lists]
    return {
        "worst_load": np.array([max(loads, default=np.nan) for loads in held]),
        "median_load": np.array([statistics.median(loads) if loads else np.nan for loads in held]),
    }


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else np.nan
