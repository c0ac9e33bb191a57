"""The assembled parts of a training run, and what happens between steps: validate, record, close."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.mirror import Mirror
from windlass.config import RunConfig
from windlass.data.batch_fields import Batch
from windlass.data.prepare.prepare import Prepared
from windlass.data.stream.batch_source import SOURCES, BatchSource
from windlass.data.stream.evaluation_set import EvaluationSet
from windlass.data.stream.ledger import samples_before
from windlass.errors import EXIT_STOPPED, UserError
from windlass.model.architecture import Architecture
from windlass.objectives.objective import Objective, is_ours
from windlass.optim.optimizer import Optimizer
from windlass.parallel.program import Program
from windlass.parallel.runtime_checks import Replicas
from windlass.profiling.recorder import StepRecorder
from windlass.report.metrics import Recorder
from windlass.report.page.child import write_in_child
from windlass.report.sinks.sink import Sink
from windlass.report.sinks.start import following, sending
from windlass.runtime import Runtime
from windlass.safe_text import say
from windlass.status import State, write_status
from windlass.supervise.heartbeat import Heartbeat
from windlass.training.health import Health, Spike
from windlass.training.parts.open_data import by_source, evaluate_set, labels_of
from windlass.training.sizing.compiled import refuse_races


@dataclasses.dataclass
class Run:
    """Made by training/assemble, used by the loop. `config` is resolved: its `run.steps` is a number."""

    config: RunConfig
    architecture: Architecture
    runtime: Runtime
    prepared: Prepared
    program: Program
    optimizer: Optimizer
    replicas: Replicas
    objective: Objective
    source: BatchSource
    evaluation_sets: Mapping[str, EvaluationSet]
    checkpoints: Checkpoints
    mirror: Mirror | None
    """Copies of the checkpoints in a store; on rank 0, where the recipe names one."""
    recorder: Recorder
    provenance: dict[str, Any]
    base: dict[str, Any] | None
    """Which files the frozen base of an adapter is (see training/start/base_model); None without an adapter."""
    base_files: Mapping[str, bytes | Path]
    """Files of a checkpoint on the model that this run began from (see training/start/base_model)."""
    start_step: int
    health: Health
    schedule: Callable[[int, int], float]
    """(completed steps, all steps) -> the learning rate of the next update."""
    sinks: Sequence[Sink] = ()
    """Sinks of a script that calls `train`, besides those that the recipe names."""
    opened: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """What is let go of at the end, however the run ends: the lock on the directory, the log beside the terminal, the batches."""
    heartbeat: Heartbeat = dataclasses.field(default_factory=Heartbeat)
    """Where this rank says what it does; memory of its own where nobody watches the run."""
    profiler: StepRecorder | None = None
    metric: float | None = None
    """The last loss on the first validation set: by it the best checkpoints are kept."""
    metric_step: int = -1
    step: int = -1
    """The step that the last status names (see windlass.status)."""

    def __enter__(self) -> Self:
        self.report_status("running", self.start_step)
        if self.runtime.rank == 0:
            self.opened.enter_context(following(self.config.run.directory, self.config.report.sinks, say))
            self.opened.enter_context(sending(self.config.run.directory, self.sinks, say))
        if self.mirror is not None and self.start_step:
            self.mirror.offer(self.start_step)  # where the process before was killed in its copy
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that ends by an error leaves that in its status; `close` has written any other end. The run directory may be
        used by another process, or by another run in this one, from here on."""
        if error is not None:
            self.report_status("failed", self.step, self.runtime.exit_code(error))
            # of several ranks one may be gone, and a second Ctrl-C does not wait
            if self.runtime.world == 1 and isinstance(error, Exception):
                with contextlib.suppress(UserError, OSError):
                    self.checkpoints.wait()
            if self.mirror is not None and isinstance(error, Exception):
                with contextlib.suppress(UserError):
                    self.mirror.close()
        self.opened.__exit__(kind, error, trace)

    def attach(self, heartbeat: Heartbeat) -> None:
        """From here on this rank says where it is, and may be asked for a profile."""
        self.heartbeat = heartbeat
        axes = self.program.mesh.axes_of_groups() | {self.runtime.control.group_name: "control"}
        where = self.config.run.directory, self.runtime.rank, self.runtime.device
        counted = self.start_step + 2 if self.runtime.rank == 0 else None  # the first compiles and makes states
        self.profiler = StepRecorder(*where, axes, heartbeat, self.recorder, counted)
        self.opened.callback(self.profiler.close)

    def report_status(self, state: State, step: int, exit_code: int | None = None) -> None:
        self.step = step
        if self.runtime.rank == 0:
            write_status(self.config.run.directory, state, step, exit_code)

    @property
    def total_steps(self) -> int:
        assert self.config.run.steps is not None
        return self.config.run.steps

    def next_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of the global batch that follows on update `step`."""
        if self.profiler is not None:
            self.profiler.between_steps(step)
        self.heartbeat.beat("data", step, self.source.consumed + self.config.samples_per_step)
        batches = self.source.next()
        if not self.recorder.is_due(step + 1):  # the loss of each source is added up for the lines of the log alone
            batches = [{name: value for name, value in batch.items() if name != SOURCES} for batch in batches]
        self.heartbeat.beat("step", position=self.source.consumed)
        return batches

    def record(self, step: int, loss: torch.Tensor, norm: torch.Tensor, rate: float, count: torch.Tensor) -> None:
        """After update `step`: the metrics, and on logging steps whether the run still learns. Raises Diverged, on all ranks."""
        self.heartbeat.beat("record", step)
        if step == self.start_step + 1 and self.config.parallel.compiles:
            refuse_races(self.runtime)
        if self.profiler is not None:
            self.profiler.after_update(step)
        is_due = self.recorder.is_due(step)
        for event in self.source.drain_events(is_due):
            self.recorder.event(event.kind, step, **event.fields)
        self.health.add(loss, norm, self.source.consumed)
        skipped = self.health.look() if is_due else 0
        for spike in self.health.spikes():
            self._log_spike(spike)
        figures = {**self.program.figures(), **self.objective.figures()} if is_due else {}
        numbers: dict[str, Any] = {name: value.tolist() for name, value in figures.items()}
        if "source_losses" in numbers:
            numbers["source_losses"] = by_source(self.config, numbers["source_losses"])
        self.recorder.step(step, loss, norm, rate, count, self.source.wait_s, skipped, numbers)
        if is_due:
            self.report_status("running", step)
            self.health.look_for_stagnation(self.optimizer)
            self.health.end_if_diverged()

    def _log_spike(self, spike: Spike) -> None:
        if self.runtime.rank:
            return
        ids = samples_before(self.source.entry(), spike.end, self.config.samples_per_step, self.source.shards)
        self.recorder.event("incident", spike.step, **spike.fields(self.config.samples_per_step, ids))

    def validation_is_due(self, step: int) -> bool:
        return step % self.config.evaluate.every_steps == 0 or step == self.total_steps

    def validate(self, step: int) -> None:
        """Scores every set, always on the same sequences; the first set's loss decides what the best checkpoint is."""
        self.heartbeat.beat("evaluate", step)
        with self.recorder.pause("evaluate"):
            for index, (name, data) in enumerate(self.evaluation_sets.items()):
                total, count, figures = evaluate_set(data, labels_of(self.config, name), self.objective, self.program)
                self.recorder.validation(step, name, total, count, data.bytes_of(count), figures)
                if index == 0:
                    self.metric, self.metric_step = total / count, step

    def baselines(self) -> dict[str, dict[str, float]]:
        """What the model must beat, where it is scored on the same tokens: on the whole validation set, by our own objective."""
        if not is_ours(self.objective, "targets") or "validation" not in self.evaluation_sets:
            return {}
        scored, info = self.evaluation_sets["validation"].num_targets, self.prepared.sets["validation"]
        if self.config.data.isolate:
            return self.prepared.isolated_baselines if scored == info.tokens - info.documents else {}
        return self.prepared.baselines if scored == info.tokens else {}

    def _write_report(self) -> None:
        """A run that has ended well ends well without its page, too: `windlass report` writes it later."""
        try:
            write_in_child(self.config.run.directory)
        except UserError as error:
            say(error.given)

    def close(self, step: int, reason: Literal["stopped", "finished"], signal: str | None = None) -> None:
        """After the last step: the last checkpoint committed, the summary printed, the report written. `signal`: what stopped
        the run, as SIGTERM."""
        self.heartbeat.beat("end", step)
        if self.profiler is not None:
            self.profiler.finish(step)
        self.recorder.end(step, reason, self.baselines(), signal)
        if self.runtime.rank == 0:
            self._write_report()
        if self.mirror is not None:
            say(f"copied to {self.mirror.close()}")
        self.report_status(reason, step, EXIT_STOPPED if reason == "stopped" else 0)
