"""A layout's training against that of one process, number by number: what agrees, what does not, and the first that differs.

    gradients, weights    |a - b| <= tolerance x max(largest of the tensor, 1e-3 x largest of the model), every element
    loss, norm            |a - b| <= tolerance x max(1, |b|), every step, and the same number on every rank

A mistake of a layout is 1e-6 and more; rounding in fp64 is 1e-13 (findings of many layouts: losses within 2e-15). What is a
part of an average, or of a sum over ranks, shows in the first step's gradients; what the optimizer keeps, in the weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from windlass.model.architecture import Architecture
from windlass.model.lora.adapter import is_factor
from windlass.model.names import hugging_face_names
from windlass.proof.reference_run import Expected, ReferenceRun, trimmed
from windlass.proof.watch import EMBEDDED, Seen
from windlass.report.events import Event
from windlass.units import counted

TOLERANCE: Final = 1e-10
SHARE_OF_MODEL: Final = 1e-3  # of the model's largest element: what a tensor of next to nothing is held against

DATAFLOW: Final = (
    *("input_layernorm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj", "post_self_attn_layernorm"),
    *("post_attention_layernorm", "gate", "gate_proj", "up_proj", "down_proj", "post_mlp_layernorm"),
)
"""Modules of a block as the forward pass meets them; `gate` is a router."""


@dataclass(frozen=True)
class ProofRow:
    """A line of the table. `largest`: relative difference; `where`: the first that differs, with both numbers, or ''."""

    what: str
    compared: str
    largest: float
    allowed: float
    where: str = ""

    @property
    def agrees(self) -> bool:
        return self.largest <= self.allowed  # NaN does not


def numbers(what: str, ranks: Sequence[Sequence[float]], expected: Sequence[float], first_step: int = 1) -> ProofRow:
    """One number per step, the same on every rank."""
    largest, where = 0.0, ""
    for rank, ours in enumerate(ranks):
        if len(ours) != len(expected):
            there = counted(len(ours), "number")
            return ProofRow(what, counted(len(expected), "step"), float("inf"), TOLERANCE, f"rank {rank} has {there}")
        for step, (a, b) in enumerate(zip(ours, expected), first_step):
            apart = abs(a - b) / max(1.0, abs(b))
            if not apart <= TOLERANCE and not where:
                where = f"step {step} on rank {rank}: {a!r}, one process has {b!r}"
            largest = _larger(largest, apart)
    return ProofRow(what, f"{counted(len(expected), 'step')}, {counted(len(ranks), 'rank')}", largest, TOLERANCE, where)


def streams(ranks: Sequence[Mapping[int, torch.Tensor]], expected: Mapping[int, torch.Tensor]) -> ProofRow:
    """The residual stream behind each layer in the first step, as sums over all ranks. The first layer that differs is the one
    whose forward is wrong: every later layer inherits its error."""
    largest, where = 0.0, ""
    for layer in sorted({*expected, *(layer for one in ranks for layer in one)}):
        called = f"layer {layer} (model.layers.{layer})" if layer != EMBEDDED else "the embedding"
        held = [one[layer] for one in ranks if layer in one]
        if not held or layer not in expected:
            largest, where = (
                float("inf"),
                where or f"{called}: {'no rank' if not held else 'one process'} has no such layer",
            )
            continue
        ours, theirs = torch.stack(held).sum(0), expected[layer]
        apart = float(((ours - theirs).abs() / theirs.abs().clamp(min=1.0)).max())
        if not apart <= TOLERANCE and not where:
            pairs = [f"{float(a)!r}, one process has {float(b)!r}" for a, b in zip(ours, theirs, strict=True)]
            where = f"{called}: its sum is {pairs[0]}; its sum of squares {pairs[1]}"
        largest = _larger(largest, apart)
    return ProofRow("residual stream", counted(len(expected), "layer"), largest, TOLERANCE, where)


def figures(ranks: Sequence[Sequence[Expected]], expected: Sequence[Expected]) -> ProofRow:
    """The routers' figures of each step, equal on every rank."""
    largest, where = 0.0, ""
    for rank, ours in enumerate(ranks):
        for step, theirs in enumerate(expected):
            own = ours[step] if step < len(ours) else {}
            for name in sorted({*own, *theirs}):
                if name not in own or name not in theirs:
                    apart, how = float("inf"), "is reported by one and not by the other"
                else:
                    a, b = own[name].double(), theirs[name].double()
                    apart = float(((a - b).abs() / b.abs().clamp(min=1.0)).max())
                    how = f"is {a.tolist()!r}, one process has {b.tolist()!r}"
                if not apart <= TOLERANCE and not where:
                    where = f"step {step + 1} on rank {rank}: {name} {how}"
                largest = _larger(largest, apart)
    return ProofRow(
        "router figures", f"{counted(len(expected), 'step')}, {counted(len(ranks), 'rank')}", largest, TOLERANCE, where
    )


