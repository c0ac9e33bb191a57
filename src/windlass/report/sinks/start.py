"""The process that follows a run that trains: started by rank 0, ended by the end of rank 0, however that comes.

It waits on a pipe that rank 0 holds: when that closes, by an exit or by SIGKILL, it sends the last lines and ends. It is in a
session of its own, so that a Ctrl-C that asks the run to stop and save does not end it. What it prints goes to a log of the run.
"""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from windlass.contract import environment_of_child
from windlass.report.config import SinkName
from windlass.report.sinks.follow import Follower, send_until, sent_run
from windlass.report.sinks.sink import Sink

LONGEST_S: Final = 60.0  # that the end of a run waits for a sink


@contextlib.contextmanager
def following(
    run_directory: Path, sinks: Sequence[SinkName], say: Callable[[str], None], longest_s: float = LONGEST_S
) -> Iterator[None]:
    """Inside, each sink is sent what the run logs. One that fails ends no run: `say` gets a sentence, once."""
    started = {name: _start(run_directory, name) for name in sinks}
    watched = {
        name: threading.Thread(target=_watch, args=(process, name, run_directory, say), daemon=True)
        for name, process in started.items()
    }
    for thread in watched.values():
        thread.start()
    try:
        yield
    finally:
        for process in started.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for name, thread in watched.items():
            thread.join(longest_s)
            if thread.is_alive():
                say(
                    f"{name} is still sent what the run logged; {_again(run_directory, name)} goes on if it does not end"
                )


@contextlib.contextmanager
def sending(
    run_directory: Path, sinks: Sequence[Sink], say: Callable[[str], None], longest_s: float = LONGEST_S
) -> Iterator[None]:
    """Sends to sinks that are objects of this process: each by a thread of its own, off the step, and no step twice over all
    resumes. `sinks/CLASS.json` keeps how far each is."""
    is_over = threading.Event()

    def work(sink: Sink, name: str) -> None:
        try:
            send_until(Follower(name, sent_run(run_directory), lambda _run: sink), is_over.wait)
        except Exception as error:
            say(f"metrics are not sent to {name}: {type(error).__name__}: {error}")

    if sinks:
        (run_directory / "sinks").mkdir(parents=True, exist_ok=True)
    names = [_name_of(sinks, sink) for sink in sinks]
    threads = [threading.Thread(target=work, args=of, daemon=True) for of in zip(sinks, names, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread, name in zip(threads, names, strict=True):
            thread.join(longest_s)
            if thread.is_alive():
                say(f"metrics are still being sent to {name}; a resume continues from there")


def _name_of(sinks: Sequence[Sink], sink: Sink) -> str:
    """The name of a sink: its class, numbered where several are of one."""
    name = type(sink).__name__
    alike = [one for one in sinks if type(one).__name__ == name]
    return name if len(alike) == 1 else f"{name}-{alike.index(sink)}"


def _start(run_directory: Path, name: SinkName) -> "subprocess.Popen[bytes]":
    log = _log_of(run_directory, name)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "windlass", "sync", str(run_directory), "--to", name, "--until-eof"]
    with open(log, "ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment_of_child(), start_new_session=True
        )


def _watch(process: "subprocess.Popen[bytes]", name: str, run_directory: Path, say: Callable[[str], None]) -> None:
    if process.wait() != 0:
        log, lines = _log_of(run_directory, name), []
        with contextlib.suppress(OSError):
            lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.startswith("windlass: ")]
        reason = lines[-1].removeprefix("windlass: ") if lines else f"exit code {process.returncode}, see {log}"
        say(f"metrics are not sent to {name}: {reason}; later: {_again(run_directory, name)}")


def _log_of(run_directory: Path, name: str) -> Path:
    return run_directory / "logs" / f"sink-{name}.log"


def _again(run_directory: Path, name: str) -> str:
    return f"windlass sync {run_directory} --to {name}"
