"""What a recipe of another tool says, in terms common to all of them; and its keys, taken one by one. No torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import UserError


@dataclass(frozen=True)
class RowBorders:
    """How rows share a sequence. `said`: what the tool does, and by which key; `isolate`, `packing`: ours of `data`, the second
    for texts alone."""

    said: str
    isolate: bool
    packing: str = "best-fit"


@dataclass
class Facts:
    """`settings`: their key and value, with settings of ours as overrides. `rest`: keys that rows may answer. `left`: what this
    version has not, with reasons. `silent`: keys with nothing to set here. `warmup_ratio`: of all steps, at most `warmup_limit`
    steps. `floor`: of the learning rate, as a share of its peak. `validation`: a share; `validation_rows`: a set of its own;
    `no_validation`: the words of the file, or for what it leaves out, by which nothing is held out. `precision`: the policy where
    no other key says one, and why."""

    tool: str
    base_key: str
    data_key: str
    base: str | None = None
    tokenizer: str | None = None
    micro_batch: int = 1
    accumulation: int = 1
    length: int = 2048
    steps: int | None = None
    epochs: float = 1.0
    output: str = "runs/imported"
    prepared: str | None = None
    learning_rate: float = 5e-5
    schedule: str = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    warmup_limit: int | None = None
    weight_decay: float = 0.0
    beta2: float = 0.999
    optimizer: str | None = None
    floor: float = 0.0
    validation: float | None = None
    validation_rows: "Rows | None" = None
    no_validation: str | None = None
    borders: RowBorders | None = None
    precision: tuple[str, str] | None = None
    sources: list["Rows"] = field(default_factory=list)
    settings: list[tuple[str, str]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    left: list[tuple[str, str]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rows:
    """A source. `kind`: of its rows, in the tool's words. `column`: of a text; `messages`: the key of a conversation's turns;
    `role`, `content`: the keys of a turn; `names`: of alpaca's question (several), answer and system text, where they are not
    its own; `left`: what else was said of it; `roles`: their role -> ours, where the tool's file says it."""

    source: dict[str, Any]
    name: str
    kind: str
    column: str | None = None
    messages: str = "messages"
    role: str = "role"
    content: str = "content"
    names: dict[str, Any] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)


class Keys:
    """The keys of a file that nothing has taken yet. `named`: all that the file has, also those without a value."""

    def __init__(self, given: Mapping[str, Any]):
        self.named = {str(key) for key in given}
        self.left = {str(key): value for key, value in given.items() if value is not None and value != ""}

    def take(self, key: str, default: Any = None) -> Any:
        return self.left.pop(key, default)

    def number(self, key: str, default: float) -> float:
        value = self.take(key, default)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(f"{key}: {value!r}", f"{key} is a number", "correct it in the file")
        return number

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.take(key, default)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{key}: {value!r}", f"{key} is a name or a path", "correct it in the file")
        return value

    def count(self, key: str, default: int) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise UserError(f"{key}: {value:g}", f"{key} is a whole number", "correct it in the file")
        return int(value)

    def section(self, key: str) -> "Keys":
        value = self.take(key, {})
        return Keys(value if isinstance(value, Mapping) else {})


def source_settings(name: str) -> dict[str, Any]:
    """A file or directory, or a dataset of the hub."""
    ending = re.search(r"\.(jsonl?|parquet|txt|csv|arrow)(\.\w+)?$", name)
    if ending or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return {"path": name} | ({"file_format": "jsonl"} if ending and ending[1] == "json" else {})
    return {"hub": name}


def split_of(given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A split of the hub as datasets writes it: train, train[:1000], train[:20%] -> keys of our source, and what they leave."""
    name, _, part = str(given).partition("[")
    first, _, end = part.rstrip("]").partition(":")
    if not first and end.isdecimal() and int(end):
        return {"split": name, "documents": int(end)}, {}
    return {"split": name}, {"split": given} if part else {}


def listed_values(value: Any) -> list[Any]:
    if value is None:
        return []
    return (
        value
        if isinstance(value, list)
        else [part.strip() for part in value.split(",")]
        if isinstance(value, str)
        else [value]
    )


def last_part(component: Any) -> str:
    return str(component).rpartition(".")[2]