def tensors(
    what: str,
    ranks: Sequence[Expected],
    expected: Expected,
    architecture: Architecture,
    *,
    are_gradients: bool = False,
) -> ProofRow:
    """Every tensor of the model, whole, on every rank that has it. Of those that differ the message names the one furthest apart;
    of gradients the one nearest to the loss: backward carries a mistake from where it is made down to the embedding, while an
    update carries it into every tensor of the next step, and nowhere as far as where it was made."""
    factors = {name for held in (expected, *ranks) for name in held if is_factor(name)}
    names = hugging_face_names(architecture) | {name: (name,) for name in factors}
    most = max((float(tensor.abs().max()) for tensor in expected.values()), default=0.0)
    largest, compared = 0.0, 0
    wrong: dict[str, tuple[float, str]] = {}  # name -> how far apart at most, and that difference
    for name in sorted(names, key=_depth):
        holders = [(rank, held[name]) for rank, held in enumerate(ranks) if name in held]
        if bool(holders) != (name in expected):
            has, lacks = ("no rank", "one process has it") if not holders else (f"rank {holders[0][0]}", "it has none")
            largest, wrong[name] = float("inf"), (float("inf"), f": {has} has one, {lacks}")
            continue
        compared += bool(holders)
        for rank, ours in holders:
            theirs = expected[name]
            apart = (ours - theirs).abs() / max(float(theirs.abs().max()), SHARE_OF_MODEL * most)
            worst = float(apart.max())  # NaN if there is one
            distance = float("inf") if math.isnan(worst) else worst
            if distance > max(TOLERANCE, wrong.get(name, (0.0,))[0]):
                wrong[name] = distance, _worst_element(rank, ours, theirs, apart)
            largest = _larger(largest, worst)
    return ProofRow(
        what,
        f"{compared} tensors, {counted(len(ranks), 'rank')}",
        largest,
        TOLERANCE,
        _worst_tensor(wrong, names, are_gradients),
    )


def _worst_tensor(
    wrong: Mapping[str, tuple[float, str]], names: Mapping[str, tuple[str, ...]], are_gradients: bool
) -> str:
    """The tensor to look at first, of those that differ, which are in the order of the forward pass; '' if none does."""
    if not wrong:
        return ""
    differing = list(wrong)
    first, last = differing[0], differing[-1]
    chosen = last if are_gradients else max(wrong, key=lambda name: wrong[name][0])
    where = f"{_hf_name(chosen, names)}{wrong[chosen][1]}"
    if len(wrong) == 1:
        return where
    if are_gradients:
        return f"{where}; it is the nearest to the loss of {len(wrong)} tensors that differ, from {_hf_name(first, names)} on"
    return f"{where}; it is the furthest apart of {len(wrong)} tensors that differ"


def _depth(name: str) -> tuple[int, int, int]:
    """Where the forward pass meets a parameter: before, in or after the blocks, which block, where in it."""
    before, dot, rest = name.partition(".layers.")
    if not dot:
        return (0 if ".embed_" in before else 2, "lm_head" in before, 0)
    module = name.rsplit(".", 3)[1 if is_factor(name) else 2]
    return (1, int(rest.partition(".")[0]), DATAFLOW.index(module))


def _worst_element(rank: int, ours: torch.Tensor, theirs: torch.Tensor, distances: torch.Tensor) -> str:
    """The words for the element that is furthest apart, with both numbers."""
    at = tuple(int(i) for i in torch.unravel_index(distances.nan_to_num(nan=float("inf")).argmax(), distances.shape))
    return f"{list(at)} on rank {rank}: {float(ours[at])!r}, one process has {float(theirs[at])!r}{_common_factor(ours, theirs)}"


def _larger(one: float, other: float) -> float:
    """The larger; not a number, where one of them is none."""
    return one + other if math.isnan(one + other) else max(one, other)


def _hf_name(name: str, names: Mapping[str, tuple[str, ...]]) -> str:
    """Hugging Face's name; where that holds several of our tensors, which of them."""
    hf_name = names[name][0]
    inner = name.rpartition(".")[0].rpartition(".")[2]
    return f"{hf_name} ({inner})" if sum(hf_name in other for other in names.values()) > 1 else hf_name


