"""Work before the first step, which a signal ends at once, and one run of a process at a time. No torch: the launcher of ranks
does such work too."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from windlass.checkpoint.commit import committed_steps
from windlass.contract import num_ranks
from windlass.errors import Interrupted, UserError
from windlass.signals import signals_of_process
from windlass.supervise.heartbeat import leave_page

_UNDER_WAY: Final = threading.Lock()


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """No other run of this process is under way: signals and the process group are the process's. Raises UserError."""
    if not _UNDER_WAY.acquire(blocking=False):
        raise UserError(
            "train() is called while another run of this process is under way",
            "a process trains one run at a time",
            "call it when the other run has ended, or in a process of its own",
        )
    try:
        yield
    finally:
        _UNDER_WAY.release()


@contextlib.contextmanager
def interruptible(run_directory: Path) -> Iterator[None]:
    """Work before the first step: a signal ends it at once, since it changes nothing that a checkpoint would keep. Raises
    Interrupted, with 75 where the run has a checkpoint to go on from, else with 130."""

    def interrupted() -> Interrupted:
        return Interrupted(bool(committed_steps(run_directory / "checkpoints")))

    def exit_code() -> int:
        leave_page(run_directory)
        return interrupted().code

    signals = signals_of_process()
    is_main = threading.current_thread() is threading.main_thread()
    may_wait = is_main and num_ranks() > 1  # in C, for ranks that do not come
    try:
        with signals.leaving(exit_code if may_wait else None) if signals else contextlib.nullcontext():
            yield
    except KeyboardInterrupt:
        raise interrupted() from None
