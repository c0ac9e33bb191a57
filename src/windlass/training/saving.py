"""The saves of a run: when one is due, what a checkpoint holds, and what the log says of it."""

import json
from pathlib import Path
from typing import Any

from windlass.config import to_yaml
from windlass.errors import OutOfSync, UserError
from windlass.model.families.family_table import to_hf
from windlass.training.run import Run
from windlass.training.run_directory import model_header
from windlass.training.start.restore import compared_tensors, state_tensors


def save_if_due(run: Run, step: int, is_last: bool = False) -> None:
    """A checkpoint after update `step` where the recipe asks for one, at the end, and when the run is stopped."""
    is_last = is_last or step == run.total_steps
    _log_committed(run, step)
    _log_copies(run, step)
    if not (run.checkpoints.due(step, _is_wanted(run, step)) or is_last):
        return
    run.heartbeat.beat("checkpoint", step)
    with run.recorder.pause("checkpoint"):
        _save(run, step, is_last)


def _save(run: Run, step: int, is_last: bool) -> None:
    """A save that fails does not end the run: it becomes an incident, and the next save tries again;
    only the last must succeed. A failed background save comes to light here, on all ranks alike. Raises OutOfSync."""
    try:
        run.checkpoints.wait()
    except (UserError, OSError) as error:
        _log_failure(run, step, error)
    tensors = state_tensors(run.program, run.optimizer)
    try:
        run.replicas.compare(compared_tensors(run.program, run.optimizer), step)
    except OutOfSync as error:
        _log_failure(run, step, error)
        raise
    try:
        metric = run.metric if run.metric_step == step else None  # a loss is of the weights it was measured on
        run.checkpoints.save(step, tensors, _trainer_state(run, step), _files(run), metric, final=is_last)
    except (UserError, OSError) as error:
        _log_failure(run, step, error)
        if is_last:
            raise
    _log_committed(run, step)


def _log_committed(run: Run, step: int) -> None:
    """A checkpoint is an event once it is committed, not when it is begun. (One process alone hears of a failure here.)"""
    try:
        committed = run.checkpoints.poll()
    except (UserError, OSError) as error:
        _log_failure(run, step, error)
        return
    for saved in committed:
        run.recorder.event("checkpoint", saved.step, stall_s=round(saved.stall_s, 3), bytes=saved.num_bytes)
        if run.mirror is not None:
            run.mirror.offer(saved.step)
        if saved.not_deleted:
            run.recorder.event("incident", saved.step, what="old checkpoints not deleted", error=saved.not_deleted)


def _log_copies(run: Run, step: int) -> None:
    for copied in run.mirror.poll() if run.mirror is not None else ():
        if copied.error is not None:
            what = f"the checkpoint of step {copied.step} is not copied: the next is tried"
            run.recorder.event("incident", step, what=what, error=str(copied.error))


def _log_failure(run: Run, step: int, error: Exception) -> None:
    run.recorder.event("incident", step, what="checkpoint not saved", error=str(error))


def _is_wanted(run: Run, step: int) -> bool:
    """Rank 0 decides for all, by its clock, or because the disk of events.jsonl has filled: then one save is tried, while a
    checkpoint may still fit. Asked on logging steps only, since the answer is sent to every rank."""
    if step == 0 or step % run.config.report.every_steps:
        return False
    has_filled = run.recorder.disk_filled()
    return run.runtime.shared(run.checkpoints.is_late or has_filled)


def _trainer_state(run: Run, step: int) -> dict[str, Any]:
    """The rest of the state: small, the same on all ranks, JSON."""
    return {
        "step": step,
        **run.source.state(),
        "norms": run.health.recent(),
        "sequences_per_step": run.config.sequences_per_step,
        "total_steps": run.total_steps,
        "model": to_hf(run.architecture),
        "config": run.config.kept(),
        "data": {"stream": run.prepared.stream, "corpus_hash": run.prepared.corpus_hash},
        "world": run.runtime.world,
        "device": run.runtime.device_name(),
        **({} if run.base is None else {"base": run.base}),
    }


def _files(run: Run) -> dict[str, bytes | Path]:
    """What makes a checkpoint sufficient by itself: recipe, tokenizer, provenance, the files on the model it began from."""
    tokenizer = Path(run.prepared.tokenizer_directory)
    files: dict[str, bytes | Path] = {f"tokenizer/{path.name}": path for path in sorted(tokenizer.iterdir())}
    files |= run.base_files
    files["resolved.yaml"] = (model_header(run.architecture) + to_yaml(run.config)).encode()
    files["provenance.json"] = json.dumps(run.provenance, indent=1).encode()
    return files
