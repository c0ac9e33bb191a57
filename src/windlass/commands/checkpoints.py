"""What `windlass checkpoint` prints: a run's checkpoints as a table, what is wrong with one, how two differ, what was deleted."""

from collections.abc import Iterator
from pathlib import Path

from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.index import read_tensor_index
from windlass.checkpoint.keep import checkpoints_of, diff, largest_difference, list_checkpoints, prune
from windlass.checkpoint.restore import candidates, list_names
from windlass.checkpoint.verify import Checkpoint, complaint, verify_checkpoint
from windlass.errors import UserError
from windlass.training.start.open_saved import read_trainer_state
from windlass.units import format_bytes


def table(run_directory: Path, verified: bool) -> Iterator[str]:
    """One line per checkpoint, oldest first."""
    rows = list_checkpoints(run_directory, verified)
    yield f"{'name':<22} {'written':<20} {'size':>10} {'loss':>9} {'ranks':>5}  state"
    for row in rows:
        state = {True: "whole", None: "committed", False: f"BAD: {row.problem}"}[row.verified]
        loss = f"{row.metric:.4f}" if row.metric is not None else "-"
        yield (
            f"{row.name:<22} {row.time[:19]:<20} {format_bytes(row.num_bytes):>10} {loss:>9} {row.world or '-':>5}  {state}"
        )


def verify_checkpoints(path: Path) -> Iterator[str]:
    """Reads every byte of every checkpoint that `path` names, and lists files in it that windlass did not write. Raises
    BadCheckpoint for the first that is not whole."""
    for directory in candidates(path):
        if problems := verify_checkpoint(directory):
            raise complaint(directory, problems)
        foreign = Checkpoint.open(directory).foreign_files()
        yield f"{directory}: whole" + f"; ignored files that windlass did not write: {list_names(foreign)}" * bool(
            foreign
        )


def compare_checkpoints(first: Path, second: Path) -> tuple[list[str], bool]:
    """(Which tensors of two checkpoints differ, and by how much; whether none does); of a run directory its newest checkpoint."""
    lines = []
    one, two = candidates(first)[0], candidates(second)[0]
    difference, forms = diff(one, two), [read_tensor_index(Checkpoint.open(path)) for path in (one, two)]
    for label, names in (("first", difference.only_first), ("second", difference.only_second)):
        for name in names:
            lines.append(f"only in the {label}: {name}")
    for name in difference.form:
        both = " and ".join(f"{tensors[name].dtype} {tensors[name].shape}" for tensors in forms)
        lines.append(f"another shape or dtype: {name}: {both}")
    for name in difference.bytes:
        lines.append(f"other values: {name}: by at most {largest_difference(one, two, name):.3g}")
    return [*lines, f"{difference.same} tensors are equal, bit for bit"], not lines


def prune_checkpoints(run_directory: Path, keep_last: int, keep_best: int) -> str:
    """Deletes all but the newest `keep_last`, the `keep_best` with the lowest validation loss, and the recipe's keep_steps."""
    if keep_last < 1 or keep_best < 0:
        raise UserError(
            f"--keep-last {keep_last} --keep-best {keep_best}",
            "the newest checkpoint always stays, and a number of checkpoints is not negative",
            "use --keep-last 1 or more, and --keep-best 0 or more",
        )
    kept = read_trainer_state(candidates(run_directory)[0])["config"]["checkpoint"]["keep_steps"]
    config = CheckpointConfig(keep_last=keep_last, keep_best=keep_best, keep_steps=kept)
    steps = prune(checkpoints_of(run_directory), config)
    return f"deleted: {', '.join(f'step {step}' for step in steps) or 'nothing'}"
