"""`windlass prepare --tokenizer-only` and `--part`: what each of several machines does of a preparation. It loads no torch."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from windlass.config import RunConfig
from windlass.data.prepare import part as room
from windlass.data.prepare.part_record import Part
from windlass.errors import UserError
from windlass.training.start.pins import pin_tokenizer


def prepare_pinned_tokenizer(config: RunConfig) -> None:
    """The first step of a preparation in parts. Raises UserError."""
    config = pin_tokenizer(config)
    room.prepare_tokenizer(config.data, config.evaluate.sets)


def prepare_numbered_part(config: RunConfig, text: str) -> None:
    """One part: `text` is I/N, or what `chosen_part` understands. Raises UserError."""
    part = chosen_part(text)
    config = pin_tokenizer(config)
    room.prepare_part(config.data, config.evaluate.sets, part)


def chosen_part(text: str) -> Part:
    """I/N; or `auto`, which takes both from the variables of an array of tasks, or `auto/N` where these name no N. Raises
    UserError."""
    begin, _, count = text.partition("/")
    if begin != "auto":
        return Part.of_text(text)
    task = array_task()
    if task is None:
        raise UserError(
            f"--part {text} in a process that is no task of an array",
            "SLURM_ARRAY_TASK_ID, BATCH_JOB_ARRAY_INDEX_VAR_NAME (Flyte) or JOB_COMPLETION_INDEX (Kubernetes) says which it is",
            "start it as one, or give the part: --part 0/8",
        )
    if task.of is None and not count:
        given, rule = (
            f"--part auto with {task.name}={task.number}",
            f"{task.name} does not come with the number of tasks",
        )
        raise UserError(given, rule, "give it: --part auto/8")
    if task.of is not None and count not in ("", str(task.of)):
        given = f"--part {text} in an array of {task.of} tasks"
        raise UserError(given, "each task of the array is one part", f"give the part of this task: --part I/{count}")
    of = count or str(task.of)
    if of.isdigit() and task.number >= int(of):
        raise UserError(
            f"--part {text} with {task.name}={task.number}",
            f"the tasks of {of} parts are numbered from 0 to {int(of) - 1}",
            f"give the number of tasks that the array has: --part auto/{task.number + 1}, or more",
        )
    return Part.of_text(f"{task.number}/{of}") if of.isdigit() else Part.of_text(text)


class ArrayTask(NamedTuple):
    """One of many tasks that are alike. `name`: the variable that says which."""

    name: str
    number: int
    """From 0."""
    of: int | None
    """None where the scheduler does not export it."""


def array_task(environ: Mapping[str, str] = os.environ) -> ArrayTask | None:
    """Which task of a SLURM array, a Flyte map task or a Kubernetes indexed Job this process is, if any. Raises UserError."""
    if (slurm := "SLURM_ARRAY_TASK_ID") in environ:  # counts from where `--array` says, in its steps
        number, first = _number(slurm, environ), _number("SLURM_ARRAY_TASK_MIN", environ, 0)
        step, of = _number("SLURM_ARRAY_TASK_STEP", environ, 1) or 1, environ.get("SLURM_ARRAY_TASK_COUNT")
        at, rest = divmod(number - first, step)
        if rest or at < 0 or (of is not None and at >= _number("SLURM_ARRAY_TASK_COUNT", environ)):
            raise UserError(
                f"{slurm}={number} in an array of {of} tasks from {first} in steps of {step}",
                "the tasks of the array are numbered evenly, so that each is one part",
                "submit with --array=0-7, or give the part: --part I/N",
            )
        return ArrayTask(slurm, at, None if of is None else _number("SLURM_ARRAY_TASK_COUNT", environ))
    flyte, kubernetes = environ.get("BATCH_JOB_ARRAY_INDEX_VAR_NAME", ""), "JOB_COMPLETION_INDEX"
    if flyte in environ:  # of a subtask that is run again alone, Flyte exports where its index begins
        return ArrayTask(flyte, _number(flyte, environ) + _number("BATCH_JOB_ARRAY_INDEX_OFFSET", environ, 0), None)
    return ArrayTask(kubernetes, _number(kubernetes, environ), None) if kubernetes in environ else None


def _number(name: str, environ: Mapping[str, str], default: int | None = None) -> int:
    """The number in a variable; `default` where it is not there, or empty. Raises UserError."""
    given = environ.get(name, "")
    if not given and default is not None:
        return default
    if not given.isascii() or not given.isdigit():
        raise UserError(f"{name}={given}", "the scheduler's variable is a number", "give the part: --part I/N")
    return int(given)
