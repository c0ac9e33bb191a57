"""What the GPU scripts share: cells in order of what they show, a budget of minutes, one results file that grows.

A script is a list of cells. They run in their order while they fit the minutes; each is written as soon as it is measured
(a draft that is renamed), so that a run that is cut off has lost one cell. A cell that is in the file for this device,
this torch and this code is skipped, whatever came out of it; `--again` repeats it. What a cell ran out of is a result too:

    measured       `result` holds the figures
    out of memory  `message` says how much was asked for
    absent         this torch or this device has no such thing (NotImplementedError says so too)
    failed         anything else; the exit code is then 1

"This code" is a fingerprint of the syntax trees of the files that a cell names as its sources, and of its settings:
comments, docstrings and formatting may change, and another cell may be added, without a new measurement.

Figures of a GPU at full size go to benchmarks/results/. All else is a trial: it must name a file elsewhere, and the two are
never merged.
"""

import argparse
import ast
import datetime
import gc
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from book import Book

from windlass.checkpoint.provenance import git_state
from windlass.units import format_duration

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MESSAGE_CHARACTERS = 800


class Absent(Exception):
    """Raised by a cell that this torch or this device cannot run."""


@dataclass(frozen=True)
class Cell:
    """One measurement. `measure` gets the device and returns what the file keeps, as JSON."""

    name: str
    estimate_s: float
    measure: Callable[[torch.device], dict[str, Any]]
    sources: tuple[Path, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(json.dumps([self.name, self.settings], sort_keys=True).encode(), digest_size=8)
        for path in sorted(self.sources):
            digest.update(meaning(path.read_text()).encode())
        return digest.hexdigest()


def meaning(source: str) -> str:
    """Python source without what does not run: comments, formatting, docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def sources_of(*places: str) -> tuple[Path, ...]:
    """Files, and all .py files under folders, given relative to the repository."""
    paths = [ROOT / place for place in places]
    return tuple(file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py"))))


# ---- the command line


def parse(script: str, about: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of all scripts. Ends the program with code 2 where a trial would pass for a measurement."""
    parser = argparse.ArgumentParser(prog=f"{script}.py", description=about)
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell is begun that would end after this")
    parser.add_argument("--out", type=Path, help="results file; needed for a trial")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: tries the script, measures nothing")
    parser.add_argument(
        "--only", metavar="PATTERN", default="", help="only cells whose name has this regular expression"
    )
    parser.add_argument("--again", metavar="PART", nargs="?", const="", help="repeat cells that are measured already")
    parser.add_argument("--list", action="store_true", help="print the cells in their order, and end")
    parser.add_argument("--commit", default=None, help="of the code, where the copy has no .git")
    options = parser.parse_args(arguments)
    options.script, options.start_s = script, time.monotonic()
    options.is_trial = options.device == "cpu" or options.tiny
    if options.list:
        return options
    if options.is_trial and (options.out is None or RESULTS in options.out.resolve().parents):
        parser.error(
            "a trial (--device cpu or --tiny) is no GPU figure: give --out FILE, outside of benchmarks/results"
        )
    if options.device == "cpu" and not options.tiny:
        parser.error("full shapes take hours on a CPU: add --tiny")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; a trial runs with --device cpu --tiny --out FILE")
    options.out = options.out or RESULTS / f"gpu-{script.replace('_', '-')}.json"
    return options


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and with what this run measures."""
    git = git_state(ROOT)
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "trial": options.is_trial,
        "device": platform.machine(),
        "device_type": options.device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "commit": git["commit"] if git else options.commit,
        "uncommitted": bool(git["diff"]) if git else None,
    }
    if options.device == "cuda":
        device = torch.cuda.get_device_properties(0)
        found |= {
            "device": torch.cuda.get_device_name(0),
            "memory_bytes": device.total_memory,
            "num_sms": device.multi_processor_count,
            "driver": _driver(),
        }
    return found


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or None
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None


# ---- running


def run_cells(cells: Sequence[Cell], options: argparse.Namespace) -> Book:
    """Measures what fits the minutes. -> the file, with what was there and what is new."""
    assert len({cell.name for cell in cells}) == len(cells), "two cells of one name"
    chosen = [cell for cell in cells if re.search(options.only, cell.name)]
    book = Book(options.out, options.script, describe(options))
    device = torch.device(options.device)
    spent_s, estimated_s, left_out = 0.0, 0.0, []
    print(
        f"{options.script} on {book.run['device']}, torch {book.run['torch']}, {options.minutes:g} minutes", flush=True
    )
    for number, cell in enumerate(chosen, 1):
        known = book.rows().get(cell.name)
        fingerprint = cell.fingerprint()
        repeat = options.again is not None and options.again in cell.name
        if known and known["fingerprint"] == fingerprint and not repeat:
            continue
        # a machine that is slower than the estimates so far is believed; one that is faster may have been lucky
        needed_s = cell.estimate_s * max(1.0, spent_s / estimated_s if estimated_s else 1.0)
        if time.monotonic() - options.start_s + needed_s > 60 * options.minutes:
            left_out.append(cell.name)
            continue
        row = measure(cell, device)
        spent_s, estimated_s = spent_s + row["seconds"], estimated_s + cell.estimate_s
        book.add(row | {"settings": cell.settings, "fingerprint": fingerprint})
        elapsed = format_duration(time.monotonic() - options.start_s)
        print(
            f"  {number}/{len(chosen)} at {elapsed}: {cell.name}: {row['status']} ({row['seconds']:.1f} s)", flush=True
        )
        if not is_alive(device):
            raise SystemExit("the device answers no more: start the script again; what is measured will be skipped")
    if left_out:
        print(f"not reached, start it again: {', '.join(left_out)}", flush=True)
    return book


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """One row. A cell that fails is named in its row, since the others must not lose their GPU time by it."""
    start_s = time.monotonic()
    row: dict[str, Any] = {"name": cell.name}
    try:
        row |= {"status": "measured", "result": cell.measure(device)}
    except torch.OutOfMemoryError as error:
        row |= {"status": "out of memory", "message": plain(str(error))}
    except (Absent, NotImplementedError) as error:
        row |= {"status": "absent", "message": plain(str(error))}
    except Exception as error:
        row |= {"status": "failed", "message": plain(f"{type(error).__name__} in {_where(error)}: {error}")}
    free(device)
    return row | {"seconds": round(time.monotonic() - start_s, 2)}


def _where(error: Exception) -> str:
    """The innermost frames, without folders: enough to find the line."""
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}")
        at = at.tb_next
    return " > ".join(frames[-4:])


def plain(message: str) -> str:
    """A message without folders of this machine, and not too long for a results file."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@=-]+/)+", "", message)[:MESSAGE_CHARACTERS]


