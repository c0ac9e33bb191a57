"""Ranks on this machine: how many, started by a small process without torch, and started again where one failed.

The launcher starts N workers with the same command line (launch/spawn), waits, and turns what became of them into one exit code
(the table of windlass.errors). It looks neither at data nor at the hub: rank 0 does, as under torchrun, so nothing is imported
twice before the first step. A signal to it goes to every worker; they agree on a step, save, and exit with 75; the launcher reads
"stopped" in status.json and exits with the same. Ranks that died or stalled begin again from the last commit (launch/restarts).
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Final

from windlass.contract import AGENT, has_agent, num_ranks
from windlass.errors import EXIT_SIGNAL, EXIT_STOPPED, UserError, WindlassError
from windlass.launch.agent import ERRORS, patience_s, start_ranks
from windlass.launch.restarts import Restarts
from windlass.launch.spawn import Signalled, run_ranks
from windlass.report.events import EventLog
from windlass.safe_text import say
from windlass.signals import SIGNALS, note_signals
from windlass.status import Status, is_locked, note_failure, read_status, write_status
from windlass.supervise.heartbeat import forget_beats
from windlass.supervise.incident import Incident

PR_SET_PDEATHSIG = 1  # prctl(2)
SPINS: Final = "1000"
"""Turns of libgomp's loop before a thread that waits falls asleep."""
COUNT: Final = (sys.executable, "-c", "import torch; print(torch.cuda.device_count())")


def choose_ranks(nproc: str | None) -> int:
    """How many ranks `--nproc` means here: a number, `auto`, or nothing (all visible GPUs; without any, one process)."""
    num_gpus = count_gpus()
    if nproc is None:
        return max(1, num_gpus)
    if nproc == "auto":
        return num_gpus or min(2, os.cpu_count() or 1)
    if not nproc.isdigit() or int(nproc) == 0:
        raise UserError(f"--nproc {nproc}", "--nproc is a number of processes from 1, or auto", "for example --nproc 2")
    if num_gpus and int(nproc) > num_gpus:
        raise UserError(
            f"--nproc {nproc} on a machine with {num_gpus} visible GPU{'s' if num_gpus > 1 else ''}",
            "each rank has a GPU of its own (NCCL refuses two ranks on one device)",
            f"use --nproc {num_gpus} or less; to train on the CPU, hide the GPUs with CUDA_VISIBLE_DEVICES=",
        )
    return int(nproc)


def shared_cores(num_ranks: int) -> str | None:
    """What to say of more ranks than this process has cores, where ranks train on the CPU."""
    cores = len(os.sched_getaffinity(0))
    if num_ranks <= cores or count_gpus():
        return None
    few = f"; --nproc {cores} has a core for each" if cores > 1 else ""
    return (
        f"{num_ranks} ranks share {cores} core{'s' * (cores > 1)}: they take turns, and all wait for the slowest{few}"
    )


