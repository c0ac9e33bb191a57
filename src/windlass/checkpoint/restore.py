"""Loading: the newest whole checkpoint of a run, or the one at a path, into any world size and sharding. checkpoints.py calls it.

One attempt: rank 0 verifies MANIFEST, the small files and the listing, and sends them to all ranks; every rank compares names,
shapes and dtypes, looks up whose files hold its shards, and reads and verifies what it needs of them; all ranks agree on one
verdict. After BadCheckpoint the next older checkpoint is tried, which overwrites what the attempt has written. Any other
UserError ends the restore.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from windlass.checkpoint.commit import committed_steps, quarantine, quarantined
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.grid import Box, RankPart
from windlass.checkpoint.index import SavedTensor, parse_tensor_index
from windlass.checkpoint.manifest import INDEX, MANIFEST, TRAINER_STATE, is_rank_name, step_name
from windlass.checkpoint.sealed_json import bad, unseal
from windlass.checkpoint.staging import DTYPES, local_box
from windlass.checkpoint.stream import TensorSource, as_bytes, cut_box
from windlass.checkpoint.verify import Checkpoint, complaint
from windlass.errors import BadCheckpoint, UserError
from windlass.ranks.owned_part import local_part
from windlass.safe_text import printable

WHATS = ("weights", "all")
BLOCK_BYTES: Final = 256 << 20
"""What is read at once of a part: a piece at its border is read twice."""
BEGUN_ANEW: Final = "program."
"""State that a run may lack or begin itself: fp16's loss scale, where the checkpoint or the run has another policy. Whether that
may change is a matter of drift."""


class _Offer(NamedTuple):
    """What rank 0 has read and verified, and sends to all ranks."""

    manifest: bytes
    index_json: bytes
    trainer_state: bytes


def _offer(directory: Path, log: Callable[[str], None]) -> _Offer:
    """Rank 0: everything but the tensors' bytes, verified. BadCheckpoint names the files that are not whole."""
    checkpoint = Checkpoint.open(directory)
    if foreign := checkpoint.foreign_files():
        log(f"{directory}: ignored files that windlass did not write: {list_names(foreign)}")
    problems = checkpoint.survey()
    seen = {problem.file for problem in problems}
    small = [name for name in sorted(checkpoint.manifest.files) if not is_rank_name(name) and name not in seen]
    problems += [problem for name in small if (problem := checkpoint.verify(name))]
    if unreadable := [problem for problem in problems if problem.what == "unreadable"]:
        raise UserError(  # no BadCheckpoint: it may well be whole, and must not be renamed
            f"{directory}: {unreadable[0]}",
            "windlass judges a checkpoint only if it can read all of it",
            "fix the permissions or the storage",
        )
    if problems:
        raise complaint(directory, problems)
    return _Offer(checkpoint.manifest_bytes, checkpoint.read(INDEX), checkpoint.read(TRAINER_STATE))


