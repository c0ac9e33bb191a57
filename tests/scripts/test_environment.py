"""scripts/environment.sh: which Python it takes, and the sentence where none will do. Its Pythons here are fakes."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def box(tmp_path):
    """A checkout with nothing but the script, and a PATH that holds only the impostors and the shell's own tools."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "scripts" / "environment.sh", tmp_path / "scripts")
    (tmp_path / "requirements.lock").write_text("a==1\nb==2\n")
    for tool in ("sh", "dirname", "rm", "wc", "touch", "mkdir", "cat", "chmod"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def impostor(box, name, version, ensurepip=True):
    """A `python` that answers the script's questions and writes down what it is asked to do."""
    major, minor = version.split(".")
    new_enough = 0 if (int(major), int(minor)) >= (3, 11) else 1
    path = box / "bin" / name
    path.write_text(
        "#!/bin/sh\n"
        f'case "$*" in\n'
        f'*ensurepip*) exit {0 if ensurepip else 1};;\n'
        f'*"version_info <"*) exit {new_enough};;\n'
        f'*version_info*) echo {version};;\n'
        f'--version) echo Python {version};;\n'
        f'"-m venv .venv") echo "{name} $*" >>"{box}/calls"; mkdir -p .venv/bin; cat >.venv/bin/python <<END\n'
        "#!/bin/sh\n"
        f'echo "venv \\$*" >>"{box}/calls"\n'
        "END\n"
        "chmod +x .venv/bin/python;;\n"
        "esac\n"
    )  # fmt: skip
    path.chmod(0o755)


def make(box, **environment):
    command = ["sh", str(box / "scripts" / "environment.sh")]
    done = subprocess.run(
        command, env={"PATH": f"{box}/bin", **environment}, capture_output=True, text=True, check=False
    )
    calls = (box / "calls").read_text().splitlines() if (box / "calls").exists() else []
    return done, calls


def test_takes_the_preferred_python_installs_the_lock_and_leaves_a_stamp(box):
    impostor(box, "python3.12", "3.12")
    impostor(box, "python3.11", "3.11")
    done, calls = make(box)
    assert done.returncode == 0, done.stderr
    assert calls[0] == "python3.11 -m venv .venv"
    assert calls[-2].endswith("-r requirements.lock") and calls[-1].endswith(
        "--no-deps --no-build-isolation --editable ."
    )
    assert (box / ".venv" / "stamp").exists()
    assert "made with python3.11 (Python 3.11)" in done.stdout and "installing the 2 packages" in done.stdout


def test_it_says_that_it_changes_an_environment_that_the_user_made(box):
    impostor(box, "python3.11", "3.11")
    assert "is there already" not in make(box)[0].stdout and "is there already" not in make(box)[0].stdout
    (box / ".venv" / "stamp").unlink()
    assert (
        ".venv is there already; its packages are replaced by the versions of requirements.lock" in make(box)[0].stdout
    )


def test_passes_over_a_python_without_ensurepip_if_another_has_it(box):
    impostor(box, "python3.11", "3.11", ensurepip=False)
    impostor(box, "python3.13", "3.13")
    assert make(box)[1][0] == "python3.13 -m venv .venv"


def test_names_the_package_when_ensurepip_is_missing(box):
    impostor(box, "python3.11", "3.11", ensurepip=False)
    done, calls = make(box)
    assert done.returncode == 1 and calls == [] and not (box / ".venv").exists()
    assert (
        "python3.11 cannot make a virtual environment" in done.stderr
        and "install the package python3-venv" in done.stderr
    )


def test_says_how_old_the_python_is_that_will_not_do(box):
    impostor(box, "python3", "3.9")
    done, _ = make(box)
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed; python3 is 3.9; none of them will do" in done.stderr


def test_says_that_there_is_no_python_at_all(box):
    done, _ = make(box)
    assert done.returncode == 1 and "no Python was found" in done.stderr and "make PYTHON=" in done.stderr


def test_a_python_can_be_chosen(box):
    impostor(box, "python3.11", "3.11")
    impostor(box, "mine", "3.14")
    assert make(box, PYTHON="mine")[1][0] == "mine -m venv .venv"


def test_an_environment_that_works_is_kept_and_a_broken_one_is_made_anew(box):
    impostor(box, "python3.11", "3.11")
    make(box)
    calls = make(box)[1]
    assert sum(call.endswith("-m venv .venv") for call in calls) == 1
    (box / ".venv" / "bin" / "python").unlink()
    calls = make(box)[1]
    assert sum(call.endswith("-m venv .venv") for call in calls) == 2
