"""What the trainer calls: save, wait, restore.

    checkpoints = Checkpoints(run_directory / "checkpoints", config, run_id=..., rank=..., world=..., group=...)
    trainer_state = checkpoints.restore(tensors)                 # None: nothing was ever committed
    ...
    if checkpoints.due(step, has_agreed): checkpoints.save(step, tensors, trainer_state, files, metric)
    for saved in checkpoints.poll(): ...                   # what was committed since: the events of the run
    ...
    checkpoints.save(step, tensors, trainer_state, files, final=True)

A checkpoint holds `tensors` (name -> Tensor or DTensor, sharded or replicated: weights, optimizer state, 0-dim
counters), the trainer state (JSON: step, data position, schedule, fingerprints) and `files` (resolved recipe,
tokenizer, provenance). Rank 0 writes the last two. One directory with one MANIFEST holds all of it, so a copy of the
directory is a whole checkpoint.

Asynchronous: `save` copies what this rank writes into host buffers, which it keeps between saves, and returns. A thread
writes and commits over its own gloo group while training goes on. One save runs at a time: the next one waits for it
first.

Who reads what on restore. Rank 0 reads MANIFEST, index.json, trainer_state.json and lists the directory (names and sizes),
and hands them to all ranks. Every rank then reads the rows its own shards need, in pieces of at most 4 MiB, and
verifies each piece before a byte of it reaches a tensor. At least one rank reads each tensor, and the pieces tile the
files, so a rank verifies every byte that it uses, and reads none only to verify it. Bytes read per rank: its shards,
rounded up to pieces, and replicated tensors; in the layout that saved, 1/world of the checkpoint. If one rank finds a
bad piece, all ranks drop the checkpoint together, rank 0 quarantines it, and the next older one overwrites every
tensor.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windlass.checkpoint.commit import sweep
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.keep import prune, size_problems
from windlass.checkpoint.manifest import INDEX, MANIFEST, SCHEMA, TRAINER_STATE, step_name
from windlass.checkpoint.restore import load_newest, load_path
from windlass.checkpoint.save import Plan, TensorWriter, plan_save, write_planned
from windlass.checkpoint.sealed_json import seal
from windlass.checkpoint.staging import Staging
from windlass.errors import UserError
from windlass.ranks.owned_part import local_part
from windlass.safe_text import say


@dataclass(frozen=True)
class SavedStep:
    """A committed save. `stall_s`: seconds that training waited for it. `elapsed_s`: until it was committed.
    `not_deleted`: '', or why old checkpoints could not be deleted after it."""

    step: int
    directory: Path
    num_bytes: int
    metric: float | None
    stall_s: float
    elapsed_s: float
    not_deleted: str


def _to_stderr(sentence: str) -> None:
    say(sentence, sys.stderr)


@dataclass(frozen=True)
class _Job:
    """One save, as `save` was called."""

    step: int
    trainer_state: str
    other_files: dict[str, bytes | Path]
    metric: float | None
    start_s: float

    def files(self, token: str) -> dict[str, bytes | Path]:
        body = {
            "schema_version": SCHEMA,
            "step": self.step,
            "token": token,
            "trainer_state": json.loads(self.trainer_state),
        }
        return {**self.other_files, TRAINER_STATE: seal(body)}


class Checkpoints:
    """The checkpoints of one run. Every rank makes one, and all call save, wait and restore together, in the same order.

    `directory`: `<run>/checkpoints`. `run_id` stays the same over restarts of a run; by it leftovers are known as our
    own. `group`: a gloo group of all ranks for checkpoints alone (None where world is 1). `log`: called on rank 0
    with each sentence for the user (a quarantined checkpoint, removed drafts). `held`: steps that must not be deleted now.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        run_id: str,
        rank: int,
        world: int,
        group: dist.ProcessGroup | None,
        log: Callable[[str], None] = _to_stderr,
        held: Callable[[], Collection[int]] = tuple,
    ):
        self._directory, self._config, self._run_id = directory, config, run_id
        self._exchange, self._rank, self._log = Exchange(rank, world, group), rank, log
        self._held = held
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        self._pending: Future[SavedStep] | None = None
        self._saved: list[SavedStep] = []
        self._staging, self._plan = Staging(), Plan()
        self._made: Future[None] | None = None
        self._last_step: int | None = None
        self._last_time_s = time.monotonic()
        self._swept = False

    def make_ready(self, tensors: dict[str, torch.Tensor]) -> None:
        """Plans saves of `tensors`, and makes the host memory of asynchronous ones, in the background: the first save waits for
        neither. Collective."""
        self._made = self._thread.submit(self._make_ready, tensors)

    def _make_ready(self, tensors: dict[str, torch.Tensor]) -> None:
        plan_save(tensors, self._exchange, self._plan)
        if self._config.async_:
            self._staging.make(self._written(tensors))

    def _written(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that this rank writes."""
        written = self._plan.written
        return {name: tensor for name, tensor in tensors.items() if name in written}

    def due(self, step: int, has_agreed: bool = False) -> bool:
        """Whether to save after `step` updates. `has_agreed`: all ranks save now whatever the step, see `is_late`."""
        config = self._config
        by_step = config.every_steps is not None and step > 0 and step % config.every_steps == 0
        return step != self._last_step and (by_step or has_agreed or step in config.keep_steps)

    @property
    def is_late(self) -> bool:
        """Whether every_minutes has passed since the last save, by this process's clock.

        Clocks differ between ranks: if each rank went by its own, some would save and others would not. So rank 0 decides by
        its clock and broadcasts the answer. The trainer does so on logging steps alone (training/saving.py): a save by the
        clock begins on the first logging step after it is due.
        """
        minutes = self._config.every_minutes
        return minutes is not None and time.monotonic() - self._last_time_s >= 60 * minutes

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        trainer_state: dict[str, Any],
        files: dict[str, bytes | Path],
        metric: float | None = None,
        final: bool = False,
    ) -> bool:
        """Saves; True unless this very step is saved already. Returns when it is committed, or staged if asynchronous.

        `final`: wait for the commit in any case. Raises what the previous asynchronous save failed with, else DiskFull,
        UserError (this step is committed already) or the error of the write: on all ranks alike.
        """
        self.wait()
        if step == self._last_step:
            return False
        start_s = time.monotonic()
        plan_save(tensors, self._exchange, self._plan)
        assert not {MANIFEST, INDEX, TRAINER_STATE} & set(files), "a name that is written here"
        metric = metric if metric is not None and math.isfinite(metric) else None
        job = _Job(step, json.dumps(trainer_state, allow_nan=False), dict(files), metric, start_s)
        if self._config.async_ and not final:
            local = self._staging.copy(self._written(tensors))
            self._pending = self._thread.submit(self._write, job, local, time.monotonic() - start_s)
        else:
            is_far = any(tensor.device.type != "cpu" for tensor in tensors.values())  # a copy to new memory is slow
            staged = self._config.async_ and is_far
            own = self._written(tensors)
            local = self._staging.copy(own) if staged else {name: local_part(tensor) for name, tensor in own.items()}
            self._saved.append(self._write(job, local, None))
        self._last_step, self._last_time_s = step, time.monotonic()
        return True

    @property
    def _has_failed(self) -> bool:
        """Whether the background save has failed on this rank. Local, free, raises nothing.

        A save ends at another moment on each rank, so a rank of several that raised by itself would leave the others in a
        collective. It trains on, and the next `save` or `wait`, which all ranks call, raises the same error on each.
        """
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def poll(self) -> list[SavedStep]:
        """What was committed since the last call, for the log. Local and free.

        A failure is not lost: one rank raises it here, several raise it together in the next `save` or `wait`.
        """
        if self._pending is not None and self._pending.done() and not (self._has_failed and self._exchange.world > 1):
            self.wait()
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> None:
        """Returns when no save is under way (`poll` returns what was committed). Raises its error, on all ranks alike."""
        made, self._made = self._made, None
        if made is not None:
            made.result()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.exception() is not None:
            self._last_step = None  # that step is not saved; it may be tried again
        self._saved.append(pending.result())

    def restore(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any] | None:
        """Fills `tensors` in place from the newest whole checkpoint -> its trainer state; None where none was ever committed.

        It has `step`. Any world size and sharding. Bad checkpoints are quarantined with a sentence, the next
        older is used. Raises BadCheckpoint when there are checkpoints and none is whole, UserError when names, shapes
        or dtypes differ.
        """
        self._sweep()
        found = load_newest(self._directory, tensors, self._exchange, self._log)
        if found is not None:
            self._last_step, self._last_time_s = found["step"], time.monotonic()
        return found

    def restore_from(self, path: Path, tensors: dict[str, torch.Tensor], what: str = "all") -> dict[str, Any]:
        """Restores from a run directory or one checkpoint anywhere, which stays as it is. `what`: weights or all.

        With "weights" the checkpoint may hold more tensors than are asked for, and a dtype may differ (it is
        converted). A path that holds no checkpoint is a UserError, never a fresh start.
        """
        self._sweep()
        return load_path(path, tensors, what, self._exchange, self._log)

    def _sweep(self) -> None:
        if self._rank == 0 and not self._swept:
            count = sweep(self._directory, self._run_id)
            if count:
                self._log(f"{self._directory}: removed {count} unfinished save{'s' if count > 1 else ''} of this run")
        self._swept = True

    def _write(self, job: _Job, local: dict[str, torch.Tensor], stall_s: float | None) -> SavedStep:
        """Write, commit, prune: on all ranks, in the background or not. stall_s None: training waits for all of it."""
        writer = TensorWriter(self._directory, job.step, self._run_id, job.files, job.metric)
        write_planned(local, writer, self._exchange, self._plan)
        num_bytes, not_deleted = self._exchange.from_first(lambda: self._prune(writer))
        elapsed_s = time.monotonic() - job.start_s
        directory = self._directory / step_name(job.step)
        stall_s = elapsed_s if stall_s is None else stall_s
        return SavedStep(job.step, directory, num_bytes, job.metric, stall_s, elapsed_s, not_deleted)

    def _prune(self, writer: TensorWriter) -> tuple[int, str]:
        """Rank 0, after the commit -> bytes of the new checkpoint, and why old ones could not be deleted. That is no failure: the
        step is saved, and the next save tries again."""
        assert writer.manifest is not None
        try:
            prune(self._directory, self._config, size_problems, self._held())
        except (UserError, OSError) as error:
            return writer.manifest.num_bytes, str(error)
        return writer.manifest.num_bytes, ""
