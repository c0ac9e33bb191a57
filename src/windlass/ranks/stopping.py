"""The step after which all ranks stop, where one of them was signalled (Ctrl-C, SIGTERM, SIGUSR1, SIGHUP).

A rank that saved alone would hang the others, so all stop after the same step, without a collective per step: the signalled rank
writes "stop after step s" to the store, and one rank of every host looks there after each step, for all of its host (host_page).
The write happens before that rank enters step s; another rank leaves step s only after a collective in which all took part, so
whoever looks after step s sees the write. On CPU collectives block, and s is the next step; on a GPU the host runs ahead of the
device, so it is held to one step ahead (by waiting for an event, not by reading a value) and s is the step after the next.
"""

from collections.abc import Callable

import torch
from torch.distributed import Store

from windlass.ranks.host_page import NEVER, HostPage
from windlass.ranks.tree import Tree
from windlass.signals import Signals


class OneStepAhead:
    """Waits until the device has done the step before the one that the host has just handed over, and reads nothing."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def __call__(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        self._event = torch.cuda.current_stream().record_event()


class Stop:
    """Whether all ranks stop after the step just done. Collective: every rank makes one. `store`: of all ranks of `tree`; None
    where the caller made the process group. `hold`: what holds the host to one step ahead of the device; None: collectives block,
    and no step is ahead."""

    def __init__(
        self,
        tree: Tree,
        store: Store | None,
        device: torch.device,
        signals: Signals,
        hold: Callable[[], None] | None = None,
    ):
        self._store, self._signals = store, signals
        self._announced = False
        self._hold = OneStepAhead() if hold is None and device.type == "cuda" else hold
        self._page = None if tree.world == 1 or store is None else HostPage(tree)

    @property
    def is_signalled(self) -> bool:
        """Whether this very rank received a signal."""
        return self._signals.received is not None

    def signal(self) -> str | None:
        """What stopped the run, as SIGTERM, whichever rank received it."""
        store, own = self._store, self._signals.received
        return own.name if own is not None else store.get("stopped by").decode() if store is not None else None

    def after(self, step: int) -> bool:
        """True on every rank alike, when this was the last step (`step`: completed steps)."""
        store = self._store
        if self._page is None or store is None:
            self._announce(step)
            return self.is_signalled
        if self._hold is not None:
            self._hold()
        if name := self._announce(last := step + 1 + (self._hold is not None)):
            store.set("stopped by", name)
            store.compare_set("stop", "", str(last))
        return step >= self._page.after(step, lambda: int(store.get("stop")) if store.check(["stop"]) else NEVER)

    def _announce(self, last: int) -> str | None:
        """Prints, once, that a signal ends the run after step `last` -> its name, where it did."""
        if self._announced or self._signals.received is None:
            return None
        self._announced = True
        print(f"{self._signals.received.name}: the run stops after step {last} and saves", flush=True)
        return self._signals.received.name
