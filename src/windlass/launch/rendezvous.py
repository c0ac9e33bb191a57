"""Where the agents of several hosts meet: torchelastic's rendezvous, on a store that lasts as long as the launch.

The agent on the endpoint's host serves the store; while it is gone all others wait for it. torchelastic closes a rendezvous for
good when a rank fails, and never looks whether a host is still there. Here an agent leaves, and comes again for the next start;
only `end` closes. A host that leaves, dies or cannot be reached ends the ranks of the others, GRACE_S after that is known: most
have seen it themselves by then, and may be saving.
"""

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Final

from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)

from windlass.errors import Unavailable, UserError
from windlass.launch.spawn import end_children
from windlass.output import without_stderr
from windlass.safe_text import say
from windlass.signals import TooLate, in_time
from windlass.supervise.across_hosts import SharedWatch

KEEP_ALIVE_S, KEEP_ALIVES = 5, 6
"""A host that has not been heard of for their product is gone. With 1 s x 3 a busy host was taken for dead while it trained."""
LAST_CALL_S: Final = 20
"""How long a start waits for further hosts once there are as many as it needs."""
# All of these are chosen: longer than a slow network takes, short enough that nobody asks whether it hangs.
JOIN_S: Final = 3600
"""How long it waits for as many, or for the endpoint."""
TRIES: Final = 3
"""A store that begins may listen and not answer yet; what does not for as often in succession is another program."""
ANSWER_S: Final = 10
PATIENCE_S: Final = 20.0
"""How long torch looks for a store in one try, and how long that may take: what listens and says nothing keeps torch for ever."""
SILENT_TRIES: Final = 3
READ_S: Final = 30.0
"""How long the store may take to answer, once it is found."""
LOOK_S: Final = 5.0
GRACE_S: Final = 20.0
CLOSE_S: Final = 60.0
"""How long the store outlives the end, for the others to read it."""


class MeetingPlace:
    """The hosts of one launch. `facts`: what must be equal on all of them. `join_s`: see JOIN_S."""

    def __init__(self, least: int, most: int, endpoint: str, facts: Mapping[str, Any], join_s: float = JOIN_S):
        self._least, self._most, self._endpoint, self.join_s = least, most, endpoint, join_s
        self._facts = {key: str(value) for key, value in facts.items()}
        self.handler: _Handler | None = None
        self._connect()
        self._name = f"windlass-{secrets.token_hex(4)}"  # torchelastic's registry forgets none
        rendezvous_handler_registry.register(self._name, self._handler)

    def _connect(self) -> None:
        """Raises Unavailable where nobody serves the endpoint, UserError where another program does, or where this host was
        started otherwise than another."""
        self._backend, self.store = self._reach()
        self.store.set_timeout(timedelta(seconds=READ_S))
        own = json.dumps([socket.gethostname(), self._facts])
        host, first = json.loads(self.store.compare_set("windlass/facts", "", own))
        other = [key for key in self._facts if self._facts[key] != first.get(key)]
        if other:
            here = ", ".join(f"{key} {self._facts[key]}" for key in other)
            there = ", ".join(f"{key} {first.get(key)}" for key in other)
            raise UserError(
                f"{here} on {socket.gethostname()}, {there} on {host}",
                "all hosts of a run start it in the same way",
                "give every host the same command and the same environment",
            )

    def _reach(self) -> tuple[Any, Any]:
        """-> torchelastic's backend, and its store."""
        params = RendezvousParameters(
            "c10d", self._endpoint, "windlass", self._least, self._most, read_timeout=ANSWER_S
        )
        end_s, is_said, others, silent = time.monotonic() + self.join_s, False, 0, 0
        while True:
            try:
                with without_stderr():
                    return in_time(partial(create_backend, params), PATIENCE_S)
            except RendezvousConnectionError:
                others, silent = others + 1 if _is_taken(self._endpoint) else 0, 0
            except TooLate:
                others, silent = 0, silent + 1
            if others == TRIES:
                raise _foreign(self._endpoint)
            if silent == SILENT_TRIES:
                raise _silent(self._endpoint)
            if time.monotonic() > end_s:
                raise _unreachable(self._endpoint, self.join_s)
            if not is_said:
                who = "what listens there says nothing" if silent else f"nobody answers{unnamed(self._endpoint)}"
                say(f"windlass: waiting for the store at {self._endpoint}: {who}")
            is_said = True
            time.sleep(1)

    def start(self) -> dict[str, Any]:
        """LaunchConfig's fields for the next start of ranks, which waits for hosts."""
        say(f"windlass: waiting at {self._endpoint}: a start needs {self._least} host{'s' * (self._least > 1)}")
        return {
            "min_nodes": self._least,
            "max_nodes": self._most,
            "run_id": "windlass",
            "rdzv_backend": self._name,
            "rdzv_endpoint": self._endpoint,
            "local_addr": address_towards(self._endpoint),
        }

    def watch(self) -> SharedWatch:
        """What the watchdogs of all hosts see."""
        return SharedWatch(self.store.clone, lambda: self.handler if self.handler and self.handler.hosts else None)

    def _handler(self, params: RendezvousParameters) -> "_Handler":
        self.handler = _Handler.from_backend(
            params.run_id,
            self.store,
            self._backend,
            self._least,
            self._most,
            params.local_addr,
            RendezvousTimeout(timedelta(seconds=self.join_s), timedelta(seconds=LAST_CALL_S)),
            KEEP_ALIVE_S,
            KEEP_ALIVES,
        )
        self.handler._backend_name = params.backend
        return self.handler

    def again(self) -> None:
        """Meets at the endpoint anew, after the connection to it was lost."""
        say(f"windlass: {self._endpoint} is lost; waiting for its host")
        self.leave()
        self._connect()

    def leave(self) -> None:
        """The others go on without this host, as soon as they see it."""
        if self.handler is not None:
            self.handler.shutdown()

    def is_first(self, what: str) -> bool:
        """Whether this host is the first to ask since the ranks started. False where the endpoint is lost."""
        with contextlib.suppress(RuntimeError):
            assert self.handler is not None
            return self.store.add(f"windlass/{what}/{self.handler.joined}", 1) == 1
        return False

    def end(self, code: int) -> int:
        """Ends the launch on all hosts -> the exit code: of the host that ended it first."""
        with contextlib.suppress(RendezvousError, RuntimeError):
            assert self.handler is not None
            code = int(self.store.compare_set("windlass/end", "", str(code)))
            self.handler.leave()
            self.handler.set_closed()
            gone, end_s = self.store.add("windlass/gone", 1), time.monotonic() + CLOSE_S
            while getattr(self.store, "is_master", False) and gone < self.handler.hosts and time.monotonic() < end_s:
                time.sleep(0.1)
                gone = self.store.add("windlass/gone", 0)
        return code


