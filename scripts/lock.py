"""requirements.lock: write it from this environment (`write`), or check that its wheels exist (`check`).

The lock holds `name==version` and nothing else: no URLs, no hashes, and no local suffix ("2.13.0+cpu" is "2.13.0"),
so that one file serves the CPU and the CUDA build of torch. It lists what windlass, its dev extra and the build of
the editable install need, transitively, on the machine that wrote it. torch's CUDA build pins packages of its own,
which pip adds where it is used.

`check` asks pip, for each Python we support, to resolve every line to a wheel, without installing anything. An index
that serves torch for one Python only cannot answer for the others; torch is then left out there, and a line says so.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK = Path(__file__).parent.parent / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ROOTS = (("windlass-lm", ("dev",)), ("hatchling", ()), ("editables", ()))  # the last two build the editable install


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed() -> dict[str, str]:
    """name -> version of everything that ROOTS need here, extras followed; windlass itself left out."""
    from packaging.requirements import Requirement

    versions: dict[str, str] = {}
    waiting = list(ROOTS)
    while waiting:
        name, extras = waiting.pop()
        if normalise(name) in versions and not extras:
            continue
        distribution = importlib.metadata.distribution(name)
        versions[normalise(name)] = distribution.version.split("+")[0]
        for requirement in map(Requirement, distribution.requires or []):
            chosen = any(not requirement.marker or requirement.marker.evaluate({"extra": e}) for e in ("", *extras))
            if chosen and (normalise(requirement.name) not in versions or requirement.extras):
                waiting.append((requirement.name, tuple(requirement.extras)))
    del versions["windlass-lm"]
    return versions


def resolves(lines: list[str], python: str) -> tuple[bool, str]:
    """(does every line have a wheel for this Python?, what pip said)"""
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text("\n".join(lines) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        command += ["--only-binary=:all:", "--python-version", python, "--target", f"{scratch}/target"]
        done = subprocess.run([*command, "-r", str(requirements)], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stderr.strip()


def check() -> int:
    lines = LOCK.read_text().split()
    failures = 0
    for python in PYTHONS:
        torch = [line for line in lines if line.startswith("torch==")]
        others = [line for line in lines if line not in torch]
        good, said = resolves(others, python)
        torch_good, _ = resolves(torch, python)
        verdict = f"all {len(others)} lines but torch have wheels" if good else f"FAILED\n{said}"
        print(
            f"Python {python}: {verdict}; {torch[0]} {'has one' if torch_good else 'is not on this index: unchecked'}"
        )
        failures += not good
    return 1 if failures else 0


def main() -> int:
    if sys.argv[1:] == ["write"]:
        LOCK.write_text("".join(f"{name}=={version}\n" for name, version in sorted(needed().items())))
        print(f"{LOCK.name}: {len(LOCK.read_text().split())} packages")
        return 0
    if sys.argv[1:] == ["check"]:
        return check()
    print("usage: python scripts/lock.py write | check", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
