"""Work in forks of one process that has imported all; each dies by SIGKILL at a call of the test's choice."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]  # what `work` imports tests from
BEGIN = """
import os, signal, sys, traceback
def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""
LOOP = """
for line in sys.stdin:
    *given, calls = line.rstrip().split("\\t")
    child = os.fork()
    if child == 0:
        try:
            left = int(calls)
            run(*given)
            print("left", left, flush=True)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        print("status", status, flush=True)
"""


@contextlib.contextmanager
def killing(work: str, environ: Mapping[str, str]) -> Iterator[Callable[..., int | None]]:
    """`work`: Python that defines run(*words) and has `count()` called at each call that is counted. Yields what runs it:
    (*words, call) -> None where it died at that call, else how many were left, less than 0 where there were more."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environ}
    with subprocess.Popen([sys.executable, "-c", BEGIN + work + LOOP], **pipes) as killer:

        def ask(*given: object) -> int | None:
            killer.stdin.write("\t".join(map(str, given)) + "\n")
            killer.stdin.flush()
            word, found = killer.stdout.readline().split()
            assert word == "left" or int(found) == signal.SIGKILL, f"it ended with status {found}"
            return int(found) if word == "left" else None

        yield ask
        killer.stdin.close()
