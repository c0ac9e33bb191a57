"""A rank of a run that hangs where a plan says, in one of five ways, until it is released.

python -m tests.supervise.hung_rank RECIPE PLAN: the plan is a list of [completed step, phase, rank, kind]; hang number n is begun
when hanging-n is there beside it, and ends when release-n is."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import windlass
from windlass.supervise.heartbeat import Heartbeat


def stopped(_release: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop(release: Path) -> None:
    while not os.path.exists(release):
        pass


def sleep(release: Path) -> None:
    while not os.path.exists(release):
        time.sleep(0.05)


def lock(release: Path) -> None:
    held = threading.Lock()
    held.acquire()

    def let_go() -> None:
        sleep(release)
        held.release()

    threading.Thread(target=let_go, daemon=True).start()
    held.acquire()


def read(release: Path) -> None:
    os.mkfifo(pipe := release.with_suffix(".pipe"))
    pipe.read_bytes()  # the open waits for a writer: who releases is one


KINDS = {kind.__name__: kind for kind in (stopped, loop, sleep, lock, read)}


def hang_at(plan: list[tuple[int, str, int, str]], folder: Path) -> None:
    """Every phase of this rank begins by looking at the plan."""
    number_at = {(step, phase, rank): number for number, (step, phase, rank, _) in enumerate(plan)}
    original = Heartbeat.beat

    def beat(self, phase, step=None, position=None):
        original(self, phase, step, position)
        number = number_at.get((self._step, phase, int(os.environ["RANK"])))
        if number is not None:
            (folder / f"hanging-{number}").touch()
            KINDS[plan[number][3]](folder / f"release-{number}")

    Heartbeat.beat = beat


if __name__ == "__main__":
    plan = Path(sys.argv[2])
    hang_at([tuple(one) for one in json.loads(plan.read_text())], plan.parent)
    windlass.train(windlass.load_recipe(sys.argv[1]))
