"""Writing one checkpoint: plan, write, commit, with one verdict for all ranks. checkpoints.py calls it.

A plan says which rank writes which box. Each rank gives the boxes that it holds; along the tree they become grids (grid.py). Rank
0 receives a few per tensor, chooses who writes where several ranks hold the same (DDP, HSDP's replicas), and sends that down;
it is index.json as well. So no rank lists the parts of all: for each tensor rank 0 of 16,384 joins 14 times and chooses, and the
others look for their own parts (docs/scale.md). A run plans once, in the background as it starts; a later save asks
only whether shapes and cuts are as they were.

A save is two exchanges more: rank 0 makes a draft and sends its token; each rank writes its file and sends the file's hashes, and
rank 0 commits. An error of one rank is raised on all.

A rank knows what it will write before a byte is copied: of what N ranks hold alike each copies and holds one N-th.

    rank-00003.bin   64 bytes of header; a list of the boxes; the boxes, one after the other, row-major, as in memory

Only tensors are stored, as raw bytes. Objects are refused: the trainer state is JSON (checkpoints.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from windlass.checkpoint.commit import Draft, check_space, named_errors
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.grid import Axis, Box, Grid, RankPart, join_all, overlap
from windlass.checkpoint.hashed_file import FileEntry, PieceWriter
from windlass.checkpoint.index import SavedTensor, pack_boxes, seal_index
from windlass.checkpoint.manifest import INDEX, Manifest, new_token, rank_header, rank_name
from windlass.checkpoint.sealed_json import digest
from windlass.checkpoint.staging import DTYPES, local_box, raw_bytes

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HeldTensor(NamedTuple):
    """A tensor, and which ranks hold which boxes of it."""

    dtype: str
    shape: tuple[int, ...]
    grids: list[Grid]


@dataclass
class Plan:
    """Which rank writes what. Empty until it is made."""

    held: dict[str, Any] | None = None
    """The tensors of this rank: their shapes, dtypes and cuts."""
    own: dict[str, Box] | None = None
    """What it writes, in the order of its file."""
    tensors: dict[str, SavedTensor] | None = None
    """The index."""
    times_made: int = 0

    @property
    def written(self) -> set[str]:
        """Names of the tensors of which this rank writes what it holds."""
        assert self.own is not None
        return set(self.own)


def plan_save(tensors: dict[str, torch.Tensor], exchange: Exchange, plan: Plan) -> None:
    """Fills `plan` for `tensors`, unless it is for such already. Collective. Raises TypeError for what is no tensor."""
    found: dict[str, Any] = {}

    def is_same() -> bool:
        found.update({name: _form(name, tensor) for name, tensor in tensors.items()})
        return plan.own is not None and plan.held == found

    if exchange.reduce(is_same, all):
        return
    plan.held = plan.own = plan.tensors = None
    rank, world = exchange.rank, exchange.world
    boxes: dict[str, Box] = {}

    def held() -> dict[str, HeldTensor]:
        boxes.update({name: local_box(tensor) for name, tensor in tensors.items()})
        return held_tensors(rank, tensors, boxes)

    saved = exchange.fold(held, join_held, lambda held: choose_writers(held, world))
    plan.own = {name: box for name, box in boxes.items() if box.num_elements and saved[name].holder(box) == rank}
    plan.held, plan.tensors, plan.times_made = found, saved, plan.times_made + 1


def _form(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """What decides which part of a tensor a rank has."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is not a tensor; put it into the trainer state")
    if tensor.dtype not in DTYPE_NAMES:
        raise TypeError(f"{name} is {tensor.dtype}, which no checkpoint holds")
    cut = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, *cut


def held_tensors(rank: int, tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]) -> dict[str, HeldTensor]:
    held = {}
    for name, tensor in tensors.items():
        grids = [Grid.of(RankPart(rank, boxes[name]))] if boxes[name].num_elements else []
        held[name] = HeldTensor(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), grids)
    return held


def join_held(lower: dict[str, HeldTensor], higher: dict[str, HeldTensor]) -> dict[str, HeldTensor]:
    """What ranks hold, of those of lower and of higher numbers."""
    joined = dict(lower)
    for name, theirs in higher.items():
        ours = lower.get(name, HeldTensor(theirs.dtype, theirs.shape, []))
        if ours[:2] != theirs[:2]:
            raise ValueError(
                f"{name} is {ours.dtype} {ours.shape} on one rank and {theirs.dtype} {theirs.shape} on another"
            )
        joined[name] = HeldTensor(ours.dtype, ours.shape, join_all(ours.grids, theirs.grids))
    return joined


def choose_writers(held: dict[str, HeldTensor], world: int) -> dict[str, SavedTensor]:
    """Chooses which ranks write each tensor, as grids without replicas: of the ranks that hold the same part, the one with the
    least to write so far writes it. Large tensors are assigned first."""
    load, chosen = np.zeros(world), {}
    for name, tensor in sorted(held.items(), key=lambda pair: -_largest(pair[1].grids)):
        item, num_elements = DTYPES[tensor.dtype].itemsize, math.prod(tensor.shape)
        if sum(_without_replicas(grid).num_elements for grid in tensor.grids) == num_elements:
            grids = [_least_loaded(grid, load, item) for grid in tensor.grids]
        else:  # replicas that are no axis of one grid
            grids = _each_box_once(tensor.grids, load, item)
        if sum(grid.num_elements for grid in grids) != num_elements or overlap(grids):
            raise ValueError(f"the parts of {name} that ranks hold do not make up its shape {tensor.shape}")
        chosen[name] = SavedTensor.model_construct(dtype=tensor.dtype, shape=tensor.shape, grids=tuple(grids))
    return {name: chosen[name] for name in held}


