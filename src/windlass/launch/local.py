"""Ranks on this machine, under torchelastic (what torchrun is made of).

The launcher is a small process without a model: it starts N workers with the same command line, waits, and turns what
became of them into one exit code (the table of windlass.errors). A signal to it goes to every worker; they agree on a step,
save, and leave with 0; the launcher reads "stopped" in status.json and leaves with the code of a stopped run.

Known flaws of torchelastic are fenced: the rendezvous store is not shared between incarnations
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE: with gloo the first restart worked 3 of 8 times without it, 15 of 15 with), and workers die
with their agent (a killed torchrun leaves them training).
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from windlass.contract import AGENT
from windlass.errors import EXIT_BUG, EXIT_SIGNAL, EXIT_STOPPED, UserError, WindlassError
from windlass.output import TAIL_LINES
from windlass.safe_text import say
from windlass.signals import SIGNALS, held_back
from windlass.status import Status, note_failure, read_status, write_status

SHUTDOWN_S = 600
"""After a signal: how long workers may take for their last step and checkpoint before they are killed."""
PR_SET_PDEATHSIG = 1  # prctl(2)
_ERRORS = "WINDLASS_ERRORS"
"""A directory where each of our workers leaves the error that it ends with: the exit code, and what the user is to read."""


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


def count_gpus() -> int:
    """Visible GPUs. torch is loaded only where a driver is."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def is_worker() -> bool:
    """Whether some launcher (ours, torchrun, ...) made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def show_error(error: WindlassError) -> None:
    """Shows `error` to the user. A worker of ours leaves that to the launcher: all ranks may raise the same error, or only one
    that has no terminal."""
    folder = os.environ.get(_ERRORS)
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


def launch(arguments: list[str], num_ranks: int, run_directory: Path, trains: bool = False) -> int:
    """Runs `windlass *arguments` on `num_ranks` workers -> the exit code of the whole. Blocks until all are gone.

    `trains`: the workers write the status of the run; other commands leave it as they found it.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic")  # the launcher says what happened itself
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    command = [sys.executable, "-m", "windlass", *arguments]
    sys.stdout.flush()  # lines printed so far come before those of the workers
    start_s = time.time()  # on the clock of the files' times: an older log or status is not of this launch
    with tempfile.TemporaryDirectory(prefix="windlass-launch-") as folder:
        errors, logs = Path(folder, "errors"), Path(folder, "logs")
        errors.mkdir()
        os.environ[_ERRORS] = str(errors)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=f"windlass-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(logs)),  # its own directory would stay behind
            signals_to_handle=",".join(number.name for number in SIGNALS),
        )
        code = 0
        try:
            with held_back():  # until a worker has installed its own handlers, in its first line
                elastic_launch(config, command[0])(*command[1:])
        except SignalException as received:
            code = EXIT_SIGNAL + received.sigval
        except ChildFailedError as failure:
            rank, first = failure.get_first_failure()
            if first.exitcode == EXIT_STOPPED:  # it stopped for the sake of another rank, which was signalled
                code = EXIT_STOPPED
            else:
                code = _print_errors(errors) or _explain(rank, first, run_directory, start_s)
            return _settle(run_directory, start_s, code) if trains else code
        finally:
            del os.environ[_ERRORS], os.environ[AGENT]
    return _settle(run_directory, start_s, code) if trains else code


def _silence(package: str) -> None:
    """No log lines of `package`, each of whose modules has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _print_errors(errors: Path) -> int:
    """Prints the errors that workers left there, the same text once -> the exit code of the first, 0 where there is none."""
    found = dict.fromkeys(file.read_text("utf-8") for file in sorted(errors.iterdir()))
    codes = []
    for code, _, text in (content.partition("\n") for content in found):
        say(f"windlass: {text}", sys.stderr)
        codes.append(int(code))
    return codes[0] if codes else 0


def _settle(run_directory: Path, since_s: float, code: int) -> int:
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
    if status.state == "running" or (status.state == "failed" and status.exit_code != code):
        write_status(run_directory, "failed", status.step, code)
    return code


def _explain(rank: int, failure: Any, run_directory: Path, since_s: float) -> int:
    """Names the rank that failed first, and shows the end of its log (rank 0's is on the terminal already) if it wrote one
    -> the exit code."""
    exit_code = failure.exitcode
    cause = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    say(f"windlass: rank {rank} failed first, with {cause}", sys.stderr)
    log = run_directory / "logs" / f"rank-{rank}.log"
    if rank and log.is_file() and log.stat().st_mtime >= since_s:
        tail = log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        say("\n".join([*tail, f"(the end of {log})"]), sys.stderr)
    return EXIT_SIGNAL - exit_code if exit_code < 0 else exit_code or EXIT_BUG
