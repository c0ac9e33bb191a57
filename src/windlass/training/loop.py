"""The loop. It knows no technique: layouts live behind `program`, data behind `source`, objectives behind `objective`."""

import html
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windlass.config import RunConfig
from windlass.contract import adopt
from windlass.data.stream.batch_source import BatchSource
from windlass.errors import Stopped
from windlass.mistakes import check_is_recipe
from windlass.model.families.family import Family
from windlass.objectives.objective import Objective
from windlass.optim.clip import gradient_norm
from windlass.precision.same_bits import same_bits
from windlass.ranks.stopping import Stop
from windlass.report.sinks.sink import Sink
from windlass.runtime import is_embedded, start_runtime
from windlass.signals import catch_signals
from windlass.training.assemble import assemble
from windlass.training.interruptible import interruptible, only_run
from windlass.training.memory_advice import out_of_memory
from windlass.training.parts.own_parts import OwnParts
from windlass.training.run import Run
from windlass.training.run_directory import finished_step
from windlass.training.saving import save_if_due
from windlass.training.sizing.out_of_memory import explained
from windlass.training.watch_ranks import open_heartbeat, watched


@dataclass(frozen=True)
class Result:
    """What `train` returns."""

    directory: Path
    step: int
    """Completed optimizer steps."""
    stopped: bool
    """A signal ended the run early, after a checkpoint; the same call goes on."""
    signalled: bool = False
    """This very rank received it."""

    def _repr_html_(self) -> str | None:
        """What a notebook shows of a result: the report of the run."""
        page = self.directory / "report.html"
        if not page.is_file():
            return None
        text = html.escape(page.read_text("utf-8"))
        return f'<iframe title="report" srcdoc="{text}" style="width: 100%; height: 80vh; border: 0"></iframe>'


def train(
    config: RunConfig,
    *,
    objective: Objective | None = None,
    source: Callable[[BatchSource], BatchSource] | None = None,
    schedule: Callable[[int, int], float] | None = None,
    family: type[Family] | None = None,
    sinks: Sequence[Sink] = (),
    on_event: Callable[[dict[str, Any]], None] | None = None,
    signals: bool = True,
    raise_on_stop: bool = False,
) -> Result:
    """Trains as `config` says, on every rank alike, from the last checkpoint of the run directory. Raises WindlassError;
    whatever it raises, it has let go of the run directory, stdout, its signal handlers and, on one process, the process group.

    `signals`: SIGTERM, SIGINT, SIGUSR1 and SIGHUP save and stop; off the main thread, or in a process group of the caller's,
    they are not caught. `raise_on_stop`: a run that a signal ended raises Stopped, for callers that retry by exceptions.

    Parts of the caller's own, on every rank alike (docs/howto/python.md lists a page of each): `objective` in place of the
    recipe's; `source`, called with the stream of batches, returns the one that is read; `schedule(completed steps, all steps)`
    is the learning rate of the next update; `family` is the class of the model family that the recipe names; `sinks` are sent the
    logged numbers, off the step; `on_event` is called on rank 0 with each line of events.jsonl. The last two cannot change
    the run: where they raise, it goes on without them.
    """
    check_is_recipe("train", config)
    own = OwnParts(objective, source, schedule, family, sinks, on_event)
    is_ours = signals and not is_embedded()
    if not is_embedded():
        adopt()  # before what asks for this process's rank
    with only_run(), catch_signals(is_ours) as caught, ExitStack() as opened:
        with interruptible(config.run.directory):
            heartbeat = opened.enter_context(open_heartbeat(config.run.directory, is_ours))
            opened.enter_context(same_bits(config.run.deterministic))
            runtime = opened.enter_context(start_runtime())
            if (finished := finished_step(config, runtime)) is not None:
                return Result(config.run.directory, finished, stopped=False)
            opened.enter_context(watched(config, runtime, is_ours))
            run = opened.enter_context(assemble(config, runtime, own=own))
            run.attach(heartbeat)
        with explained(partial(out_of_memory, run)):
            result = loop(run, Stop(runtime.tree, runtime.store, runtime.device, caught))
    if result.stopped and raise_on_stop:
        raise Stopped(
            f"the run in {result.directory} was stopped after step {result.step}, and saved",
            "a signal asked for it",
            "the same call goes on from there",
        )
    return result


def loop(run: Run, stop: Stop) -> Result:
    """From the step that `run` starts at to its last, or to where a signal stops it."""
    config, step = run.config, run.start_step
    if step == 0:
        run.validate(step)
        save_if_due(run, step)
    while step < run.total_steps:
        rate = run.schedule(step, run.total_steps)
        run.optimizer.set_learning_rate(rate)
        batches = run.next_batches(step)  # this rank's micro-batches of global batch `step`
        batches, count = run.objective.weigh(batches, run.program)  # and how many targets count, over all ranks
        loss = run.program.run(batches, count)  # forward + backward, whatever the layout
        run.heartbeat.beat("update")
        norm = gradient_norm(run.program.records(), run.program.mesh.pp_group)
        run.optimizer.step(norm)  # clips; skipped on all ranks alike where the norm is not finite
        run.program.adapt(norm)  # what the next backward learns from it
        step += 1
        run.record(step, loss, norm, rate, count)  # raises where every step is skipped
        stopping = stop.after(step)
        if run.validation_is_due(step):
            run.validate(step)
        save_if_due(run, step, is_last=stopping)
        if stopping:
            break
    stopped = step < run.total_steps
    run.close(step, "stopped" if stopped else "finished", stop.signal() if stopped else None)
    return Result(config.run.directory, step, stopped, stop.is_signalled)
