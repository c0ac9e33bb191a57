"""Work before the first step, which a signal ends at once. No torch: the launcher of ranks does such work too."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from windlass.checkpoint.store import committed_steps
from windlass.contract import num_ranks
from windlass.errors import Interrupted
from windlass.signals import signals_of_process


@contextlib.contextmanager
def interruptible(run_directory: Path) -> Iterator[None]:
    """Work before the first step: a signal ends it at once, since it changes nothing that a checkpoint would keep. Raises
    Interrupted, with 75 where the run has a checkpoint to go on from, else with 130."""

    def interrupted() -> Interrupted:
        return Interrupted(bool(committed_steps(run_directory / "checkpoints")))

    signals = signals_of_process()
    is_main = threading.current_thread() is threading.main_thread()
    may_wait = is_main and num_ranks() > 1  # in C, for ranks that do not come
    try:
        with (
            signals.leaving((lambda: interrupted().code) if may_wait else None) if signals else contextlib.nullcontext()
        ):
            yield
    except KeyboardInterrupt:
        raise interrupted() from None
