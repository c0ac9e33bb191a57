"""Which checkpoints stay, and what the command line shows: list, diff, prune. No torch, but to subtract.

Kept: the newest `keep_last`, the `keep_best` with the lowest metric (ties: the newer), and `keep_steps`. Deleting
follows a commit, never precedes it, and the newest checkpoint that passes the check is never deleted, whatever the
settings are.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from windlass.checkpoint.commit import committed_steps, delete_checkpoint, quarantined
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.grid import Box, RankPart
from windlass.checkpoint.index import SavedTensor, read_tensor_index
from windlass.checkpoint.manifest import Problem, rank_name, step_name
from windlass.checkpoint.stream import TensorSource, as_bytes
from windlass.checkpoint.verify import Checkpoint, verify_checkpoint
from windlass.errors import UserError


def kept_steps(metrics: dict[int, float | None], config: CheckpointConfig) -> set[int]:
    """The steps whose checkpoints stay, out of those in `metrics` (step -> validation loss or None)."""
    newest = sorted(metrics, reverse=True)[: config.keep_last]
    scored = sorted((metric, -step) for step, metric in metrics.items() if metric is not None)
    best = [-negative for _, negative in scored[: config.keep_best]]
    return set(newest) | set(best) | (set(config.keep_steps) & set(metrics))


def size_problems(directory: Path) -> list[Problem]:
    """The cheap check after a commit of our own: MANIFEST whole, every file there with its size."""
    return Checkpoint.open(directory).survey()


def prune(
    checkpoints: Path,
    config: CheckpointConfig,
    check: Callable[[Path], list[Problem]] = verify_checkpoint,
    held: Collection[int] = (),
) -> list[int]:
    """Deletes what need not stay -> the deleted steps. A step whose MANIFEST cannot be read is left alone, and so are `held`.

    `check` finds the newest whole checkpoint, which is kept in any case; where there is none, nothing is deleted. The
    command line reads every byte (`verify_checkpoint`); training, which has just hashed and fsynced the newest one, only lists
    it (`size_problems`). Where a step cannot be deleted, the others are, and a UserError then names it.
    """
    opened: dict[int, Checkpoint] = {}
    for step in committed_steps(checkpoints):
        try:
            opened[step] = Checkpoint.open(checkpoints / step_name(step))
        except UserError:
            continue  # verify names it, restore puts it aside; pruning must not touch what it cannot read
    keep = kept_steps({step: one.manifest.metric for step, one in opened.items()}, config)
    if not set(opened) - keep:
        return []
    whole = next((step for step in opened if not check(checkpoints / step_name(step))), None)
    if whole is None:
        return []
    gone, failures = sorted(set(opened) - keep - {whole, *held}), []
    for step in gone:
        try:
            delete_checkpoint(checkpoints, step, opened[step].manifest.run_id)
        except OSError as error:
            failures.append(f"{step_name(step)}: {error.strerror}")
    if failures:
        raise UserError(
            f"{checkpoints}: old checkpoints cannot be deleted: {'; '.join(failures)}",
            "deleting a checkpoint renames it first, so this user must be allowed to write to its directory and to the one above",
            "fix the permissions, or delete these checkpoints by hand; newer checkpoints are not touched",
        )
    return gone


@dataclass(frozen=True)
class CheckpointRow:
    """A line of `windlass checkpoint list`. `verified`: None: not asked for. `problem`: '' or what is wrong."""

    name: str
    step: int | None
    time: str
    num_bytes: int
    metric: float | None
    world: int
    verified: bool | None
    problem: str


def checkpoints_of(run_directory: Path) -> Path:
    """`<run>/checkpoints`, or UserError where there is none."""
    checkpoints = run_directory / "checkpoints"
    if not checkpoints.is_dir():
        raise UserError(
            f"{run_directory} has no directory `checkpoints`",
            "a run directory has one once the run has started",
            "give the run's own directory, the one in run.directory",
        )
    return checkpoints


def list_checkpoints(run_directory: Path, verified: bool = False) -> list[CheckpointRow]:
    """Every committed checkpoint, oldest first, then those put aside. `verified`: also read every byte."""
    checkpoints = checkpoints_of(run_directory)
    rows = []
    for step in sorted(committed_steps(checkpoints)):
        directory = checkpoints / step_name(step)
        try:
            manifest = Checkpoint.open(directory).manifest
        except UserError as error:
            rows.append(CheckpointRow(directory.name, step, "", 0, None, 0, False, error.given))
            continue
        problems = verify_checkpoint(directory) if verified else size_problems(directory)
        text = "; ".join(map(str, problems))
        good = not problems if verified or problems else None
        facts = (manifest.time, manifest.num_bytes, manifest.metric, manifest.world)
        rows.append(CheckpointRow(directory.name, step, *facts, good, text))
    return rows + [
        CheckpointRow(name, None, "", 0, None, 0, False, "put aside: it failed its verification")
        for name in quarantined(checkpoints)
    ]


@dataclass(frozen=True)
class Difference:
    """Tensor names. `form`: another shape or dtype. `bytes`: same form, other bytes. `same`: how many are equal."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    form: list[str] = field(default_factory=list)
    bytes: list[str] = field(default_factory=list)
    same: int = 0


