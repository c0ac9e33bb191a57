"""The errors that windlass explains to its user, and the exit codes of its commands: one table for every command and launcher.

    WindlassError          given, rule, change: three sentences
        UserError          2   the recipe or its surroundings; somebody has to change something
            AbsentSource         a source of data that is not here
                UnreachableSource 74  whose server cannot be reached now
            BadShard             damage in data that the user owns
            BadRow               a row of a source that holds no document
            TooManyBadRows       more of those than the source may have
            ChangedAnswer        an answer that its chat template writes otherwise in the whole conversation
            BadCheckpoint        damage in a checkpoint, or none where one is named
            SeveralErrors        several mistakes of one recipe, each with its own rule and change
            Unavailable    74  a store, a hub or a server that does not answer now
                DiskFull   74  no room for a checkpoint
        Diverged           4   no step of the run changes a weight any more
        OutOfSync          5   ranks that should hold the same hold different values
        BadLayout          1   a bug of ours; printed with its traceback
        Stopped           75   a signal ended the run after a checkpoint (from Python, where asked for)

`EXITS` says what each exit code means and who starts the same command again after it: our launcher, Flyte, Kubernetes and SLURM
all go by it. A rank that signal n killed makes our launcher exit with 128 + n, which is no code of the table: it is tried again.
`windlass.cli.main` alone turns an error into an exit code.
"""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from windlass.safe_text import shown

if TYPE_CHECKING:  # `import windlass` loads little
    from pathlib import Path

EXIT_BUG: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_NOT_EQUAL: Final = 3
EXIT_DIVERGED: Final = 4
EXIT_OUT_OF_SYNC: Final = 5
EXIT_UNAVAILABLE: Final = 74  # EX_IOERR of sysexits.h
EXIT_STOPPED: Final = 75  # EX_TEMPFAIL of sysexits.h
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, the shell's convention
EXIT_SIGNAL: Final = 128  # + the signal's number


class Ending(NamedTuple):
    """What an exit code means, and whether the same command is started again after it, with nothing changed by anybody."""

    meaning: str
    retry: bool
    """By a cluster, with new processes: whether it may end in another way."""
    restart: bool
    """By the launcher of the ranks, while it runs: at most `launch.max_restarts` times, and not for a step that failed thrice."""


EXITS: Final = {
    0: Ending("done", retry=False, restart=False),
    EXIT_BUG: Ending("a bug of ours, with a traceback: it may be a crash of one host", retry=True, restart=True),
    EXIT_USER_ERROR: Ending("the recipe or its surroundings", retry=False, restart=False),
    EXIT_NOT_EQUAL: Ending("not equal (`verify`, `checkpoint diff`)", retry=False, restart=False),
    EXIT_DIVERGED: Ending("diverged", retry=False, restart=False),
    EXIT_OUT_OF_SYNC: Ending("ranks out of step: from the last checkpoint", retry=True, restart=True),
    EXIT_UNAVAILABLE: Ending("data or storage does not answer", retry=True, restart=True),
    EXIT_STOPPED: Ending("stopped on request after a checkpoint, from which it goes on", retry=True, restart=False),
    # a second Ctrl-C, which ends our launcher too; within a cluster's job a signal is the cluster's
    EXIT_INTERRUPTED: Ending("interrupted before there was anything to save", retry=True, restart=False),
}
FINAL: Final = tuple(code for code, ending in EXITS.items() if code and not ending.retry)
"""After these codes a cluster does not start the same command again."""
NOT_RESTARTED: Final = tuple(code for code, ending in EXITS.items() if not ending.restart)
"""After these codes a launcher does not start its ranks again."""


