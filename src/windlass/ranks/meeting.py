"""Where the ranks of a run meet: a store that rank 0 serves (under torchrun, its agent), and why they could not.

torch alone waits half an hour for a rank that does not come, in C, and then says how many came. Here each rank writes down that
it came, rank 0 says when all have, and after WAIT_S which have not. Before that a rank looks for the address itself: torch
prints a page of C++ frames for each try.

    requests   three per rank, and its looks while it waits, a tenth of what it has waited so far apart (2 s at most)
"""

import datetime
import errno
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch.distributed as dist

from windlass.errors import Unavailable, UserError
from windlass.output import without_stderr
from windlass.signals import TooLate, in_time

WAIT_S: Final = 600.0
"""How long a rank waits for the address, and then for the others: as long as for any collective."""
LOOK_S: Final = 5.0
"""How long one try to reach the address may take."""
ANSWER_S: Final = 30.0
"""How long what answers there may take to prove that it is a store."""
LINGER_S: Final = 6.0
"""How long rank 0 stays after it has said who is missing: three looks of the others."""
HOSTS_SHOWN: Final = 8
_WORLD, _MET = "meeting/world", "meeting/met"
_SERVED: Final = dict[int, dist.Store]()
"""What this process serves, by port, until it ends: other ranks may still read when rank 0 is through with a run, and the next
run of the same ranks meets there again."""


class _Wait:
    """Until `wait_s` are over. `pause` sleeps a tenth of what was waited so far, 20 ms at least and 2 s at most."""

    def __init__(self, wait_s: float, clock: Callable[[], float], sleep: Callable[[float], None]):
        self._clock, self._sleep, self._begun_s, self._wait_s = clock, sleep, clock(), wait_s

    @property
    def is_over(self) -> bool:
        return self._clock() - self._begun_s > self._wait_s

    def pause(self) -> None:
        self._sleep(min(2.0, max(0.02, (self._clock() - self._begun_s) / 10)))