class _Handler(DynamicRendezvousHandler):
    """One start of the ranks of this host. `joined`: the round of the rendezvous, `hosts`: how many take part, `number`: which
    of them this is."""

    joined, hosts, number = -1, 0, 0
    _alone_since_s: float | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        self.joined, self.hosts, self.number = self._state_holder.state.round, info.world_size, info.rank
        self._alone_since_s = None
        return info

    def num_nodes_waiting(self) -> int:
        """Hosts that wait to take part; asked between two looks at the ranks. While a host of this start is missing the ranks
        have to end by themselves, or are ended."""
        try:
            waiting, state = super().num_nodes_waiting(), self._state_holder.state
            if state.round == self.joined and len(state.participants) == self.hosts:
                return waiting
        except RendezvousConnectionError:
            pass  # the next start finds it out
        now_s = time.monotonic()
        self._alone_since_s = self._alone_since_s or now_s
        if now_s - self._alone_since_s > GRACE_S:
            end_children()
        return 0

    def leave(self) -> None:
        self._stop_heartbeats()
        with contextlib.suppress(RendezvousError), self._heartbeat_lock:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.close))

    def shutdown(self) -> bool:
        """torchelastic's last call after any start of ranks."""
        self.leave()
        return True


def address_towards(endpoint: str) -> str:
    """The address by which other hosts reach this one: that of the interface which leads to the endpoint."""
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                found = str(probe.getsockname()[0])
                return host if found.startswith("127.") else found
    return socket.gethostname()


def unnamed(endpoint: str) -> str:
    """Where the endpoint's host has no address here, that, as the end of a sentence; a cluster may give it one later."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        return f": {host} has no address here ({error.strerror or error})"
    return ""


def _is_taken(endpoint: str) -> bool:
    """Whether something listens there."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LOOK_S).close()
    except OSError:
        return False
    return True


def _foreign(endpoint: str) -> UserError:
    return UserError(
        f"--endpoint {endpoint}: the program that answers there is not a store of windlass",
        "the agent on the endpoint's host serves a store where all hosts meet, at a port that nothing else has",
        f"choose another port, or end the program that has it (`ss -ltnp sport = :{endpoint.rpartition(':')[2]}` on that host "
        "names it)",
    )


def _silent(endpoint: str) -> Unavailable:
    return Unavailable(
        f"--endpoint {endpoint}: what listens there answered nothing for {SILENT_TRIES * PATIENCE_S:.0f} s",
        "the agent on the endpoint's host serves a store where all hosts meet, at a port that nothing else has",
        f"see what has the port (`ss -ltnp sport = :{endpoint.rpartition(':')[2]}` on that host): beside another program choose "
        "another port; an agent that hangs is to be ended, and the same command started there and here again",
    )


def _unreachable(endpoint: str, waited_s: float) -> Unavailable:
    return Unavailable(
        f"--endpoint {endpoint}: nobody answered for {waited_s:.0f} s{unnamed(endpoint)}",
        "the agent on the endpoint's host serves the store where all hosts meet",
        "start the same command there and here again: the run goes on from its last commit; where an agent runs there, open its "
        "port to the others",
    )


def too_few(least: int, waited_s: float) -> Unavailable:
    return Unavailable(
        f"fewer than {least} hosts for {waited_s:.0f} s",
        "a start needs as many hosts as the lower number of --nodes",
        "start the same command on all of them again: the run goes on from its last commit",
    )