def free(device: torch.device) -> None:
    """Gives back what the last cell held: tensors in cycles, compiled code, the allocator's cache."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda" and is_alive(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def is_alive(device: torch.device) -> bool:
    """False after an error that the CUDA context does not survive (an illegal access, say)."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
    return True


def list_cells(cells: Sequence[Cell]) -> int:
    for cell in cells:
        print(f"{cell.estimate_s:5.0f} s  {cell.name}")
    print(f"{sum(cell.estimate_s for cell in cells) / 60:.1f} minutes, estimated")
    return 0


def exit_code(book: Book) -> int:
    """1 where a cell failed in this run for no known reason."""
    failed = [row for row in book.rows().values() if row["status"] == "failed" and row["run"] == book.run["date"]]
    for row in failed:
        print(f"failed: {row['name']}: {row['message'][:200]}", file=sys.stderr)
    return 1 if failed else 0


def run_script(
    script: str,
    about: str | None,
    make_cells: Callable[[bool], Sequence[Cell]],
    show: Callable[[Book], None],
    arguments: Sequence[str] | None = None,
) -> int:
    """What every script does: its command line, its cells (of a trial, the tiny ones), its table. -> the exit code."""
    options = parse(script, (about or "").splitlines()[0], arguments)
    cells = make_cells(options.tiny)
    if options.list:
        return list_cells(cells)
    book = run_cells(cells, options)
    show(book)
    return exit_code(book)
