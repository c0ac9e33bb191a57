"""Ranks on several hosts: an agent on each, started by the same command, that keeps the ranks of its host.

All hosts start and stop together. Where a rank fails, or a host leaves, dies or comes back, the ranks of all hosts end and start
again from the last commit, on the hosts that are there: as many as the lower number of --nodes, which is more than half of the
higher, so that no two halves can train. What ends the run on one host (launch/restarts) ends it on all, with one exit code.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from windlass.contract import AGENT, HOSTS
from windlass.errors import EXIT_STOPPED, UserError
from windlass.launch.agent import start_ranks
from windlass.launch.elastic import run_elastic
from windlass.launch.local import code_of_signal, log_incident, settled_code
from windlass.launch.rendezvous import MeetingPlace, too_few
from windlass.launch.restarts import Failure, Restarts
from windlass.safe_text import say
from windlass.supervise.heartbeat import forget_beats
from windlass.units import counted
from windlass.version import __version__


class Nodes(NamedTuple):
    """How many hosts a run needs, and takes at most."""

    least: int
    most: int


def nodes_of(text: str) -> Nodes:
    """`--nodes`: N, or MIN:MAX. Raises UserError."""
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    if found is None or not int(found[1]):
        raise UserError(
            f"--nodes {text}", "--nodes is a number of hosts from 1, or two: MIN:MAX", "for example --nodes 3:4"
        )
    nodes = Nodes(int(found[1]), int(found[2] or found[1]))
    if nodes.least > nodes.most:
        raise UserError(f"--nodes {text}", "MIN is not more than MAX", f"use --nodes {nodes.most}:{nodes.least}")
    if 2 * nodes.least <= nodes.most:
        raise UserError(
            f"--nodes {text}",
            "MIN must be more than half of MAX, or hosts that lose each other could train on as two runs",
            f"use --nodes {nodes.most // 2 + 1}:{nodes.most}",
        )
    return nodes


def check_worlds(nodes: Nodes, num_ranks: int, check: Callable[[int], None]) -> None:
    """Raises UserError where the recipe's layout cannot be had on each number of hosts that the run may come to. `check`: of a
    number of ranks, raises UserError too."""
    for hosts in range(nodes.least, nodes.most + 1):
        try:
            check(hosts * num_ranks)
        except UserError as error:
            raise UserError(
                f"{hosts} hosts with {counted(num_ranks, 'rank')} each: {error.given}",
                error.rule,
                f"{error.change}; or another --nodes",
            ) from None


def launch_nodes(
    arguments: list[str], nodes: Nodes, endpoint: str, num_ranks: int, run_directory: Path, restarts: Restarts
) -> int:
    """Runs `windlass *arguments` on `num_ranks` workers of this host, as part of the run's -> the exit code. Blocks until the run
    has ended, or a signal has ended this host's part. Raises UserError, and Unavailable where hosts do not come."""
    facts = {"--nodes": f"{nodes.least}:{nodes.most}", "--nproc": num_ranks, "windlass": __version__}
    with _as_agent(num_ranks, run_directory):
        meeting = MeetingPlace(*nodes, endpoint, facts)
        try:
            while True:
                start_s = time.time()
                code = _start(
                    meeting, [sys.executable, "-m", "windlass", *arguments], nodes, run_directory, restarts, start_s
                )
                if code is not None:
                    return code
        except SignalException as received:
            return code_of_signal(run_directory, start_s, received.sigval)
        finally:
            restarts.close()
            meeting.leave()


def _start(
    meeting: MeetingPlace, command: list[str], nodes: Nodes, run_directory: Path, restarts: Restarts, since_s: float
) -> int | None:
    """One start of the ranks -> the exit code of this launch; None where they are to start again."""
    try:
        run = partial(run_elastic, command, int(os.environ[HOSTS]), meeting.start())
        failure = start_ranks(run, run_directory, restarts.deadlines(), meeting.watch())
    except RendezvousClosedError:
        return meeting.end(0)
    except RendezvousConnectionError:
        meeting.again()
        return None
    except RendezvousTimeoutError:
        raise too_few(nodes.least, meeting.join_s) from None
    code = settled_code(run_directory, since_s, failure.code if failure else 0)
    if failure is not None and failure.incident.cause == "lingers":  # the run itself has ended
        log_incident(run_directory, failure.incident, None)
        return meeting.end(code)
    if failure is None:
        return meeting.end(code)
    if code == EXIT_STOPPED:
        say("windlass: another host leaves; the others resume from the last commit", sys.stderr)
        return None
    return _judge(meeting, failure, run_directory, restarts, code)


def _judge(meeting: MeetingPlace, failure: Failure, run_directory: Path, restarts: Restarts, code: int) -> int | None:
    """Notes what failed -> the exit code where the ranks are not started again. The host that saw a failure first writes it
    down."""
    reason = restarts.why_not(failure)
    if meeting.is_first("incident"):
        log_incident(run_directory, failure.incident, restarts.count if reason is None else None)
    if reason is not None:
        if reason:
            say(f"windlass: {reason}", sys.stderr)
        return meeting.end(code)
    restarts.again(run_directory)
    return None


@contextlib.contextmanager
def _as_agent(num_ranks: int, run_directory: Path) -> Iterator[None]:
    os.environ[AGENT], os.environ[HOSTS] = str(os.getpid()), str(num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    sys.stdout.flush()
    try:
        yield
    finally:
        forget_beats(run_directory)
        del os.environ[AGENT], os.environ[HOSTS]