def _common_factor(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """The words for a tensor that is too large or too small by one factor, a wrong scale; none for any other."""
    theirs_2 = float((theirs * theirs).sum())
    if not theirs_2:
        return ""
    factor = float((ours * theirs).sum()) / theirs_2
    rest = float((ours - factor * theirs).abs().max())
    return f" (all of it is {factor:.6g} times too large)" if rest <= 1e-9 * float(theirs.abs().max()) else ""


def same_rows(seen: Sequence[Seen], expected: Sequence[dict[str, torch.Tensor]]) -> ProofRow:
    """Every sample of each global batch is read once over the batch ranks; ranks of one model-parallel group read the same."""
    what, where, wrong = "samples", "", 0
    for step, whole_batch in enumerate(expected):
        for name, wanted in whole_batch.items():
            by_batch_rank: dict[int, torch.Tensor] = {}
            for rank, one in enumerate(seen):
                first = by_batch_rank.setdefault(one.batch_rank, one.rows[step][name])
                if not torch.equal(first, one.rows[step][name]):
                    where = where or f"step {step + 1}: {name} of rank {rank} are not those of its model-parallel group"
                    wrong += 1
            read = torch.cat([by_batch_rank[batch_rank] for batch_rank in sorted(by_batch_rank)])
            if read.shape != wanted.shape or not torch.equal(_sorted(read), _sorted(wanted)):
                where = where or f"step {step + 1}: {name} over the ranks are not the global batch's, each once"
                wrong += 1
    num_rows = sum(len(batch["input_ids"]) for batch in expected)
    return ProofRow(what, f"{num_rows} rows, {counted(len(seen), 'rank')}", float(wrong), 0.0, where)


def _sorted(rows: torch.Tensor) -> torch.Tensor:
    """The rows in the order of their content."""
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    order = sorted(range(len(flat)), key=lambda at: flat[at].tolist())
    return rows[order]


def compare_training(seen: Sequence[Seen], one_process: ReferenceRun, architecture: Architecture) -> Iterator[ProofRow]:
    """A whole training of the layout against one process, in the order of time: the first that differs is where it begins."""
    losses, norms = [one.losses for one in seen], [one.norms for one in seen]
    yield streams([one.streams for one in seen], one_process.streams)
    yield numbers("loss", [one[:1] for one in losses], one_process.losses[:1])
    gradients = [trimmed(one.gradients, architecture) for one in seen]
    yield tensors("gradients", gradients, one_process.gradients, architecture, are_gradients=True)
    yield numbers("gradient norm", [one[:1] for one in norms], one_process.norms[:1])
    first = [trimmed(one.first_weights, architecture) for one in seen]
    yield tensors("weights after 1 step", first, one_process.first_weights, architecture)
    yield numbers("loss of later steps", [one[1:] for one in losses], one_process.losses[1:], 2)
    yield numbers("norm of later steps", [one[1:] for one in norms], one_process.norms[1:], 2)
    held = [trimmed(one.weights, architecture) for one in seen]
    yield tensors(f"weights after {len(one_process.losses)} steps", held, one_process.weights, architecture)
    scored = [one.evaluations for one in seen]
    touched = [(rank, name) for rank, one in enumerate(seen) for name in one.touched]
    if any(is_factor(name) for name in one_process.weights):
        where = f"{touched[0][1]} on rank {touched[0][0]} has other bits than before the first step" if touched else ""
        yield ProofRow("frozen base", counted(len(seen), "rank"), float(len(touched)), 0.0, where)
    yield numbers("validation before", [one[:1] for one in scored], one_process.evaluations[:1], 0)
    yield numbers("validation after", [one[1:] for one in scored], one_process.evaluations[1:], len(one_process.losses))
    if any(one_process.figures):
        yield figures([one.figures for one in seen], one_process.figures)


def compare_events(lines: Sequence[Event], one_process: ReferenceRun) -> Iterator[ProofRow]:
    """The figures in events.jsonl, which console and report show: averages over counted targets, or pairs."""
    steps, scored = ([line for line in lines if line["kind"] == kind] for kind in ("step", "validation"))
    unit = "pairs" if "pairs" in steps[0] else "targets"
    for what, name, expected in (
        (f"reported {unit}", unit, one_process.targets),
        ("reported loss", "loss", one_process.losses),
        ("reported norm", "gradient_norm", one_process.norms),
    ):
        yield numbers(what, [[_number(line[name]) for line in steps]], expected)
    expected = [nats / one_process.held_out_targets for nats in one_process.evaluations]
    yield numbers("reported validation", [[_number(line["loss"]) for line in scored]], expected, 0)


def _number(value: float | None) -> float:
    """events.jsonl has null where a number is not finite."""
    return math.nan if value is None else float(value)


def compare_resumed(
    what: str, after: int, seen: Sequence[Seen], one_process: ReferenceRun, architecture: Architecture
) -> Iterator[ProofRow]:
    """A training that went on from the checkpoint `after` that many steps."""
    yield numbers(f"{what}: loss", [one.losses for one in seen], one_process.losses[after:], after + 1)
    held = [trimmed(one.weights, architecture) for one in seen]
    yield tensors(f"{what}: weights", held, one_process.weights, architecture)
    scored = [one.evaluations[-1:] for one in seen]
    yield numbers(f"{what}: validation", scored, one_process.evaluations[-1:], len(one_process.losses))


def proof_row_as_json(row: ProofRow) -> dict[str, Any]:
    finite = row.largest if row.largest < float("inf") else None
    return {**vars(row), "largest": finite, "agrees": row.agrees}
