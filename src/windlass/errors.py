"""What a user can get wrong, and what we say then.

A `UserError` has three parts, each one sentence: what was given, the rule it breaks, and what to change. The command line
prints it without a traceback and exits with 2. Our own bugs are `assert`s and other exceptions, and keep their traceback.
"""

from collections.abc import Sequence
from typing import Final

EXIT_NOT_EQUAL: Final = 1  # `verify`: a number is not that of one process; `checkpoint diff`: a tensor differs
EXIT_USER_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, the shell's convention: interrupted before there was a state to save
EXIT_STOPPED: Final = 75  # EX_TEMPFAIL of sysexits.h: stopped on request after a checkpoint; the same command goes on


class UserError(Exception):
    """A mistake the user can mend. `given`: the value; `rule`: what it breaks; `change`: what to do about it."""

    def __init__(self, given: str, rule: str, change: str):
        super().__init__(given, rule, change)
        self.given, self.rule, self.change = given, rule, change

    def __str__(self) -> str:
        return f"{self.given}\n  rule:   {self.rule}\n  change: {self.change}"


class BadLayout(UserError):
    """A model whose parts do not lie as the layout says; raised before or at the first step."""


class OutOfSync(UserError):
    """Ranks that should hold the same batch or the same weights hold different ones; raised on all ranks alike."""


class Diverged(UserError):
    """A run whose steps are all skipped, because no gradient is finite. Its last checkpoint is from before."""


class AbsentSource(UserError):
    """A source of data that is not here, or cannot be reached from here."""


class BadShard(UserError):
    """A data shard whose bytes are not what its index promises."""


class BadCheckpoint(UserError):
    """A checkpoint that is missing, incomplete, or whose bytes are not what its manifest promises."""


class SeveralErrors(UserError):
    """Several mistakes at once, each with its own rule and change."""

    def __init__(self, errors: Sequence[UserError]):
        super().__init__(*("; ".join(parts) for parts in zip(*((e.given, e.rule, e.change) for e in errors))))
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))


def nearest(word: str, choices: list[str]) -> str:
    """' Did you mean `x`?' for the closest of `choices`, or '' if none is near."""
    import difflib

    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`? " if close else ""
