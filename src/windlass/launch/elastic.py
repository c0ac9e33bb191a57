"""One start of the ranks of a host among several, under torchelastic (what torchrun is made of).

Known flaws of torchelastic are fenced: the rendezvous store is not shared between incarnations
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE: with gloo the first restart worked 3 of 8 times without it, 15 of 15 with), and each start
has an agent of its own, so that nothing of the one before is left.
"""

import logging
import os
import signal
import tempfile
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from windlass.launch.agent import patience_s
from windlass.launch.spawn import Exit
from windlass.signals import SIGNALS


def run_elastic(command: list[str], num_ranks: int, meeting: Mapping[str, Any]) -> dict[int, Exit]:
    """Runs `command` on `num_ranks` workers of this host until all are gone -> those that failed. `meeting`: LaunchConfig's
    fields for a world of several hosts. Raises torchelastic's SignalException for a signal to this process, and the meeting's
    RendezvousError."""
    _silence("torch.distributed.elastic")  # the launcher says what happened itself
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    patience_s()  # in the environment, where torchelastic reads it
    with tempfile.TemporaryDirectory(prefix="windlass-launch-") as logs:
        config = LaunchConfig(
            nproc_per_node=num_ranks,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),  # its own directory would stay behind
            signals_to_handle=",".join(number.name for number in SIGNALS),
            **meeting,
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as failed:
            return failures_in_order({rank: Exit(one.exitcode, one.timestamp) for rank, one in failed.failures.items()})
    return {}


def failures_in_order(failures: Mapping[int, Exit]) -> dict[int, Exit]:
    """torchelastic knows the second of an error that a rank has recorded; of any other rank it knows only when it looked, with
    all of them gone. So a rank that was killed counts among the first, since others fail by its silence, unless torchelastic
    killed it itself, patience_s() after the first; and NCCL aborts a rank whose peer is gone."""
    first_s = min(failure.timestamp for failure in failures.values())
    killed = {
        rank: Exit(failure.exitcode, first_s)
        for rank, failure in failures.items()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGABRT and failure.timestamp - first_s < patience_s()
    }
    return {**failures, **killed}


def _silence(package: str) -> None:
    """No log lines of `package`, each of whose modules has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)
