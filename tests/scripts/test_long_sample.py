"""The sample of the long tests: its size, its seed, what is recorded, and pytest's options around it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.long_sample import UNKNOWN_S, sample, write_seconds

ROOT = Path(__file__).parents[2]
TESTS = [f"tests/a.py::test_{name}[{cell}]" for name in ("known", "new") for cell in range(40)]
SECONDS = {"tests/a.py::test_known": 10.0}


def cost_s(tests):
    return sum(10.0 if "known" in test else UNKNOWN_S for test in tests)


def test_it_fills_the_budget_and_no_more():
    taken = sample(TESTS, SECONDS, 605.0, "a")
    assert 595 < cost_s(taken) <= 605 and len(set(taken)) == len(taken)
    assert sample(TESTS, SECONDS, 9.9, "a") == []
    assert sorted(sample(TESTS, SECONDS, cost_s(TESTS), "a")) == sorted(TESTS)


def test_the_seed_draws_it_and_the_order_of_collection_does_not():
    assert sample(TESTS, SECONDS, 300.0, "a") == sample(TESTS[::-1], SECONDS, 300.0, "a")
    assert set(sample(TESTS, SECONDS, 300.0, "a")) != set(sample(TESTS, SECONDS, 300.0, "b"))


def test_seconds_are_means_of_a_functions_cells_and_others_stay(tmp_path):
    record = tmp_path / "seconds.json"
    record.write_text(json.dumps({"t.py::test_a": 1.0, "t.py::test_b": 2.0}))
    write_seconds([("t.py::test_a[x]", 3.0), ("t.py::test_a[x]", 1.0), ("t.py::test_a[y]", 2.0)], record)
    assert json.loads(record.read_text()) == {"t.py::test_a": 3.0, "t.py::test_b": 2.0}


@pytest.fixture
def tree(tmp_path):
    """pytest in a tree of one file with 6 long tests and a quick one, under this project's conftest."""
    (tmp_path / "tests").mkdir()
    for name in ("__init__.py", "conftest.py", "long_sample.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "stores.py").write_text("s3_place = s3_session = None\n")  # no test there has a store
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["long: long"]\n'
    )
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\n\ndef test_quick():\n    pass\n\n"
        "@pytest.mark.long\n@pytest.mark.parametrize('n', range(6))\ndef test_long(n):\n    pass\n"
    )

    def run(*options):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout

    return run


def test_pytest_runs_the_sample_alone(tree):
    out = tree("--long-sample", "130", "--seed", "a")
    assert "2 passed, 5 deselected" in out and "test_quick" not in out
    assert out.partition("in ")[0] == tree("--long-sample", "130", "--seed", "a", "-n", "0").partition("in ")[0]


def test_what_would_begin_too_late_is_skipped_and_the_rest_recorded(tree, tmp_path):
    out = tree("--long", "--stop-after", "-1")
    assert "7 skipped" in out
    tree("--long", "--record-seconds", "seconds.json")
    assert json.loads((tmp_path / "seconds.json").read_text()).keys() == {"tests/test_it.py::test_long"}
