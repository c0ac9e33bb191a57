"""`make test-all`: the quick set, then every file's long tests, a part each, or several where a file has many. An interrupted run
goes on with the next part.

A test that is skipped for want of something is red; scripts/test_programs.sh has installed what they need.

A part that is green is recorded as an empty file below build/test-all/COMMIT/. Parts belong to a commit: a working tree with
changes is refused, and a new commit begins anew. When every part is green the last line says so and names the commit.

    python scripts/test_all.py          # parts that are not green yet on this commit
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICK = "quick"
MOST = 300
"""Long tests of a part."""
PYTEST = (sys.executable, "-m", "pytest", "-n", "2", "--no-skips")


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def long_parts() -> list[str]:
    """Files that hold long tests, as pytest counts them (`-qq` prints `file: number of tests`): FILE, or FILE@K/N of N pieces."""
    command = [sys.executable, "-m", "pytest", "--long", "-m", "long", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    counts = re.findall(r"^(\S+\.py): (\d+)$", done.stdout, re.MULTILINE)
    return [part for file, count in counts for part in pieces(file, -(-int(count) // MOST))]


def pieces(file: str, number: int) -> list[str]:
    return [file] if number == 1 else [f"{file}@{piece}/{number}" for piece in range(1, number + 1)]


def command_of(part: str, record: Path) -> list[str]:
    if part == QUICK:
        return [*PYTEST, "--dist", "loadfile"]
    file, _, share = part.partition("@")
    shared = ["--share", share] if share else []
    return [*PYTEST, "--dist", "worksteal", "--long", "-m", "long", "--record-seconds", str(record), *shared, file]


def run_parts(parts: list[str], done: Path, record: Path) -> list[str]:
    """Runs what `done` does not hold yet -> the parts that failed."""
    failed = []
    for number, part in enumerate(parts, 1):
        mark = done / part.replace(os.sep, "--")
        if mark.exists():
            print(f"test-all: {number} of {len(parts)}, {part}: green before", flush=True)
            continue
        print(f"test-all: {number} of {len(parts)}, {part}", flush=True)
        if subprocess.run(command_of(part, record), cwd=ROOT, check=False).returncode == 0:
            mark.touch()
        else:
            failed.append(part)
    return failed


def main() -> int:
    if git("status", "--porcelain", "--untracked-files=no"):
        print("test-all: the working tree has changes; parts are green on a commit: commit first", file=sys.stderr)
        return 2
    commit = git("rev-parse", "HEAD")
    done = ROOT / "build" / "test-all" / commit
    done.mkdir(parents=True, exist_ok=True)
    parts = [QUICK, *long_parts()]
    failed = run_parts(parts, done, done.parent / "long_seconds.json")
    if failed:
        print(f"test-all: {len(failed)} of {len(parts)} parts FAILED on {commit}: {' '.join(failed)}")
        return 1
    print(f"test-all: all {len(parts)} parts are green on {commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
