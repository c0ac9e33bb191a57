"""`make test-all`: parts that were green on this commit are not run again."""

import re
import subprocess
import sys

import pytest

from scripts import test_all


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """parts(red): runs three parts, of which those in `red` fail -> (parts that ran, parts that failed)."""

    def run(red=()):
        ran = []

        def fake(command, **_):
            ran.append(command[-1])
            return test_all.subprocess.CompletedProcess(command, int(command[-1] in red))

        monkeypatch.setattr(test_all.subprocess, "run", fake)
        return ran, test_all.run_parts(["quick", "tests/a.py", "tests/x/a.py"], tmp_path, tmp_path / "seconds.json")

    return run


def test_a_red_part_stops_no_other_and_alone_runs_again(parts):
    assert parts(red=["tests/a.py"]) == (["loadfile", "tests/a.py", "tests/x/a.py"], ["tests/a.py"])
    assert parts() == (["tests/a.py"], [])
    assert parts() == ([], [])


def test_a_part_of_a_file_runs_its_long_tests_and_records_their_seconds(tmp_path):
    command = " ".join(test_all.command_of("tests/a.py", tmp_path / "seconds.json"))
    assert f"--long -m long --record-seconds {tmp_path}/seconds.json tests/a.py" in command
    assert "--long" not in test_all.command_of("quick", tmp_path)


def test_a_file_of_many_tests_is_several_parts_that_have_each_test_once(tmp_path):
    assert test_all.pieces("tests/a.py", 1) == ["tests/a.py"]
    parts = test_all.pieces("tests/a.py", 3)
    assert parts == ["tests/a.py@1/3", "tests/a.py@2/3", "tests/a.py@3/3"]
    assert test_all.command_of(parts[1], tmp_path)[-3:] == ["--share", "2/3", "tests/a.py"]
    many = "import pytest\n@pytest.mark.long\n@pytest.mark.parametrize('n', range(7))\ndef test_n(n): pass\n"
    (tmp_path / "test_many.py").write_text(many)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "pyproject.toml",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "--long",
    ]
    command += ["-m", "long", "-rA", str(tmp_path)]
    found = []
    for share in ("1/3", "2/3", "3/3"):
        done = subprocess.run([*command, "--share", share], cwd=test_all.ROOT, capture_output=True, text=True)
        found.append(re.findall(r"PASSED .*test_n\[(\d)\]", done.stdout))
    assert found == [["0", "1"], ["2", "3"], ["4", "5", "6"]]


def test_a_working_tree_with_changes_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(test_all, "git", lambda *arguments: " M Makefile" if "status" in arguments else "c0ffee")
    assert test_all.main() == 2
    assert "the working tree has changes" in capsys.readouterr().err


SKIPPING = """
import pytest

def test_for_want_of_something():
    pytest.skip("needs x")

@pytest.mark.skipif(True, reason="no y")
def test_for_want_of_something_else():
    pass

def test_that_nothing_can_be_installed_for():
    pytest.skip("root reads everything")

@pytest.mark.long
def test_of_the_long_set():
    pass
"""


def test_a_skip_for_want_of_something_is_red(tmp_path):
    (tmp_path / "test_skips.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-rA", str(tmp_path)]
    done = subprocess.run([*command, "--no-skips"], cwd=test_all.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "1 failed, 2 skipped, 1 error" in done.stdout, done.stdout
    assert "skipped, with --no-skips: needs x" in done.stdout and "skipped, with --no-skips: no y" in done.stdout
    for part in (test_all.QUICK, "tests/test_x.py"):
        assert "--no-skips" in test_all.command_of(part, tmp_path)
    done = subprocess.run(command, cwd=test_all.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "4 skipped" in done.stdout
