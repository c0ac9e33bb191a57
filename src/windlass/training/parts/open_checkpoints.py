"""The checkpoints of a run and their mirror, opened: under the run's id, and refused where those of before are gone."""

import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.commit import check_takes_steps, committed_steps, named_errors, quarantined
from windlass.checkpoint.mirror import Mirror, fetch_newest, open_remote
from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.report.events import last_saved_step
from windlass.runtime import Runtime
from windlass.safe_text import say

RUN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as a manifest holds it


def fetch_run(config: RunConfig) -> None:
    """What a store holds of this run and this directory does not: its newest checkpoint and its events. Rank 0 or the launcher
    calls it, alone."""
    if config.checkpoint.remote is not None:
        fetch_newest(open_remote(config.checkpoint.remote), config.run.directory, say)


def open_mirror(config: RunConfig, runtime: Runtime) -> Mirror | None:
    """The mirror of rank 0, which copies what is committed; None on other ranks, and where the recipe names no store."""
    if config.checkpoint.remote is None or runtime.rank != 0:
        return None
    return Mirror(open_remote(config.checkpoint.remote), config.run.directory, config.checkpoint)


def open_checkpoints(
    config: RunConfig, runtime: Runtime, log: Callable[[str], None], mirror: Mirror | None
) -> Checkpoints:
    """The checkpoints of a run, whose id rank 0 draws when the run begins. Collective. Raises UserError."""
    check_takes_steps(config.run.directory / "checkpoints")
    lost = _lost_step(config.run.directory) if runtime.rank == 0 else 0
    _refuse_lost(config.run.directory, int(runtime.max_over_ranks(lost)))
    run_id = runtime.shared(_run_id(config.run.directory / "run.json", log) if runtime.rank == 0 else "")
    return Checkpoints(
        config.run.directory / "checkpoints",
        config.checkpoint,
        run_id=run_id,
        rank=runtime.rank,
        world=runtime.world,
        group=runtime.saving if runtime.world > 1 else None,
        log=log,
        held=tuple if mirror is None else mirror.held,
    )


def check_saved_is_there(directory: Path) -> None:
    """Raises UserError where a run has saved, and nothing of it is there: it would begin anew without a word."""
    _refuse_lost(directory, _lost_step(directory))


def _refuse_lost(directory: Path, step: int) -> None:
    if step:
        raise UserError(
            f"{directory} has saved step {step}, by its events.jsonl, and {directory / 'checkpoints'} holds no checkpoint",
            "a run resumes from its newest checkpoint, and a new run needs a directory of its own",
            "bring the checkpoints back (is their storage mounted?), or choose another run.directory",
        )


def _lost_step(directory: Path) -> int:
    """The last step that was saved, where no checkpoint is there; 0 where one is, and where none was."""
    checkpoints = directory / "checkpoints"
    is_there = committed_steps(checkpoints) or quarantined(checkpoints)
    return 0 if is_there else last_saved_step(directory / "events.jsonl")


def _run_id(file: Path, log: Callable[[str], None]) -> str:
    """The run's id, drawn where there is none. Leftovers of saves are known by it, and nothing else, so a damaged file costs no
    more than drafts that somebody has to delete."""
    try:
        run_id = json.loads(file.read_text("utf-8"))["run_id"]
        if RUN_ID.fullmatch(run_id):
            return run_id
        raise ValueError(run_id)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        log(
            f"{file} is damaged: the run has a new id; drafts (.tmp-*) of saves that were killed before stay in checkpoints/"
        )
    run_id = secrets.token_hex(8)
    draft = file.with_suffix(".draft")
    content = json.dumps({"run_id": run_id})
    with named_errors(file.parent, len(content), "a run"):
        draft.write_text(content)
        draft.replace(file)  # whole or not there, however the process ends
    return run_id
