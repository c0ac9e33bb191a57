"""`train --smoke`: the whole life of a run at full size in 5 steps, before hours are spent on it.

Same recipe, layout, data and model, in a scratch directory beside the run's own: start, evaluate, save, be killed, resume,
finish, export. What breaks at step 10,000 of a real run (a checkpoint that does not fit the disk, an export that does not
load) breaks here.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from windlass.errors import UserError
from windlass.report.events import read_events, read_lines
from windlass.units import format_bytes, format_count, format_duration

STEPS = 5
SAVE_AT = 2
NEARLY = 1e-3  # of a loss: two equal runs on one H200 were apart by 2e-5
OVERRIDES = (
    f"run.steps={STEPS}",
    "run.tokens=null",
    "run.epochs=null",
    "optim.warmup_steps=0",
    f"checkpoint.every_steps={SAVE_AT}",
    "checkpoint.keep_last=3",
    "checkpoint.keep_best=0",
    "run.start_what=weights",
    "checkpoint.keep_steps=[]",
    "checkpoint.remote=null",
    f"evaluate.every_steps={STEPS}",
    "report.every_steps=1",
)


def rehearse(recipe: str, overrides: list[str], nproc: str | None, run_directory: Path) -> int:
    """Runs the rehearsal and prints what it measured -> exit code: 0, or that of the command that failed."""
    run_directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".smoke-{run_directory.name}-", dir=run_directory.parent) as name:
        scratch = Path(name) / "run"
        train = ["train", recipe, *overrides, *OVERRIDES, f"run.directory={scratch}"]
        train += ["--nproc", nproc] if nproc else []
        if code := _until_saved(train, scratch):
            return code
        if code := _call(train):
            return code
        _check(scratch, gives_same_bits(scratch))
        if code := _call(["export", str(scratch)]):
            return code
        _print_figures(scratch)
    return 0


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "windlass", *arguments]


def _call(arguments: list[str]) -> int:
    print(f"smoke: windlass {arguments[0]}", flush=True)
    return subprocess.run(_command(arguments)).returncode


def _until_saved(train: list[str], scratch: Path) -> int:
    """Starts training and kills all of it once step SAVE_AT is committed -> 0, or the exit code of a run that failed before."""
    print("smoke: windlass train, to be killed after its first checkpoint", flush=True)
    process = subprocess.Popen(_command(train), start_new_session=True)
    committed = scratch / "checkpoints" / f"step-{SAVE_AT:08d}"
    try:
        while process.poll() is None and not committed.exists():
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not committed.exists():
        return process.returncode or 1
    for later in (scratch / "checkpoints").glob("step-*"):  # a run faster than the kill is put back to the same place
        if later.name > committed.name:
            shutil.rmtree(later)
    return 0


def gives_same_bits(scratch: Path) -> bool:
    """Whether all of a run's kernels give the same bits twice: on a CPU, and where the recipe asks for it."""
    started = next(line for line in read_lines(scratch / "events.jsonl") if line["kind"] == "start")
    asked: bool = yaml.safe_load((scratch / "resolved.yaml").read_text("utf-8"))["run"]["deterministic"]
    return asked or started["facts"]["device"] == "CPU"


def _check(scratch: Path, is_exact: bool) -> None:
    """The resumed run went on from the checkpoint, repeated the killed run's losses, and every loss is a number. `is_exact`: its
    kernels give the same bits twice (precision/same_bits.py)."""
    lines = read_lines(scratch / "events.jsonl")
    if not any(line["kind"] == "resume" and line["step"] == SAVE_AT for line in lines):
        raise UserError(
            f"the run started again without resuming from step {SAVE_AT}",
            "a killed run resumes from its newest checkpoint",
            "report this with the recipe",
        )
    losses: dict[int, Any] = {}
    for line in lines:
        if line["kind"] != "step":
            continue
        loss = line["loss"]
        if loss is None:
            raise UserError(
                f"the loss of step {line['step']} is not finite",
                "training starts with finite numbers",
                "lower optim.learning_rate, or use precision.policy=fp32 to see whether the precision is at fault",
            )
        before: Any = losses.setdefault(line["step"], loss)
        if abs(before - loss) > (0 if is_exact else NEARLY * abs(before)):
            raise UserError(
                f"step {line['step']} lost {before} before the kill and {loss} after the resume",
                "a resumed run repeats the killed one on the same layout: bit for bit on a CPU and with run.deterministic=true, "
                f"else to {NEARLY:g} of the loss",
                "look for kernels that are not deterministic (parallel.compile, custom code), or report this",
            )


def _print_figures(scratch: Path) -> None:
    steps = [line for line in read_events(scratch / "events.jsonl") if line["kind"] == "step"]
    last = steps[-1]
    size = sum(f.stat().st_size for f in (scratch / "checkpoints" / f"step-{STEPS:08d}").rglob("*") if f.is_file())
    print("smoke: passed: train, evaluate, save, kill, resume, export")
    print(
        f"smoke: a step takes {format_duration(last['step_s'])}, {format_count(last['tokens_per_s'])} tok/s (5 steps only)"
    )
    print(f"smoke: peak memory of a rank {format_bytes(last['memory_bytes'])}, a checkpoint {format_bytes(size)}")
