"""The Containerfile: built where a builder is at hand; elsewhere its steps on the files that it copies, in a new environment.

Not run without a builder: apt's packages and the user, which change the machine, and requirements.lock, which `make demo`
installs.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_THE_IMAGE = ("apt-get", "useradd", "-r requirements.lock")


def steps_of(text):
    """(instruction, its arguments) in order."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line.strip()]


STEPS = steps_of((ROOT / "Containerfile").read_text())


def run(command, **settings):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_steps_leave_the_command_that_it_enters_by(tmp_path):
    place, environment = tmp_path / "image", tmp_path / "venv"
    place.mkdir()
    run([sys.executable, "-m", "venv", "--without-pip", environment])
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    (environment / "bin" / "pip").write_text(f'#!/bin/sh\nexec {shlex.join(pip)} "$@"\n')
    (environment / "bin" / "pip").chmod(0o755)
    borrowed = run([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    variables = {"PATH": f"{environment}/bin:/usr/bin:/bin", "PYTHONPATH": borrowed}
    ran = []
    for instruction, arguments in STEPS:
        if instruction == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, place / (source if target == "./" else target))
        elif instruction == "RUN" and not any(word in arguments for word in OF_THE_IMAGE):
            run(["sh", "-c", arguments], cwd=place, env=variables)
            ran.append(arguments)
    assert len(ran) == 1 and ran[0].startswith("pip install ") and ran[0].endswith(" .")
    entered = [*json.loads(dict(STEPS)["ENTRYPOINT"]), *json.loads(dict(STEPS)["CMD"])]
    assert "Usage: windlass" in run(entered, cwd=tmp_path, env=variables)
    place.rename(tmp_path / "elsewhere")  # nothing is read from what was copied
    where = "import windlass; print(windlass.__file__)"
    assert run([environment / "bin" / "python", "-c", where], cwd=tmp_path, env=variables).startswith(str(environment))


def test_it_copies_and_locks_what_is_there():
    assert STEPS[0][0] == "FROM" and "python:3.11" in STEPS[0][1]
    locked = [
        arguments for instruction, arguments in STEPS if instruction == "RUN" and "requirements.lock" in arguments
    ]
    assert len(locked) == 1
    order = [arguments.split()[0] for instruction, arguments in STEPS if instruction == "COPY"]
    assert order.index("requirements.lock") < order.index("src"), "a change of the source installs no package again"
    assert dict(STEPS)["USER"] == "trainer", "a run is not root"


def works(builder):
    return shutil.which(builder) and subprocess.run([builder, "info"], capture_output=True, check=False).returncode == 0


@pytest.mark.long
def test_a_builder_builds_it(tmp_path):
    builder = next((name for name in ("podman", "docker") if works(name)), None)
    if builder is None:
        pytest.skip("no podman or docker that works on this machine")
    run([builder, "build", "-t", "windlass-test", "-f", str(ROOT / "Containerfile"), str(ROOT)], timeout=1800)
    assert "Usage: windlass" in run([builder, "run", "--rm", "windlass-test"], timeout=300)
