"""The ranks of one host as processes: started, waited for, ended. The standard library alone, since this process lives as long as
the run: torchelastic, which several hosts meet by, loads torch, 300 MiB and seconds of each start.

Each rank is the leader of a session of its own, so that a terminal's Ctrl-C reaches the launcher alone, which hands it on once.
The ranks meet at a store that rank 0 serves, at a port that was free a moment ago; another process may take it in between, and
then rank 0 says so and the ranks start again. Every start has a port, and so a store, of its own.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

POLL_S: Final = 0.02
"""Between two looks at the ranks. Those that end between the same two count as having ended together."""
GRACE_S: Final = 30.0
"""How long ranks may take to end after SIGTERM, once another one has failed."""
KILL_S: Final = 30.0
"""How long the kernel may take to end a killed one; it may wait for a device for ever."""


class Exit(NamedTuple):
    """How a rank ended that failed: minus the signal's number where a signal killed it; seconds of one clock."""

    exitcode: int
    timestamp: float


class Signalled(Exception):
    """The launcher received signal `number`, which its ranks were sent; all of them are gone."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def run_ranks(command: Sequence[str], num_ranks: int, received: Sequence[int], patience_s: float) -> dict[int, Exit]:
    """Runs `command` as ranks 0 to `num_ranks` - 1 until all are gone -> those that failed. A failure ends the others by SIGTERM;
    those that do not end are killed, and not among the failed. Raises Signalled.

    `received`: signals to this process, a list that grows: the first is sent to the ranks. `patience_s`: how long they may then
    take for their last step and checkpoint."""
    if received:
        raise Signalled(received[0])
    port = _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            ranks.append(subprocess.Popen(command, env=_environment(rank, num_ranks, port), start_new_session=True))
        return _wait(ranks, received, patience_s)
    finally:
        _kill(ranks)


def end_children() -> None:
    """Kills the processes that this one has started: a rank that hangs at its end has no page among the heartbeats any more."""
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # of a thread that has just ended
            for pid in children.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], received: Sequence[int], patience_s: float) -> dict[int, Exit]:
    failed: dict[int, Exit] = {}
    running, end_s, is_handed_on = dict(enumerate(ranks)), float("inf"), False
    while running and (now_s := time.monotonic()) < end_s:
        for rank, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[rank]
                if code:
                    failed[rank] = Exit(code, now_s)
                    _kill_group(process.pid)
        if received and not is_handed_on:
            is_handed_on, end_s = True, min(end_s, now_s + patience_s)
            _send(running, received[0])
        elif failed and end_s == float("inf"):
            end_s = now_s + GRACE_S
            _send(running, signal.SIGTERM)
        time.sleep(POLL_S * bool(running))
    if is_handed_on:
        raise Signalled(received[0])
    return failed


def _send(running: Mapping[int, subprocess.Popen[bytes]], number: int) -> None:
    for process in running.values():
        process.send_signal(number)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills the ranks that are left, with what they have started, and waits until they are gone."""
    for process in ranks:
        if process.poll() is None:
            _kill_group(process.pid)
    end_s = time.monotonic() + KILL_S
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end_s - time.monotonic()))


def _kill_group(leader: int) -> None:
    """A rank that is killed cannot end what it has started: git, or a user's own program."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_PORT": port,
    }
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun has it: a collective that fails ends its rank
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",  # this host's own name need not resolve
        **{name: str(value) for name, value in own.items()},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