def meet(
    rank: int,
    world: int,
    host: str,
    port: int,
    is_served: bool,
    prefix: str = "",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dist.Store:
    """The store of all ranks, once all have come. `is_served`: by an agent, at `host` and `port`, and not by rank 0. Its keys may
    be of an earlier start, or of an earlier run of the same ranks, unless `prefix` differs. Raises Unavailable where they do not
    come, UserError where two of them cannot belong together."""
    if rank == 0 and not is_served:
        store: dist.Store = _serve(port)
    else:
        store = _reach(rank, host, port, _Wait(WAIT_S, clock, sleep))
    store = dist.PrefixStore(prefix, store) if prefix else store
    try:
        _say_came(store, rank, world, is_served)
        # from here on: rank 0 was there before any other
        missing = _await(store, rank, world, f"{host}:{port}", _Wait(WAIT_S + LINGER_S * (rank > 0), clock, sleep))
    except dist.DistError:
        raise Unavailable(
            f"rank {rank} on {socket.gethostname()}: the store at {host}:{port} is gone before all {world} ranks have come",
            "rank 0 serves the store where all ranks meet",
            "see why rank 0 ended: it says so on its terminal, or its launcher does; then start all again",
        ) from None
    store.set_timeout(datetime.timedelta(seconds=WAIT_S))
    if missing:
        if rank == 0:
            sleep(LINGER_S)
        raise Unavailable(
            missing,
            "all ranks of a run meet before the first step",
            "see why the others ended or never began, in what their launcher shows; on their hosts `windlass doctor --endpoint "
            f"{host}:{port}` says whether they reach that address; then start all again",
        )
    return store


def address_of(store: dist.Store) -> tuple[str, int]:
    """Where other processes reach a store that `meet` returned, by itself or with prefixes: host and port."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)
    return store.host, store.port


def _serve(port: int) -> dist.Store:
    """On all addresses of this host."""
    try:
        if port not in _SERVED:
            _SERVED[port] = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        return _SERVED[port]
    except dist.DistNetworkError as error:
        said = str(error).partition("message: ")[2].split("\n")[0] or str(error).split("\n")[0]
        raise Unavailable(
            f"rank 0 cannot serve port {port} of {socket.gethostname()}: {said}",
            "rank 0 serves the store where all ranks meet, at MASTER_PORT",
            f"end the process that has the port (`ss -ltnp sport = :{port}` names it), or give all ranks another MASTER_PORT",
        ) from None


def _reach(rank: int, host: str, port: int, wait: _Wait) -> dist.Store:
    while True:
        try:
            with socket.create_connection((host, port), LOOK_S) as probe:
                address = probe.getpeername()[0]
                if probe.getsockname() == probe.getpeername():  # where nobody listens, a free port may be met by itself
                    # it goes at once: one that waits for the last packets would keep the port from rank 0
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            with without_stderr():
                return in_time(
                    partial(_connect, address, port), ANSWER_S + LOOK_S
                )  # torch has no deadline for a silent one
        except OSError as error:
            reason = f"nobody answers at {host}:{port} ({error.strerror or error})"
            if isinstance(error, socket.gaierror):
                reason = f"the name {host} does not resolve ({error.strerror})"
        except dist.DistError:
            reason = f"what answers at {host}:{port} is no store of ranks"
        except TooLate:
            reason = f"what listens at {host}:{port} answers nothing"
        if wait.is_over:
            raise Unavailable(
                f"rank {rank} on {socket.gethostname()}: {reason}, tried for {WAIT_S:.0f} s",
                "rank 0 serves the store where all ranks meet, at MASTER_ADDR and MASTER_PORT",
                "see that rank 0 runs, that MASTER_ADDR is its host's address by which this host reaches it, and that the port "
                f"is open (`windlass doctor --endpoint {host}:{port}`); then start all again",
            ) from None
        wait.pause()


def _connect(address: str, port: int) -> dist.Store:
    answer = datetime.timedelta(seconds=ANSWER_S)
    return dist.TCPStore(address, port, is_master=False, timeout=answer, wait_for_workers=False)


def _has(store: dist.Store, keys: list[str]) -> bool:
    with without_stderr():
        return store.check(keys)


def _say_came(store: dist.Store, rank: int, world: int, is_served: bool) -> None:
    own = json.dumps([socket.gethostname(), os.getpid(), secrets.token_hex(4)])
    if is_served:  # an earlier start may have left its own
        store.set(_came(rank), own)
        return
    first = int(store.compare_set(_WORLD, "", str(world)))
    if first != world:
        raise UserError(
            f"rank {rank} on {socket.gethostname()} has WORLD_SIZE={world}, another one of its ranks has WORLD_SIZE={first}",
            "all ranks of a run know the same number of them",
            "correct what the launcher exports, or give the other run a MASTER_PORT of its own",
        )
    found = store.compare_set(_came(rank), "", own).decode()
    if found != own:
        host, pid, _ = json.loads(found)
        raise UserError(
            f"two processes are rank {rank}: {pid} on {host}, and {os.getpid()} on {socket.gethostname()}",
            "each rank of a run is one process, and runs at the same time have ports of their own",
            "correct RANK, or give the other run another MASTER_PORT",
        )


def _await(store: dist.Store, rank: int, world: int, address: str, wait: _Wait) -> str:
    """Returns when all ranks have come, or with the words on who has not."""
    came = [_came(one) for one in range(world)]
    while not _has(store, came if rank == 0 else [_MET]):
        if wait.is_over:
            missing = _words_on(store, world, address)
            if rank == 0:
                store.set(_MET, missing)
            return missing
        wait.pause()
    if rank == 0:
        store.set(_MET, "")
    return store.get(_MET).decode()


def _words_on(store: dist.Store, world: int, address: str) -> str:
    hosts: dict[str, list[int]] = {}
    missing = []
    for rank in range(world):
        if _has(store, [_came(rank)]):
            hosts.setdefault(json.loads(store.get(_came(rank)))[0], []).append(rank)
        else:
            missing.append(rank)
    came = [f"{_ranges(ranks)} on {host}" for host, ranks in hosts.items()]
    more = f", and those of {len(came) - HOSTS_SHOWN} more hosts" if len(came) > HOSTS_SHOWN else ""
    who = f"{_ranges(missing)} of {world} did not come" if missing else "rank 0 does not go on"
    return f"{who} to {address} within {WAIT_S:.0f} s; there are {', '.join(came[:HOSTS_SHOWN])}{more}"


def _ranges(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 6`; `ranks` ascend."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    listed = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def _came(rank: int) -> str:
    return f"meeting/came/{rank}"