def diff(first: Path, second: Path) -> Difference:
    """Which tensors of two checkpoint directories differ.

    By hashes, without reading a byte of it, where both cut a tensor alike; a tensor that was saved in another layout is read
    (verified) and compared byte by byte, a block of it in memory at a time.
    """
    one, two = Checkpoint.open(first), Checkpoint.open(second)
    left, right = read_tensor_index(one), read_tensor_index(two)
    form, unequal, same = [], [], 0
    with TensorSource(one, left) as first_source, TensorSource(two, right) as second_source:
        for name in sorted(set(left) & set(right)):
            a, b = left[name], right[name]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                form.append(name)
            elif _same_bytes(name, first_source, second_source):
                same += 1
            else:
                unequal.append(name)
    return Difference(sorted(set(left) - set(right)), sorted(set(right) - set(left)), form, unequal, same)


def _parts(tensor: SavedTensor) -> list[RankPart]:
    return sorted(tensor.parts(), key=lambda part: part.box.offsets)


def _same_bytes(name: str, one: TensorSource, two: TensorSource) -> bool:
    a, b = one.tensors[name], two.tensors[name]
    if [part.box for part in _parts(a)] == [part.box for part in _parts(b)]:
        return _hashes(name, one) == _hashes(name, two)
    return all((left == right).all() for (_, left), (_, right) in _both(name, one, two))


def _both(name: str, one: TensorSource, two: TensorSource) -> Iterator[tuple[tuple[Box, Any], tuple[Box, Any]]]:
    """The blocks of a tensor in two checkpoints that hold it in one form."""
    whole = one.tensors[name].whole
    return zip(one.blocks(name, whole), two.blocks(name, whole), strict=True)


def largest_difference(first: Path, second: Path, name: str) -> float:
    """max |a - b| of a tensor that both checkpoints hold in one form; nan where either holds a NaN. Reads it once."""
    import torch

    from windlass.checkpoint.staging import DTYPES

    one, two = Checkpoint.open(first), Checkpoint.open(second)
    tensors, most = read_tensor_index(one), torch.zeros((), dtype=torch.float64)
    dtype = DTYPES[tensors[name].dtype]
    with TensorSource(one, tensors) as left, TensorSource(two, read_tensor_index(two)) as right:
        for (_, ours), (_, theirs) in _both(name, left, right):
            values = [torch.frombuffer(as_bytes(block), dtype=dtype).double() for block in (ours, theirs)]
            most = torch.maximum(most, (values[0] - values[1]).abs().max())  # a NaN stays
    return float(most)


def _hashes(name: str, source: TensorSource) -> list[str]:
    """The hashes of the pieces that hold the tensor, part by part. A part is whole pieces: see hashed_file.py."""
    result: list[str] = []
    tensor = source.tensors[name]
    for part in _parts(tensor):
        at = source.offset(name, part)
        lengths, hashes = source.checkpoint.manifest.files[rank_name(part.rank)].rows()
        starts = [0, *accumulate(lengths)]
        result += hashes[bisect_left(starts, at) : bisect_left(starts, at + tensor.num_bytes_of(part.box))]
    return result
