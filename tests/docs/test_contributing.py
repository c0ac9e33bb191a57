"""What CONTRIBUTING.md and the workflow ask for exists."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


def test_make_has_the_targets_that_are_named():
    pages = ["CONTRIBUTING.md", "README.md", ".pre-commit-config.yaml", ".github/workflows/ci.yml"]
    named = {
        target for page in pages for target in re.findall(r"make ([a-z]+(?:-[a-z]+)*)\b", (ROOT / page).read_text())
    }
    assert {"environment", "check", "test", "demo"} <= named
    assert named - TARGETS <= {"a"}, named - TARGETS  # "does not make a dozen mistakes"


def test_files_of_rooms_that_are_named_exist():
    named = re.findall(r"`([a-z_]+/[a-z_./]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 12
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "src" / "windlass"))]
    assert not missing


def test_the_workflow_runs_what_lands_a_change():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == ["make environment", "bash .ci/run"] and (ROOT / ".ci" / "run").is_file()
    assert job["timeout-minutes"] == 90 and job["env"]["PYTHON"] == "python${{ matrix.python }}"
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f"Python :: {version}" in project for version in job["strategy"]["matrix"]["python"])
