"""What a rank writes: rank 0 to the terminal and its log, the others to their logs alone."""

import contextlib
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from windlass.contract import has_agent
from windlass.errors import UserError, WindlassError
from windlass.safe_text import shown

TAIL_LINES: Final = 30
"""Lines of a failing rank's log that are shown on its stderr."""
_LEFT: Final = list[tuple[int, int]]()
"""Where stdout and stderr of this rank led before a run that failed, since they lead to its log still."""
ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Terminal control sequences (ECMA-48, 5.4)."""


class _Tee(io.TextIOBase):
    """The terminal, and a log that gets whole lines only: no colours, no progress line that is rewritten in place."""

    def __init__(self, terminal: TextIO, log: TextIO):
        self._terminal, self._log = terminal, log
        self._line = ""

    def write(self, text: str) -> int:
        *lines, begun = (self._line + text).split("\n")  # print writes a line and its end one after the other
        self._line = begun.rpartition("\r")[2]
        if lines:
            with contextlib.suppress(OSError):  # a full disk: the terminal has the line
                self._log.writelines(ANSI.sub("", line.rpartition("\r")[2]) + "\n" for line in lines)
                self._log.flush()
        return self._terminal.write(text)

    def flush(self) -> None:
        self._terminal.flush()

    def isatty(self) -> bool:
        return self._terminal.isatty()

    def fileno(self) -> int:
        return self._terminal.fileno()


@contextlib.contextmanager
def redirected_output(run_directory: Path, rank: int) -> Iterator[None]:
    """Every rank has logs/rank-N.log in the run directory. Rank 0 keeps the terminal too, until the end of the context; the
    others write to their log alone. Where one of those fails, it does so for the rest of its process, and the end of its log goes
    to its stderr too: nobody but our own launcher would show it. Under that, rank 0's traceback goes to its log."""
    file = run_directory / "logs" / f"rank-{rank}.log"
    descriptor = _open_log(file)
    if rank == 0:
        terminal = sys.stdout
        log = os.fdopen(descriptor, "a", encoding="utf-8")
        sys.stdout = _Tee(terminal, log)
        try:
            yield
        except Exception:
            if has_agent():  # which shows the end of the log of the rank that failed first: often it is another
                sys.stderr.flush()
                os.dup2(log.fileno(), 2)
            raise
        finally:
            sys.stdout = terminal
            with contextlib.suppress(OSError):  # what a full disk did not take is lost
                log.close()
        return
    stdout, stderr = _LEFT.pop() if _LEFT else (os.dup(1), os.dup(2))
    _point_to(descriptor, descriptor)
    os.close(descriptor)
    try:
        yield
    except BaseException as error:
        _LEFT.append((stdout, stderr))
        sys.stdout.flush()
        if isinstance(error, Exception) and not has_agent():
            os.write(stderr, _last_words(rank, file, error).encode())
        raise
    _point_to(stdout, stderr)
    os.close(stdout)
    os.close(stderr)


def _point_to(stdout: int, stderr: int) -> None:
    """What was written so far goes to where both led before."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Inside, what this process writes there is lost: torch's frames of C++, at every store that does not answer."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def quiet_libraries() -> None:
    """In this process. transformers and PEFT import torchao where it is installed; it logs a line for each kernel of its wheel
    that is for another GPU, and torch a line for each of its enums. Nothing of that is about what the user does."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def silent_imports() -> Iterator[None]:
    """Inside, nothing is logged: what a package says of itself while it is imported is not about what the user does."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _open_log(file: Path) -> int:
    """A descriptor that appends to `file`. Raises UserError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise UserError(
            f"the log {file} cannot be opened: {error.strerror}",
            "every rank has a file logs/rank-N.log in the run directory",
            "remove the file that is in the way, or fix the permissions of the run directory",
        ) from None


def _last_words(rank: int, log: Path, error: Exception) -> str:
    """What a failing rank shows: an error of ours that no other rank shows, or the end of its log with the traceback that it ends
    with."""
    if isinstance(error, WindlassError):
        return "" if error.elsewhere else f"windlass: rank {rank}: {error}\n"
    lines = log.read_text("utf-8", errors="replace").splitlines()
    lines += "".join(traceback.format_exception(error)).splitlines()
    return shown("\n".join([f"windlass: rank {rank} failed", *lines[-TAIL_LINES:], f"(the end of {log})", ""]))
