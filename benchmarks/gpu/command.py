"""`windlass train` as a user starts it, for the scripts that measure it: a recipe in a directory, a process, its events."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import yaml

WORDS: Final = 5000  # different ones, in made-up text
DEADLINE_S: Final = 600.0  # of a run that is waited for


def write_made_up_text(path: Path, documents: int, words: int) -> None:
    """`documents` lines of JSON, each of `words` random words. The same text every time."""
    drawn = random.Random(17)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(drawn.choices(letters, k=drawn.randint(2, 9))) for _ in range(WORDS)]
    rows = (json.dumps({"text": " ".join(drawn.choices(known, k=words))}) for _ in range(documents))
    path.write_text("\n".join(rows) + "\n")


def start(recipe: dict[str, Any], directory: Path) -> subprocess.Popen[str]:
    """`windlass train` of this recipe in `directory`, on one rank."""
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "windlass", "train", "recipe.yaml", "--nproc", "1"]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(recipe: dict[str, Any], directory: Path, expected: int = 0) -> str:
    """Runs it to its end -> what it printed. Raises RuntimeError, with its last words, for another exit code than `expected`."""
    return ended(start(recipe, directory), expected)


def ended(process: subprocess.Popen[str], expected: int) -> str:
    printed, _ = process.communicate(timeout=DEADLINE_S)
    if process.returncode != expected:
        raise RuntimeError(f"windlass train left with {process.returncode}, not {expected}: {printed[-600:]}")
    return printed


def events_of(run: Path) -> list[dict[str, Any]]:
    """Of a run directory, those that are written so far; a last line that is not whole is left out."""
    file = run / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def losses_of(events: list[dict[str, Any]]) -> dict[int, float]:
    """Step -> loss. Of a step that was done twice, the later one."""
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def signal_when(
    process: subprocess.Popen[str], run: Path, is_time: Callable[[list[dict[str, Any]]], bool], number: signal.Signals
) -> None:
    """Sends `number` once the run's events say so. Raises RuntimeError where the run ends before."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_time(events_of(run)):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended, or hung, before it was signalled: {ended(process, 0)[-300:]}")
        time.sleep(0.05)
    process.send_signal(number)
