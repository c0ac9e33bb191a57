"""`train --quiet` and `--json`: stdout is silent, or the lines of events.jsonl, on one process and on two."""

import json
import os
import subprocess
import sys

import pytest

from tests import tiny
from windlass.cli.run_lines import printing
from windlass.config import to_yaml
from windlass.errors import EXIT_USER_ERROR, UserError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("lines")


def windlass(base, name, *options):
    """A new run of the tiny recipe -> what the command did, and its run directory."""
    config = tiny.recipe(base, name)
    (base / f"{name}.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "windlass", "train", str(base / f"{name}.yaml"), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done, config.run.directory


@pytest.mark.parametrize("ranks", [1, 2])
def test_json_is_the_events_and_nothing_else(base, ranks):
    done, directory = windlass(base, f"json {ranks}", "--json", f"--nproc={ranks}")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == tiny.lines(directory)
    assert "finished at step 10 of 10" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_quiet_prints_nothing_of_a_run_without_incidents(base, ranks):
    done, directory = windlass(base, f"quiet {ranks}", "--quiet", f"--nproc={ranks}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "finished at step 10 of 10" in "".join(file.read_text() for file in (directory / "logs").iterdir())


def test_quiet_prints_incidents(capsys):
    with printing(True, False) as on_event:
        print("step 3")
        on_event({"kind": "step", "step": 3})
        on_event({"kind": "incident", "step": 4, "what": "a norm of 500"})
    print("after")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("after\n", "step 4: incident: a norm of 500\n")


def test_a_refusal_is_printed_all_the_same(base):
    done, _ = windlass(base, "refused", "--quiet", "run.tokens_per_step=100")
    assert done.returncode == EXIT_USER_ERROR and "run.tokens_per_step=100" in done.stderr


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_a_rehearsal_takes_neither(base, option):
    done, directory = windlass(base, f"smoke {option}", "--smoke", option)
    assert done.returncode == EXIT_USER_ERROR and f"--smoke with {option}" in done.stderr and not directory.exists()


def test_both_at_once_are_refused():
    with pytest.raises(UserError, match="--quiet and --json"), printing(True, True):
        pass
