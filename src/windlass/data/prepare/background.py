"""`prepare` in a process of its own, so that training begins while it works.

The process is a fresh interpreter. It reads its task from stdin and writes lines and errors to stdout, as JSON. It ends when its
stdin closes: whatever kills its parent leaves no orphan. Its finished work is kept (tokenize/resume, shards/journal), and the
next process continues.

A process that finds another one preparing waits for the lock, and takes over if that one dies.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.prepare.manifest import load_prepared
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.journal import BEAT_NAME, log_failure, open_journal
from windlass.errors import (
    EXIT_BUG,
    EXIT_USER_ERROR,
    AbsentSource,
    BadShard,
    Unavailable,
    UnreachableSource,
    UserError,
)
from windlass.safe_text import keep_secret, say, secret_values

POLL_S: Final = 0.1
KINDS: Final = {kind.__name__: kind for kind in (UserError, AbsentSource, BadShard, Unavailable, UnreachableSource)}


def run_preparation() -> None:
    """The process's whole life."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends this one after it saves
    sys.excepthook = _send_crash
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    for value in task["secrets"]:
        keep_secret(value)
    config = DataConfig.model_validate({**task["config"], "rehash": task["rehash"]})
    sets = {name: SourceConfig.model_validate(source) for name, source in task["sets"].items()}
    try:
        prepare(
            config, sets, lambda line: _send({"line": line}), task["begun"], lambda found: _send({"fingerprint": found})
        )
    except UserError as error:
        _send({"error": [error.given, error.rule, error.change], "kind": type(error).__name__})
        os._exit(EXIT_USER_ERROR)
    os._exit(0)


def _send(message: Mapping[str, Any]) -> None:
    try:
        print(json.dumps(message), flush=True)
    except BrokenPipeError:  # the parent is gone
        os._exit(EXIT_BUG)


def _send_crash(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    say("".join(traceback.format_exception(kind, error, where)).rstrip(), sys.stderr)
    _send({"crash": traceback.format_exception_only(kind, error)[-1].strip()})


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(EXIT_BUG)


def _command() -> list[str]:
    search = f"PYTHONPATH={os.pathsep.join(sys.path)}"  # also the entries that this program added
    return ["env", search, sys.executable, "-P", "-m", "windlass.data.prepare.background"]


class Background:
    """The process and the messages it has sent. It ends with this process at the latest."""

    def __init__(
        self, config: DataConfig, sets: Mapping[str, SourceConfig], log: Callable[[str], None], begun: str | None
    ):
        self._process = subprocess.Popen(_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._log, self._error = log, list[UserError]()
        self._directory = Path(config.directory).absolute()
        self._crash = "what it wrote before says why"
        self.fingerprint: str | None = None
        """The fingerprint of what it prepares, once known."""
        task = {
            "config": config.model_dump(mode="json", by_alias=True),
            "sets": {name: source.model_dump(mode="json", by_alias=True) for name, source in sets.items()},
            "begun": begun,
            "rehash": config.rehash,
            "secrets": secret_values(),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        # the thread keeps this object, and with it the process's stdin, until the process ends
        self._thread = threading.Thread(target=self._listen, daemon=True, name="windlass-prepare")
        self._thread.start()

    def _listen(self) -> None:
        with self._process as process:  # its pipes are closed with it
            assert process.stdout is not None
            for line in process.stdout:
                self._take(json.loads(line))
        code = process.returncode
        if code and not self._error:
            self._error.append(_died(code, self._crash))
        if self._error:
            log_failure(self._directory, self._error[0])  # to the ranks that wait for shards

    def _take(self, message: dict[str, Any]) -> None:
        if "line" in message:
            self._log(message["line"])
        elif "fingerprint" in message:
            self.fingerprint = message["fingerprint"]
        elif "crash" in message:
            self._crash = message["crash"]
        else:
            self._error.append(KINDS.get(message["kind"], UserError)(*message["error"]))

    def wait_until(self, is_enough: Callable[[], bool]) -> None:
        """Waits until `is_enough()` or the preparation ends. Raises UserError where it fails before."""
        while self._thread.is_alive() and not is_enough():
            self._thread.join(POLL_S)
        if self._thread.is_alive():
            return
        if self._error:
            raise self._error[0]

    def stop(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._thread.join()


def _died(code: int, crash: str) -> UserError:
    """Why the process ended: by a signal, which may not recur, or by a bug, which will."""
    given = f"the process that prepares data ended with exit code {code}"
    rule = "it works until all is prepared"
    if code < 0:
        change = "start again: preparation and training go on where they were"
        return UserError(f"{given} ({signal.strsignal(-code)}, perhaps for memory)", rule, change)
    change = "this is a fault of windlass or of a library, which comes again with the same data: the traceback above says where"
    return UserError(f"{given}: {crash}", rule, change)


def start(
    config: DataConfig, sets: Mapping[str, SourceConfig], log: Callable[[str], None] = say, begun: str | None = None
) -> Background:
    """Prepares in the background. Returns once a run can begin: all other sets and the first shuffle window are written, or all.
    Raises UserError, as `prepare` does."""
    directory = Path(config.directory).absolute()
    (directory / BEAT_NAME).unlink(missing_ok=True)  # it may hold the error of an earlier preparation
    found = Background(config, sets, log, begun)
    found.wait_until(
        lambda: found.fingerprint is not None and _can_begin(directory, found.fingerprint, config.shuffle_window)
    )
    return found


def _can_begin(directory: Path, fingerprint: str | None, shuffle_window: int) -> bool:
    """Whether the preparation of this fingerprint has its first shuffle window, or all shards."""
    if fingerprint is None:
        return False
    whole = load_prepared(directory)
    if whole is not None:
        return whole.fingerprint == fingerprint
    journal = open_journal(directory)
    if journal is None or journal.begin["fingerprint"] != fingerprint:
        return False
    return journal.end is not None or len(journal.shards) >= shuffle_window


if __name__ == "__main__":
    run_preparation()
