"""The distribution is windlass-lm: a bare `pip install windlass` brings another project."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BARE = re.compile(r"pip3? install [^\n`]*?(?<![\w./-])windlass(?![-\w./])")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files():
    folders = [
        path for name in ("docs", "src", "scripts", "recipes", "benchmarks") for path in (ROOT / name).rglob("*")
    ]
    for path in [*folders, *ROOT.glob("*"), ROOT / ".ci" / "run"]:
        if path.is_file() and path.suffix not in (".pyc", ".png", ".svg"):
            yield path


def test_no_page_and_no_message_installs_another_project():
    found = [
        (path.name, line) for path in files() for line in path.read_text("utf-8").splitlines() if BARE.search(line)
    ]
    assert not found


def test_the_pattern_finds_what_it_is_for():
    assert all(
        map(BARE.search, ("pip install windlass", "pip install -U 'windlass[s3]'", "x: pip install windlass==1"))
    )
    assert not any(
        map(BARE.search, ("pip install 'windlass-lm[s3]'", "pip install .", "cd windlass && pip install -e ."))
    )


def test_extras_that_are_named_exist():
    named = {
        extra
        for path in files()
        for extras in re.findall(r"(?:windlass-lm|\.)\[([\w,-]+)\]\'", path.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert PROJECT["name"] == "windlass-lm" and named
    assert named <= set(PROJECT["optional-dependencies"]), named
