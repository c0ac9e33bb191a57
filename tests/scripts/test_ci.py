""".ci/run: what fails it, what does not, and its last line. `make` and `git` are fakes here."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPEAT = "make test-sample SAMPLE_S=600 SEED=c0ffee"


@pytest.fixture
def ci(tmp_path):
    """ci(check=0, test=0, sample=0, sample_s=0, budget_s, least_s, last_s) -> (exit code, printed lines)."""
    script = (ROOT / ".ci" / "run").read_text()
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "mktemp", "tee", "tail", "timeout", "sleep", "rm"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))

    def run(check=0, test=0, sample=0, sample_s=0, budget_s=4800, least_s=1, last_s=4980):
        text = script
        for name, value in {"BUDGET_S": budget_s, "LEAST_S": least_s, "LAST_S": last_s, "GRACE_S": 1}.items():
            text, replaced = re.subn(rf"^{name}=(\$\(\(.*?\)\)|\d+)", f"{name}={value}", text, flags=re.MULTILINE)
            assert replaced == 1, name
        (tmp_path / ".ci" / "run").write_text(text)
        make = (
            "case $1 in\n"
            f"check) echo all checked; exit {check};;\n"
            f"test) echo a warning summary; echo 7 passed in 1s; exit {test};;\n"
            f"test-sample) echo make $*; echo $PYTEST_ADDOPTS; sleep {sample_s}; echo 9 passed in 2s; exit {sample};;\n"
            "esac\n"
        )
        for name, body in {"make": make, "git": "echo c0ffee\n"}.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}")
            (tmp_path / "bin" / name).chmod(0o755)
        command = ["bash", str(tmp_path / ".ci" / "run")]
        environment = {"PATH": str(tmp_path / "bin")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        return done.returncode, done.stdout.splitlines()

    return run


def test_all_green_ends_with_the_closing_line_of_pytest(ci):
    code, lines = ci()
    assert code == 0 and lines[:4] == [
        "all checked", "a warning summary", "7 passed in 1s", f"ci: a sample of the long tests; to repeat it: {REPEAT}",
    ]  # fmt: skip
    assert lines[4] == REPEAT and lines[6:] == ["9 passed in 2s"]
    stop_s = re.fullmatch(r"--stop-after (\d+)", lines[5])
    assert stop_s and 4000 < int(stop_s[1]) <= 4799


@pytest.mark.parametrize("red", ["check", "test", "sample"])
def test_each_part_can_fail_it(ci, red):
    assert ci(**{red: 2})[0] == 2


def test_a_sample_that_fails_is_printed_with_what_repeats_it(ci):
    _, lines = ci(sample=2)
    assert lines[-1] == f"ci: the sample FAILED, see above; to repeat it: {REPEAT}"


def test_a_sample_that_hangs_is_cut_off_and_fails_it(ci):
    code, lines = ci(sample_s=60, budget_s=3)
    assert code == 124 and re.match(r"ci: the sample FAILED: it did not finish in \d s and was cut off", lines[-2])
    assert lines[-1].endswith(f"hangs, or is slower than that; to repeat it: {REPEAT}")


def test_a_sample_that_does_not_end_when_it_is_cut_off_is_killed_and_fails_it(ci):
    """As a rank that waits in a collective and ignores SIGTERM; 137 of the sample itself counts alike."""
    assert ci(sample=137)[0] == 137


def test_late_a_small_sample_is_run(ci):
    code, lines = ci(budget_s=0, least_s=200)
    assert code == 0 and lines[-1] == "9 passed in 2s"
    assert "make test-sample SAMPLE_S=60 SEED=c0ffee" in lines and "--stop-after 199" in lines
    assert ci(budget_s=0, least_s=200, sample=2)[0] == 2


def test_too_late_none_is_begun_which_is_said(ci):
    code, lines = ci(budget_s=0, last_s=-1)
    assert code == 0 and lines[-1] == "7 passed in 1s" and "test-sample" not in " ".join(lines)
    assert lines[-2].endswith("too many to begin a sample of the long tests: none was run")


def test_the_latest_sample_ends_before_the_limit():
    """CI stops a run after 90 minutes; a sample that is cut off has 30 seconds more until it is killed."""
    script = (ROOT / ".ci" / "run").read_text()
    budget, least, last = (
        int(re.search(rf"^{name}=\$\(\((\d+) \* 60\)\)", script, re.M)[1]) for name in ("BUDGET_S", "LEAST_S", "LAST_S")
    )
    assert max(budget, last + least) + 0.5 < 90
