"""Work that one rank does while others wait for it, in the store and outside any collective; how its failure reaches them."""

import contextlib
import datetime
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch.distributed as dist

from windlass.errors import WindlassError, exit_code_of

LONGEST_WORK: Final = datetime.timedelta(days=20)
"""How long other ranks wait: rank 0 may prepare data, which may be terabytes. Under 2^31 ms."""
_DONE: Final = b"done"
"""What a rank writes for those that wait for it, where its work did not fail."""

Result = TypeVar("Result")


class FailedElsewhere(SystemExit):
    """The work that this rank waited for has failed on another one, with an error that is no WindlassError. That rank prints why;
    this one leaves it in its own error file, since an agent may read that one first."""

    def __init__(self, code: int, said: str):
        super().__init__(code)
        self.said = said

    def __str__(self) -> str:
        return self.said


def do_for_all(store: dist.Store, key: str, work: Callable[[], Result]) -> Result:
    """`work()`. Those that wait for `key` learn how it ended."""
    ended = _DONE
    try:
        return work()
    except BaseException as error:
        ended = _failure(error)
        raise
    finally:
        store.set(key, ended)  # type: ignore[arg-type]  # its stub knows str alone


def wait_for(store: dist.Store, keys: Sequence[str]) -> None:
    """Until the work of all `keys` has ended. Raises what the first of it that failed has raised, or FailedElsewhere."""
    store.wait(list(keys), LONGEST_WORK)
    for key in keys:
        _raise_failure(store.get(key))


def do_without_store(
    is_mine: bool, work: Callable[[], Result], gathered: Callable[[object], list[Any]]
) -> Result | None:
    """`work()` where `is_mine`; all ranks learn how it ended. The others wait in `gathered`, a collective that gives every rank's
    value, and its timeout ends the wait."""
    own = dist.HashStore()
    try:
        result = do_for_all(own, "work", work) if is_mine else None
    finally:
        ended = gathered(own.get("work") if is_mine else _DONE)
    for found in ended:
        _raise_failure(found)
    return result


def _raise_failure(ended: bytes) -> None:
    if ended == _DONE:
        return
    error = pickle.loads(ended)  # of a rank of this job
    if isinstance(error, WindlassError):
        error.elsewhere = True
        raise error
    raise FailedElsewhere(*error)


def _failure(error: BaseException) -> bytes:
    """What a rank whose work failed writes for those that wait for it. A WindlassError travels as it is, if it can."""
    if isinstance(error, WindlassError):
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # of what a script's own one holds
            return pickle.dumps(error)
    return pickle.dumps((exit_code_of(error), str(error)))
