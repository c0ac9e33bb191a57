"""A layout folded to the ranks at hand: which small layouts together represent the recipe's.

A layout that fits is proved as it is. A larger one keeps all of its axes, each of 2 ranks; where even those are too many, every
pair of axes is proved by itself (every triple on 8 ranks). Two axes of two ranks show nearly every mistake: a sum over the wrong
group, a scale by the wrong size, a slice by the wrong coordinate. A mistake that needs more axes at once, or more ranks per axis,
is not seen, and the output lists what was left out.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

from windlass.errors import UserError
from windlass.parallel.config import MeshLayout, ParallelConfig
from windlass.parallel.rules.check_layout import check_layout

AXES: Final = ("pp", "replicate", "shard", "context", "tp", "expert")
FOLDED: Final = 2
"""Ranks of an axis that does not fit."""
MOST_AXES: Final = 3
"""Axes of one cell of a product that does not fit."""
OF_AXIS: Final = {"pp": ("schedule",), "shard": ("prefetch",), "context": ("context_kind",)}
"""Settings that have no effect where an axis is 1."""


@dataclass(frozen=True)
class Cell:
    """One layout that is proved. Every axis of `parallel` is a number."""

    parallel: ParallelConfig
    layout: MeshLayout

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def name(self) -> str:
        sizes = [f"{axis} {size}" for axis in AXES if (size := getattr(self.layout, axis)) > 1]
        schedule = f", {self.parallel.schedule}" if self.layout.pp > 1 else ""
        return f"{' x '.join(sizes) or 'one process'}, zero {self.parallel.zero_stage}{schedule}"


@dataclass(frozen=True)
class Folding:
    """The cells that represent a layout, and sentences on what they do not prove."""

    cells: list[Cell]
    unproved: list[str]


def fold_onto_ranks(parallel: ParallelConfig, ranks: int | None, most: int) -> Folding:
    """`ranks`: ranks that the layout is to fill, None: as many as it needs. `most`: ranks at hand where it is None. An axis of
    -1 takes what is left of `ranks`, or 2. Raises UserError where the layout does not fill `ranks`."""
    at_hand = ranks if ranks is not None else most
    check_layout(parallel)
    if parallel.zero == "auto":
        stage = parallel.zero_stage
        folding = fold_onto_ranks(parallel.with_zero(stage), ranks, most)
        chosen = f"parallel.zero=auto: proved as zero {stage}; where a run chooses another, verify it with that number"
        return Folding(folding.cells, [*folding.unproved, chosen])
    fixed = math.prod(size for axis in AXES[:-1] if (size := getattr(parallel, axis)) > 0)
    is_open = _is_open(parallel)
    if fixed <= at_hand and ranks is not None:
        return Folding([_cell(parallel, parallel.layout(fixed if not is_open else ranks))], [])
    world = fixed * FOLDED**is_open
    owners = world // (
        max(1, parallel.replicate) * parallel.pp * parallel.tp
    )  # of parameters, over which experts are dealt
    if world <= at_hand and owners % parallel.expert == 0:
        return Folding([_cell(parallel, parallel.layout(world))], _left_open(parallel, is_open))
    sizes = {axis: getattr(parallel, axis) for axis in AXES}
    long = [axis for axis in AXES[:-1] if sizes[axis] > 1 or (is_open and sizes[axis] == -1)]
    unproved = [f"parallel.expert={parallel.expert}: experts are dealt out over {FOLDED} ranks"] * (
        parallel.expert > FOLDED
    )
    unproved += [
        f"axes of more than {FOLDED} ranks ({', '.join(f'{a} {sizes[a]}' for a in long if sizes[a] > FOLDED)}): each is folded "
        f"to {FOLDED}"
    ] * any(sizes[axis] > FOLDED for axis in long) + _left_open(parallel, is_open)
    at_once = min(len(long), int(math.log2(at_hand)))
    if long and not at_once:
        raise UserError(
            f"--nproc {at_hand} for a layout over {', '.join(long)}",
            f"an axis is proved over {FOLDED} ranks at least; pairs of axes take 4, triples 8",
            f"use --nproc {FOLDED} or more",
        )
    if at_once < len(long):
        at_once = min(at_once, MOST_AXES)
        kind = {1: "single axes", 2: "pairs", 3: "triples"}[at_once]
        unproved.append(
            f"the product of all {len(long)} axes ({', '.join(long)}) at once, which takes {FOLDED ** len(long)} ranks: on "
            f"{at_hand} {kind} of them are proved"
        )
    cells = [_folded(parallel, axes) for axes in itertools.combinations(long, at_once)]
    return Folding(cells, unproved)


def _is_open(parallel: ParallelConfig) -> bool:
    """Whether the size of some axis follows from the others (-1)."""
    return parallel.replicate == -1 or (parallel.shard == -1 and parallel.zero_stage != 0)


def _left_open(parallel: ParallelConfig, is_open: bool) -> list[str]:
    if not is_open:
        return []
    axis = "replicate" if parallel.replicate == -1 else "shard"
    return [f"parallel.{axis}=-1 on more than {FOLDED} ranks: here it takes {FOLDED}"]


def _folded(parallel: ParallelConfig, axes: tuple[str, ...]) -> Cell:
    """The layout with `axes` of FOLDED ranks each, and the others of 1."""
    sizes: dict[str, Any] = {axis: FOLDED if axis in axes else 1 for axis in AXES[:-1]}
    if parallel.expert > 1 and sizes["shard"] * sizes["context"] > 1:  # it divides these two, and adds no ranks
        sizes["expert"] = FOLDED
    else:
        sizes["expert"] = 1
    world = math.prod(sizes[axis] for axis in AXES[:-1])
    without = {name for axis, names in OF_AXIS.items() if sizes[axis] == 1 for name in names}
    kept = parallel.model_dump(exclude=without)
    try:
        changed = ParallelConfig.model_validate(kept | sizes)
        check_layout(changed, None, world)
    except UserError as error:  # what the whole layout allows, a part of it does not: for example zero 0 beside shard
        raise UserError(
            f"the part {' x '.join(axes)} of this layout: {error.given}",
            error.rule,
            "verify it on more ranks (--nproc), where it is not taken apart",
        ) from None
    return _cell(changed, changed.layout(world))


def _cell(parallel: ParallelConfig, layout: MeshLayout) -> Cell:
    sizes = {axis: getattr(layout, axis) for axis in AXES}
    return Cell(parallel.changed(**sizes), layout)
