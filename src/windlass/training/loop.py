"""The loop. It knows no technique: layouts live behind `program`, data behind `source`, objectives behind `objective`."""

from dataclasses import dataclass
from pathlib import Path

from windlass.config import RunConfig
from windlass.optim.clip import clip_gradients
from windlass.optim.schedule import learning_rate
from windlass.runtime import Stop, start_runtime
from windlass.training.assemble import assemble
from windlass.training.run import Run


@dataclass(frozen=True)
class Result:
    """What `train` gives back. `stopped`: a signal ended the run early, after a checkpoint; the same call goes on."""

    directory: Path
    step: int
    stopped: bool


def train(config: RunConfig, is_prepared: bool = False) -> Result:
    """Trains as `config` says, on every rank alike, from where the run directory stands. Raises UserError.

    `is_prepared`: the launcher has just prepared the data, so sources are not looked at again.
    """
    with start_runtime() as runtime, assemble(config, runtime, is_prepared) as run, Stop(runtime) as stop:
        return loop(run, stop)


def loop(run: Run, stop: Stop) -> Result:
    """From the step that `run` stands at to its last, or to where a signal stops it."""
    config, step = run.config, run.start_step
    if step == 0:
        run.validate(step)
        run.save_if_due(step)
    while step < run.total_steps:
        rate = learning_rate(step, run.total_steps, config.optim)
        run.optimizer.set_learning_rate(rate)
        batches = run.source.next()  # this rank's micro-batches of global batch `step`
        batches, count = run.objective.weigh(batches, run.program)  # and how many targets count, over all ranks
        loss = run.program.run(batches, count)  # forward + backward, whatever the layout
        norm = clip_gradients(run.program.records(), config.optim.max_norm, run.program.mesh.parts)
        run.optimizer.step(norm)  # skipped on all ranks alike where the norm is not finite
        run.program.adapt(norm)  # what the next backward learns from it
        step += 1
        run.record(step, loss, norm, rate, count)  # raises where every step is skipped
        stopping = stop.after(step)
        if run.validation_is_due(step):
            run.validate(step)
        run.save_if_due(step, is_last=stopping)
        if stopping:
            break
    stopped = step < run.total_steps
    run.close(step, "stopped" if stopped else "finished")
    return Result(config.run.directory, step, stopped)
