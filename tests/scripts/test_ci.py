""".ci/run: what fails it, what does not, and its last line. `make` is a fake here."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ci(tmp_path):
    """ci(check=0, test=0, matrices=0, matrices_s=0, budget_s=None) -> (exit code, printed lines)."""
    script = (ROOT / ".ci" / "run").read_text()
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "mktemp", "tee", "tail", "timeout", "sleep", "rm"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))

    def run(check=0, test=0, matrices=0, matrices_s=0, budget_s=None):
        limits = {} if budget_s is None else {"BUDGET_S": budget_s, "LEAST_S": 1}
        text = script
        for name, value in limits.items():
            text, replaced = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
            assert replaced == 1
        (tmp_path / ".ci" / "run").write_text(text)
        make = tmp_path / "bin" / "make"
        make.write_text(
            "#!/bin/sh\n"
            "case $1 in\n"
            f"check) echo all checked; exit {check};;\n"
            f"test) echo a warning summary; echo 7 passed in 1s; exit {test};;\n"
            f"test-long) echo addopts $PYTEST_ADDOPTS; sleep {matrices_s}; echo 9 passed in 2s; exit {matrices};;\n"
            "esac\n"
        )
        make.chmod(0o755)
        command = ["bash", str(tmp_path / ".ci" / "run")]
        environment = {"PATH": str(tmp_path / "bin")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout.splitlines()

    return run


def test_all_green_ends_with_the_closing_line_of_pytest(ci):
    code, lines = ci()
    assert code == 0 and lines == [
        "all checked", "a warning summary", "7 passed in 1s", "addopts -x", "9 passed in 2s",
    ]  # fmt: skip


@pytest.mark.parametrize("red", ["check", "test"])
def test_each_part_can_fail_it(ci, red):
    assert ci(**{red: 2})[0] != 0


def test_long_matrices_that_fail_are_told_loudly(ci):
    code, lines = ci(matrices=2)
    assert code == 0 and lines[-1] == "7 passed in 1s"
    assert any(line.startswith("ci: make test-long FAILED with exit code 2") for line in lines)


def test_long_matrices_that_do_not_fit_are_cut_off_which_is_said(ci):
    code, lines = ci(matrices_s=30, budget_s=2)
    assert code == 0 and lines[-1] == "7 passed in 1s" and any("cut off" in line for line in lines)


def test_long_matrices_are_not_begun_without_time(ci):
    code, lines = ci(budget_s=0)
    assert code == 0 and lines[-1] == "7 passed in 1s"
