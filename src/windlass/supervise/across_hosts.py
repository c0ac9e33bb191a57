"""Ranks that stall, on several hosts: the watchdogs put together what each of them sees, so that all name the same rank.

A watchdog sees the ranks of its own host, and where one rank stalls those of all hosts are late. The first that finds a rank
late asks, through the store where hosts meet; each answers with the stacks of its ranks. None goes on before all have read all
answers: ranks that are ended early make those of other hosts fail, and these would be blamed.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from windlass.supervise.rank_stacks import RankStack

if TYPE_CHECKING:  # the watchdogs of one host do without torch
    from torch.distributed import Store

WAIT_S: Final = 15.0
"""How long answers may take: a host looks once a second, asks its ranks for five, and reads those that are silent for five
more. One that does not answer is left out; if it is gone, the meeting place finds that out."""
POLL_S: Final = 0.1

Result = TypeVar("Result")


class Round(Protocol):
    """One start of the ranks of all hosts: its number, how many hosts take part, and which of them this is."""

    @property
    def joined(self) -> int: ...
    @property
    def hosts(self) -> int: ...
    @property
    def number(self) -> int: ...


class SharedWatch:
    """`connect`: -> a connection to the store that no other thread uses; raises RuntimeError where that is gone. `current`: ->
    the start that runs, None before the first."""

    def __init__(
        self,
        connect: Callable[[], "Store"],
        current: Callable[[], Round | None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._connect, self._current, self._clock = connect, current, clock
        self._asking: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the store has not answered the last question yet: the process that serves it may hang."""
        return self._asking is not None and self._asking.is_alive()

    @cached_property
    def _store(self) -> "Store":
        store = self._connect()
        store.set_timeout(timedelta(seconds=WAIT_S))
        return store

    def is_asked(self) -> bool:
        """Whether the watchdog of some host has found a rank late. False where the store does not answer."""
        current = self._current()
        return current is not None and bool(self._in_time(lambda: self._store.check([_key(current, "asked")]), WAIT_S))

    def exchange(self, own: Sequence[RankStack]) -> list[RankStack]:
        """The stacks of this host's ranks -> those of all hosts that answer, in the order of ranks; returns on all of them at
        once."""
        current = self._current()
        found = [replace(stack, host=socket.gethostname()) for stack in own]
        if current is not None:
            found += self._in_time(partial(self._exchange, current, found), 3 * WAIT_S) or []
        return sorted(found, key=lambda stack: stack.beat.rank)

    def _exchange(self, current: Round, own: Sequence[RankStack]) -> list[RankStack]:
        """-> the stacks of the other hosts, as far as they answer before the store is gone."""
        others = [number for number in range(current.hosts) if number != current.number]
        heard: list[RankStack] = []
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(current, f"stacks/{current.number}"), json.dumps([stack.to_json() for stack in own]))
            self._store.set(_key(current, "asked"), "")
            self._until(lambda: self._store.check([_key(current, f"stacks/{number}") for number in others]))
            for number in others:
                if self._store.check([key := _key(current, f"stacks/{number}")]):
                    heard += [RankStack.from_json(one) for one in json.loads(self._store.get(key))]
            self._store.add(_key(current, "read"), 1)
            self._until(lambda: self._store.add(_key(current, "read"), 0) >= current.hosts)
        return heard

    def _in_time(self, work: Callable[[], Result], seconds: float) -> Result | None:
        """`work()`, in a thread: torch waits for ever for a store whose server was stopped (seen with 2.13). None where the store
        is silent, or gone."""
        answers: list[Result] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                answers.append(work())

        if not self.is_silent:
            self._asking = threading.Thread(target=ask, name="asks-hosts", daemon=True)
            self._asking.start()
            self._asking.join(seconds)
        return answers[0] if answers else None

    def _until(self, is_so: Callable[[], bool]) -> None:
        end_s = self._clock() + WAIT_S
        while not is_so() and self._clock() < end_s:
            time.sleep(POLL_S)


def _key(current: Round, what: str) -> str:
    return f"windlass/stall/{current.joined}/{what}"