def _largest(grids: Iterable[Grid]) -> int:
    return max((grid.num_elements for grid in grids), default=0)


def _without_replicas(grid: Grid) -> Grid:
    return grid.changed(axes=tuple(axis for axis in grid.axes if axis.step))


def _least_loaded(grid: Grid, load: np.ndarray, item_bytes: int) -> Grid:
    """`grid` on one of its replicas; adds what its ranks then write to `load`."""
    one = _without_replicas(grid)
    ranks_P, starts_R = grid.rank + _offsets(one.axes), _offsets(axis for axis in grid.axes if not axis.step)
    start = starts_R[load[ranks_P[None] + starts_R[:, None]].max(axis=1).argmin()]
    load[ranks_P + start] += math.prod(grid.sizes) * item_bytes
    return one.changed(rank=int(grid.rank + start))


def _offsets(axes: Iterable[Axis]) -> np.ndarray:
    """How far behind the first rank each is."""
    offsets = np.zeros(1, np.int64)
    for axis in axes:
        offsets = (np.arange(axis.count)[:, None] * axis.ranks + offsets).reshape(-1)
    return offsets


def _each_box_once(grids: Iterable[Grid], load: np.ndarray, item_bytes: int) -> list[Grid]:
    """For replicas that no axis describes."""
    holders: dict[Box, list[int]] = {}
    for grid in grids:
        for part in grid.parts():
            holders.setdefault(part.box, []).append(part.rank)
    parts = []
    for box, ranks in holders.items():
        parts.append(RankPart(min(ranks, key=lambda rank: load[rank]), box))
        load[parts[-1].rank] += box.num_elements * item_bytes
    return join_all([], map(Grid.of, sorted(parts)))


def write_planned(local: dict[str, torch.Tensor], writer: "TensorWriter", exchange: Exchange, plan: Plan) -> None:
    """Returns on all ranks when the checkpoint is committed. Where it is not, raises on all ranks and removes the draft.

    `local`: this rank's shards by name, or copies of them; at least what `plan.written` names.
    """
    assert plan.own is not None and plan.tensors is not None
    own, tensors, rank, world = plan.own, plan.tensors, exchange.rank, exchange.world
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    try:
        token = exchange.from_first(lambda: writer.begin(num_bytes))
        exchange.reduce(lambda: writer.write(token, rank, own, local), lambda done: writer.commit(tensors, done, world))
    finally:
        if rank == 0 and writer.draft is not None and writer.manifest is None:
            writer.draft.discard()


class TensorWriter:
    """Writes one checkpoint of step `step` into `checkpoints`.

    `files` (rank 0's are used) is called with the token and gives the other files of the checkpoint. On rank 0 `draft` is there
    from `begin` on, and `manifest` once it is committed.
    """

    def __init__(
        self,
        checkpoints: Path,
        step: int,
        run_id: str,
        files: Callable[[str], dict[str, bytes | Path]],
        metric: float | None = None,
        digest: Callable[[Any], str] = digest,
    ):
        self._checkpoints, self._step, self._run_id = checkpoints, step, run_id
        self._files, self._metric, self._digest = files, metric, digest
        self.draft: Draft | None = None
        self.manifest: Manifest | None = None

    def begin(self, tensor_bytes: int) -> str:
        """Rank 0: is there space for the tensors and the other files, and make the draft -> its token."""
        token = new_token(self._run_id)
        files = self._files(token)
        need = sum(len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())
        need += tensor_bytes
        draft = Draft(self._checkpoints, self._step, token)
        with named_errors(self._checkpoints, need):
            self._checkpoints.mkdir(parents=True, exist_ok=True)
            check_space(self._checkpoints, need)
            draft.create()
        self.draft = draft
        return token

    def write(
        self, token: str, rank: int, own: Mapping[str, Box], local: Mapping[str, torch.Tensor]
    ) -> dict[str, FileEntry]:
        """The file of `rank`, hashed as it is written -> its name and its entry in MANIFEST. Nothing to write: no file."""
        if not own:
            return {}
        sizes = {name: local[name].numel() * local[name].element_size() for name in own}
        index = pack_boxes(own)
        path = Draft(self._checkpoints, self._step, token).directory / rank_name(rank)
        with (
            named_errors(self._checkpoints, sum(sizes.values())),
            PieceWriter(path, self._digest) as writer,
        ):
            writer.write(memoryview(rank_header(token, len(index))))
            writer.write(memoryview(index))
            for name in own:
                writer.write(raw_bytes(local[name]))
            return {path.name: writer.close()}

    def commit(
        self, tensors: Mapping[str, SavedTensor], written: Iterable[Mapping[str, FileEntry]], world: int
    ) -> None:
        """Rank 0, when every rank's file is on disk: index, other files, MANIFEST, commit. `written`: what each `write` gave."""
        assert self.draft is not None
        files: dict[str, bytes | Path] = dict(self._files(self.draft.token))
        files[INDEX] = seal_index(tensors, self.draft.token)
        entries = {name: entry for one in written for name, entry in one.items()}
        with named_errors(self._checkpoints, sum(entry.size for entry in entries.values())):
            entries |= {name: self.draft.add(name, content) for name, content in sorted(files.items())}
            self.manifest = self.draft.commit(self._run_id, world, self._metric, entries)
