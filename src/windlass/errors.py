"""The errors that windlass explains to its user, and the exit codes of its commands: one table for every command and launcher.

    WindlassError          given, rule, change: three sentences
        UserError          2   the recipe or its surroundings; somebody has to change something
            AbsentSource         a source of data that is not here
            BadShard             damage in data that the user owns
            BadCheckpoint        damage in a checkpoint, or none where one is named
            SeveralErrors        several mistakes of one recipe, each with its own rule and change
            Unavailable    74  a store, a hub or a server that does not answer now
            UnreachableSource 74  an AbsentSource whose server cannot be reached now
        Diverged           4   no step of the run changes a weight any more
        OutOfSync          5   ranks that should hold the same hold different values
        BadLayout          1   a bug of ours; printed with its traceback
        Stopped           75   a signal ended the run after a checkpoint (from Python, where asked for)

    code  meaning                                                              retry
    0     done
    1     a bug of ours, with a traceback                                      a few times: it may be a crash of one host
    2     the recipe or its surroundings (UserError)                           no
    3     not equal (`verify`, `checkpoint diff`)                              no
    4     diverged                                                             no
    5     ranks out of step                                                    yes, from the last checkpoint
    74    data or storage does not answer                                      yes
    75    stopped on request after a checkpoint                                yes: the same command goes on
    130   interrupted before there was anything to save, or a second Ctrl-C    no
    128+n a rank was killed by signal n (from our launcher)                    yes

`code` and `retry` are attributes of each class. `windlass.cli.main` alone turns an error into an exit code.
"""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

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
FINAL: Final = (EXIT_USER_ERROR, EXIT_NOT_EQUAL, EXIT_DIVERGED)
"""After these the same command would end the same way: whatever starts ranks again, here or in a cluster, does not then."""


class WindlassError(Exception):
    """`given`: what was found; `rule`: what it breaks; `change`: what to do about it. Each is one sentence, and may be shown: it
    holds no secret of a URL and no control character, whatever it quotes."""

    code: ClassVar[int] = EXIT_BUG
    retry: ClassVar[bool] = False
    """Whether the same command may succeed when it is started again, with nothing changed by anybody."""
    elsewhere: bool = False
    """Whether it happened on another rank, which shows it. It is raised here as well, so that all ranks end alike."""

    def __init__(self, given: str, rule: str, change: str):
        self.given, self.rule, self.change = shown(given), shown(rule), shown(change)
        super().__init__(self.given, self.rule, self.change)

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

    code, retry = EXIT_UNAVAILABLE, True


class UnreachableSource(AbsentSource):
    """A source whose server this host cannot reach now. What was prepared of it before may be used."""

    code, retry = EXIT_UNAVAILABLE, True


class Stopped(WindlassError):
    """A run that a signal ended after a checkpoint. Only `train(..., raise_on_stop=True)` raises it."""

    code, retry = EXIT_STOPPED, True


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

    code, retry = EXIT_OUT_OF_SYNC, True


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


def nearest(word: str, choices: list[str]) -> str:
    """' Did you mean `x`?' for the closest of `choices`, or '' if none is near."""
    import difflib

    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`? " if close else ""


def nearest_entry(path: "Path", choices: Iterable[str] | None = None) -> str:
    """The same for a path that is not there, among `choices` or all that is beside it."""
    import difflib

    if choices is None:
        choices = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    close = difflib.get_close_matches(path.name, list(choices), n=1, cutoff=0.6)
    return f"did you mean `{path.parent / close[0]}`? " if close else ""