def let_threads_sleep() -> None:
    """Lets torch's CPU threads, which wait for each other at the end of every operator, fall asleep soon. Call it before torch is
    imported: its OpenMP library (libgomp) reads the variable once.

    By default they spin for milliseconds. Where another program has a core, that keeps the awaited thread from running.
    Measured on two cores, a model of 19 million parameters, tokens a second: 1,444 to 1,555 by default and 1,502 to 1,533 with
    this; beside a program that computes in one thread, 104 and 1,507 (docs/log.md, 28 November 2026)."""
    if not {"OMP_WAIT_POLICY", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def count_gpus() -> int:
    """Visible GPUs. torch is asked only where a driver is, in a process of its own: this one stays small."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/dev/nvidiactl").exists():
        return 0
    return int(subprocess.run(COUNT, stdout=subprocess.PIPE, text=True, check=True).stdout)


def is_worker() -> bool:
    """Whether some launcher (ours, torchrun, ...) made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_nproc(nproc: str | None) -> None:
    """Raises UserError for `--nproc` in a rank that another launcher has started: a rank starts no ranks."""
    if nproc is not None and is_worker() and not has_agent():
        ranks = f"{num_ranks()} process{'es' * (num_ranks() > 1)}"
        raise UserError(
            f"--nproc {nproc} in one of {ranks} that another launcher started",
            "each process of a launcher is one rank, and starts no others",
            "leave --nproc out and let the launcher start a process per rank (srun --ntasks-per-node, torchrun "
            "--nproc-per-node); or run the command without it",
        )


def show_error(error: WindlassError) -> None:
    """Shows `error` to the user. A worker of ours leaves that to the launcher: all ranks may raise the same error, or only one
    that has no terminal."""
    folder = os.environ.get(ERRORS)
    if folder is None:
        say(f"windlass: {error}", sys.stderr)
    else:
        Path(folder, os.environ["RANK"].zfill(6)).write_text(f"{error.code}\n{error}", "utf-8")


def die_with_agent() -> None:
    """A worker of ours is killed by the kernel when its agent dies: no orphan goes on writing."""
    agent = os.environ.get(AGENT)
    if agent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(agent):  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def launch_ranks(arguments: list[str], num_ranks: int, run_directory: Path, restarts: Restarts | None = None) -> int:
    """Runs `windlass *arguments` on `num_ranks` workers -> the exit code of the whole. Blocks until all are gone.

    `restarts`: of a command that trains, whose workers write the status of the run; a signal before they do raises
    KeyboardInterrupt. Other commands leave that as they found it, and are not started again. Main thread only: from here on
    signals to this process do no more than end the ranks.
    """
    received = note_signals()
    command = [sys.executable, "-m", "windlass", *arguments]
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    sys.stdout.flush()  # lines printed so far come before those of the workers
    try:
        while True:
            start_s = time.time()  # on the clock of the files' times: an older log or status is not of this start
            run = partial(run_ranks, command, num_ranks, received, patience_s())
            failure = start_ranks(run, run_directory, restarts.deadlines() if restarts else None)
            code = 0 if failure is None else failure.code
            code = settled_code(run_directory, start_s, code) if restarts else code
            if failure is None or not restarts or code in (0, EXIT_STOPPED):
                if failure is not None and failure.incident.cause == "lingers":
                    log_incident(run_directory, failure.incident, None)
                return code
            reason = restarts.why_not(failure)
            log_incident(run_directory, failure.incident, restarts.count if reason is None else None)
            if reason is not None:
                if reason:
                    say(f"windlass: {reason}", sys.stderr)
                return code
            restarts.again(run_directory)
    except Signalled as signalled:
        return code_of_signal(run_directory, start_s, signalled.number) if restarts else EXIT_SIGNAL + signalled.number
    finally:
        if restarts:
            restarts.close()
        forget_beats(run_directory)
        del os.environ[AGENT]


def log_incident(run_directory: Path, incident: Incident, restart: int | None) -> None:
    """Into the events of a run that had begun: its rank 0, which writes them, is gone. `restart`: the number of the one that
    follows."""
    if (file := run_directory / "events.jsonl").is_file():
        EventLog(file).write("incident", incident.step or 0, {**incident.fields(), "restart": restart})


def code_of_signal(run_directory: Path, since_s: float, number: int) -> int:
    """The exit code of a run whose ranks are gone after signal `number` to their launcher. Raises KeyboardInterrupt where they
    had not begun: `interruptible` makes a code of that, by the run's checkpoints."""
    status = read_status(run_directory)
    if status is None or status.time < since_s:
        raise KeyboardInterrupt
    return settled_code(run_directory, since_s, EXIT_SIGNAL + number)


def settled_code(run_directory: Path, since_s: float, code: int) -> int:
    """The exit code of a run whose ranks are gone with `code`, by the status that they left since `since_s`; a status that
    still says "running" is corrected."""
    status: Status | None = read_status(run_directory)
    if status is None or status.time < since_s:
        if code - EXIT_SIGNAL not in SIGNALS:  # one of these asked for the end
            note_failure(run_directory, code)
        return code
    if status.state == "stopped":
        return EXIT_STOPPED
    if status.state == "finished" and code > EXIT_SIGNAL:  # the signal came after the last step
        return 0
    if status.state == "running" and is_locked(run_directory):  # the ranks of other hosts go on
        return EXIT_STOPPED if code - EXIT_SIGNAL in SIGNALS else code
    if status.state == "running" or (status.state == "failed" and status.exit_code != code):
        write_status(run_directory, "failed", status.step, code)
    return code
