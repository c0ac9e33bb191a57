"""One verdict for all ranks: a piece of work that fails on one rank fails on every rank, with the same error.

Without this, the rank that fails exits and the others wait in a collective until it times out. Each call is one
gather to rank 0 and one broadcast from it, along the tree of the given group (gloo; an asynchronous save needs
its own group, since its messages run beside the training's). One rank without torch.distributed is the same
code with no communication. What travels is plans and results between ranks of one job; nothing that comes from a file
is unpickled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from windlass.errors import WindlassError
from windlass.ranks.tree import Tree


class PeerFailed(RuntimeError):
    """Another rank failed with an error that is no WindlassError. The text is that rank's."""


@dataclass
class _Failure:
    rank: int
    error: Exception
    text: str

    def portable(self) -> "_Failure":
        """A WindlassError travels as it is. An OSError stays one, so that all ranks handle it alike. Any other error travels
        as its text, since not every exception can be pickled."""
        if isinstance(self.error, WindlassError):
            return self
        if isinstance(self.error, OSError):
            return _Failure(self.rank, OSError(self.error.errno, f"rank {self.rank}: {self.text}"), self.text)
        return _Failure(self.rank, PeerFailed(f"rank {self.rank}: {self.text}"), self.text)


def _portable(value: Any) -> Any:
    return value.portable() if isinstance(value, _Failure) else value


class Exchange:
    """The ranks of one job. `group` None: the default group, or no group where world is 1."""

    def __init__(self, rank: int, world: int, group: dist.ProcessGroup | None):
        self.rank, self.world = rank, world
        self._tree = Tree((group or dist.group.WORLD) if world > 1 else None)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # not swallowed: _settle raises it on every rank, so that none waits for this one
            return _Failure(self.rank, error, f"{type(error).__name__}: {error}")

    def _settle(self, mine: Any, verdict: Any) -> Any:
        if not isinstance(verdict, _Failure):
            return verdict
        if isinstance(mine, _Failure) and mine.rank == verdict.rank:
            raise mine.error  # with its own traceback, on the rank where it happened
        raise verdict.error

    def _lead(self, mine: Any, lead: Callable[[list[Any]], Any]) -> Any:
        """On rank 0: the first failure, or what `lead` makes of everybody's values."""
        values = self._tree.gather(_portable(mine))
        if values is None:
            return None
        failures = [value for value in values if isinstance(value, _Failure)]
        return failures[0] if failures else self._attempt(lambda: lead(values))

    def reduce(self, work: Callable[[], Any], lead: Callable[[list[Any]], Any]) -> Any:
        """Every rank runs `work`; rank 0 makes one value of all results with `lead`; every rank gets that value."""
        mine = self._attempt(work)
        made = self._lead(mine, lead)
        verdict = self._tree.broadcast(_portable(made))
        return self._settle(mine if isinstance(mine, _Failure) else made, verdict)

    def fold(self, work: Callable[[], Any], join: Callable[[Any, Any], Any], lead: Callable[[Any], Any]) -> Any:
        """A `reduce` whose values become one on their way to rank 0: `join` makes one of those of lower and of higher ranks."""

        def joined(*both: Any) -> Any:
            failed = [value for value in both if isinstance(value, _Failure)]
            return failed[0] if failed else _portable(self._attempt(lambda: join(*both)))

        def led(value: Any) -> Any:
            return value if isinstance(value, _Failure) else _portable(self._attempt(lambda: lead(value)))

        mine = self._attempt(work)
        return self._settle(mine, self._tree.reduce(_portable(mine), joined, led))

    def from_first(self, work: Callable[[], Any]) -> Any:
        """Rank 0 runs `work`; every rank gets its value, or raises its error."""
        return self.reduce(lambda: None, lambda _: work())