def list_names(names: list[str]) -> str:
    """The first five, printable, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return printable(", ".join(names[:5])) + more


def _compare(tensors: dict[str, torch.Tensor], saved: Mapping[str, SavedTensor], what: str, where: Path) -> None:
    """UserError where a tensor is not in the checkpoint, or has another shape or, for "all", another dtype."""
    missing = sorted(set(tensors) - set(saved))
    if missing:
        raise UserError(
            f"{where} has no tensor {list_names(missing)}",
            f"every tensor of the model must be in the checkpoint; {len(missing)} of {len(tensors)} are not",
            "resume with the recipe that made the checkpoint (resolved.yaml in the checkpoint), or start a new run",
        )
    for name, tensor in tensors.items():
        assert tensor.device.type != "meta", f"{name} is on the meta device; materialise it before the restore"
        if saved[name].shape != tensor.shape:
            raise UserError(
                f"{name} has shape {list(saved[name].shape)} in {where} and {list(tensor.shape)} in this run",
                "shapes must be equal",
                "set the model as it was when the checkpoint was made",
            )
        if what == "all" and DTYPES[saved[name].dtype] != tensor.dtype:
            raise UserError(
                f"{name} is {DTYPES[saved[name].dtype]} in {where} and {tensor.dtype} in this run",
                "to resume exactly, dtypes must be equal",
                "set the precision as it was, or start from the weights only (run.start_what: weights)",
            )


def _refuse_unexpected(names: list[str], saved: Mapping[str, SavedTensor], where: Path) -> None:
    unexpected = sorted(name for name in set(saved) - set(names) if not name.startswith(BEGUN_ANEW))
    if unexpected:
        raise UserError(
            f"{where} also holds {list_names(unexpected)}, which this run does not have",
            "to resume exactly, a run must use every tensor of the checkpoint",
            "set model and optimizer as they were, or start from the weights only (run.start_what: weights)",
        )


def load_one(
    directory: Path, tensors: dict[str, torch.Tensor], what: str, exchange: Exchange, log: Callable[[str], None]
) -> dict[str, Any]:
    """One attempt -> the trainer state, which has `step`. All ranks return, or raise the same error."""
    offer: _Offer = exchange.from_first(lambda: _offer(directory, log))
    checkpoint = Checkpoint.parse(directory, offer.manifest)
    trainer_state = unseal(offer.trainer_state, TRAINER_STATE).get("trainer_state")
    if not isinstance(trainer_state, dict):
        raise bad(f"{TRAINER_STATE} holds a {type(trainer_state).__name__}", "a trainer state is one object")
    saved = parse_tensor_index(offer.index_json, checkpoint.manifest)
    tensors = {name: one for name, one in tensors.items() if name in saved or not name.startswith(BEGUN_ANEW)}

    def names() -> list[str]:
        _compare(tensors, saved, what, directory)
        return list(tensors)

    def no_surprise(all_names: list[list[str]]) -> None:
        if what == "all":  # a pipeline's ranks hold different tensors, so only the union can be compared
            _refuse_unexpected([name for rank in all_names for name in rank], saved, directory)

    exchange.reduce(names, no_surprise)
    exchange.reduce(lambda: read_tensors(checkpoint, tensors, saved), lambda _: None)
    return {**trainer_state, "step": checkpoint.manifest.step}


def read_tensors(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], saved: Mapping[str, SavedTensor]) -> int:
    """This rank's shards of `tensors`, in place, out of whichever files hold them: one file after the other, each from its
    beginning to its end -> the bytes that they took. Raises BadCheckpoint."""
    wanted: dict[int, list[tuple[str, RankPart, Box]]] = {}
    own = {name: local_box(tensor) for name, tensor in tensors.items()}
    for name, box in own.items():
        for part in saved[name].meeting(box) if box.num_elements else ():
            wanted.setdefault(part.rank, []).append((name, part, part.box.common(box)))
    num_bytes = 0
    with TensorSource(checkpoint, saved) as source:
        for rank in sorted(wanted):
            for name, part, shared in sorted(wanted[rank], key=lambda one: source.offset(one[0], one[1])):
                target, dtype = local_part(tensors[name]), DTYPES[saved[name].dtype]
                for block in cut_box(shared, max(1, BLOCK_BYTES // dtype.itemsize)):
                    data = as_bytes(source.read(name, part, block))
                    target[block.within(own[name])].copy_(torch.frombuffer(data, dtype=dtype).view(block.sizes))
                    num_bytes += len(data)
    return num_bytes


def _newest(checkpoints: Path) -> Path | None:
    steps = committed_steps(checkpoints)
    if steps:
        return checkpoints / step_name(steps[0])
    aside = quarantined(checkpoints)
    if aside:
        raise BadCheckpoint(
            f"{checkpoints} holds no whole checkpoint, only {list_names(aside)}",
            "a run whose checkpoints are all bad is not started over silently",
            "copy a whole checkpoint back as step-<number>, or delete the bad ones to start at step 0",
        )
    return None


def load_newest(
    checkpoints: Path, tensors: dict[str, torch.Tensor], exchange: Exchange, log: Callable[[str], None]
) -> dict[str, Any] | None:
    """See Checkpoints.restore."""

    def put_aside(directory: Path, error: BadCheckpoint) -> None:
        target = quarantine(directory)
        log(f"checkpoint refused: {error.given}. It is now {target.name}; the next older one is tried.")

    while (directory := exchange.from_first(lambda: _newest(checkpoints))) is not None:
        try:
            return load_one(directory, tensors, "all", exchange, log)
        except BadCheckpoint as error:
            exchange.from_first(partial(put_aside, directory, error))
    return None


def candidates(path: Path) -> list[Path]:
    """The checkpoints that `path` names, newest first: one checkpoint, a run directory, or its `checkpoints`."""
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise _no_checkpoint(f"{path} {kind}")
    if (path / MANIFEST).exists():
        return [path]
    for checkpoints in (path / "checkpoints", path):
        steps = committed_steps(checkpoints)
        if steps:
            return [checkpoints / step_name(step) for step in steps]
    listed = list_names(sorted(entry.name for entry in path.iterdir()))
    raise _no_checkpoint(f"{path} has neither a MANIFEST nor a committed step; it holds {listed or 'nothing'}")


def _no_checkpoint(given: str) -> BadCheckpoint:
    return BadCheckpoint(
        given,
        "a checkpoint is read from a run directory with committed checkpoints, or from its own directory",
        "correct the path; `windlass checkpoint list RUN` shows what a run has",
    )


def load_path(
    path: Path, tensors: dict[str, torch.Tensor], what: str, exchange: Exchange, log: Callable[[str], None]
) -> dict[str, Any]:
    """See Checkpoints.restore_from."""
    if what not in WHATS:
        raise UserError(f"start_what is {what!r}", f"it is one of {', '.join(WHATS)}", "choose one of them")
    found: list[Path] = exchange.from_first(lambda: candidates(path))
    for older, directory in enumerate(found, start=1):
        try:
            return load_one(directory, tensors, what, exchange, log)
        except BadCheckpoint as error:
            if older == len(found):
                raise
            if exchange.rank == 0:
                log(f"checkpoint refused: {error.given}. {found[older].name} is tried; nothing was renamed.")
    raise AssertionError("candidates are never empty")