class WindlassError(Exception):
    """`given`: what was found; `rule`: what it breaks; `change`: what to do about it. Each is one sentence, and may be shown: it
    holds no secret of a URL and no control character, whatever it quotes."""

    code: ClassVar[int] = EXIT_BUG
    elsewhere: bool = False
    """Whether it happened on another rank, which shows it. It is raised here as well, so that all ranks end alike."""

    def __init__(self, given: str, rule: str, change: str):
        self.given, self.rule, self.change = shown(given), shown(rule), shown(change)
        super().__init__(self.given, self.rule, self.change)

    @property
    def retry(self) -> bool:
        """Whether the same command may succeed when it is started again: see EXITS."""
        return EXITS[self.code].retry

    def __str__(self) -> str:
        return f"{self.given}\n  rule:   {self.rule}\n  change: {self.change}"

    def __reduce__(self) -> tuple[Any, ...]:  # as Exception's, but a subclass's constructor may take other arguments
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(kind: type[WindlassError], sentences: tuple[str, ...]) -> WindlassError:
    return kind.__new__(kind, *sentences)


class UserError(WindlassError):
    """A mistake that the user can correct. The command line prints it without a traceback."""

    code = EXIT_USER_ERROR


class AbsentSource(UserError):
    """A source of data that is not here."""


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
        lines = (f"{error.given}: {error.rule}; {error.change}" for error in self.errors)
        return f"{len(self.errors)} mistakes\n  " + "\n  ".join(lines)


class Unavailable(UserError):
    """A store, a hub or a server that does not answer, or fails, now."""

    code = EXIT_UNAVAILABLE


class UnreachableSource(AbsentSource):
    """A source whose server this host cannot reach now. What was prepared of it before may be used."""

    code = EXIT_UNAVAILABLE


class Stopped(WindlassError):
    """A run that a signal ended after a checkpoint. Only `train(..., raise_on_stop=True)` raises it."""

    code = EXIT_STOPPED


class Interrupted(KeyboardInterrupt):
    """A signal before the first step of a run, which has nothing new to save. `has_checkpoint`: the same command goes on from
    one."""

    def __init__(self, has_checkpoint: bool):
        super().__init__(has_checkpoint)
        self.code = EXIT_STOPPED if has_checkpoint else EXIT_INTERRUPTED

    def __str__(self) -> str:
        after = (
            "the same command goes on from the last checkpoint" if self.code == EXIT_STOPPED else "nothing was saved"
        )
        return f"interrupted before the first step; {after}"


class Diverged(WindlassError):
    """A run whose steps are all skipped, because no gradient is finite. Its last checkpoint is from before."""

    code = EXIT_DIVERGED


class OutOfSync(WindlassError):
    """Ranks that should hold the same batch or the same weights hold different ones; raised on all ranks alike."""

    code = EXIT_OUT_OF_SYNC


class BadLayout(WindlassError):
    """A model whose parts are not where the layout says: a bug of ours. Raised before or at the first step."""


def raise_all(errors: Iterable[UserError]) -> None:
    """Raises `errors` as one UserError; returns where there are none."""
    listed = [one for error in errors for one in (error.errors if isinstance(error, SeveralErrors) else (error,))]
    if listed:
        raise listed[0] if len(listed) == 1 else SeveralErrors(listed)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that ends with `error`."""
    match error:
        case WindlassError():
            return error.code
        case Interrupted():
            return error.code
        case KeyboardInterrupt():
            return EXIT_INTERRUPTED
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
    return EXIT_BUG


def nearest(word: str, choices: list[str], cutoff: float = 0.6) -> str:
    """'did you mean `x`? ' for the closest of `choices`, or '' if none is near. `cutoff`: difflib's ratio, 1 for equal words."""
    import difflib

    close = difflib.get_close_matches(word, choices, n=1, cutoff=cutoff)
    return f"did you mean `{close[0]}`? " if close else ""


def nearest_entry(path: "Path", choices: Iterable[str] | None = None) -> str:
    """'did you mean `dir/x`? ' for a path that is not there, among `choices` or all names beside it; else ''."""
    import difflib

    if choices is None:
        choices = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    others = [name for name in choices if name != path.name]  # it may be there, and be of the wrong kind
    close = difflib.get_close_matches(path.name, others, n=1, cutoff=0.6)
    return f"did you mean `{path.parent / close[0]}`? " if close else ""
