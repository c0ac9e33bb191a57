"""docs/recipe.md, docs/errors.md and docs/map.md match the code."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "generate" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recipe_page_is_up_to_date(build):
    assert (ROOT / "docs" / "recipe.md").read_text() == build.recipe_page(), "run `make docs`"


def test_errors_page_is_up_to_date(build):
    assert (ROOT / "docs" / "errors.md").read_text() == build.errors_page(), "run `make docs`"


def test_the_map_is_up_to_date_and_names_every_file(build):
    assert build.MAP_PAGE.read_text() == build.map_page(), "run `make docs`"
    words = {line.split()[0] for line in build.map_text().splitlines() if line}
    assert [path for path in build.SOURCE.rglob("[!_]*.py") if path.stem not in words] == []


def test_the_readme_has_the_name_of_every_file(build):
    assert build.README.read_text() == build.readme(), "run `make docs`"
    found, room = {}, ""
    for line in build.names_text().splitlines():
        room = line[4:].split()[0] if line[4] != " " else room
        found.setdefault(room, []).extend(line[len("    commands/recipes/") :].split())
    files = {}
    for path in build.SOURCE.rglob("[!_]*.py"):
        files.setdefault(f"{path.parent.relative_to(build.SOURCE).as_posix()}/", set()).add(path.stem)
    assert {room: set(names) for room, names in found.items()} == files


def test_every_key_of_a_recipe_says_what_it_does(build):
    bare = [line for line in build.recipe_page().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert bare == []


def test_each_bad_recipe_is_a_user_error_that_leaves_nothing_behind(build):
    assert len(build.CASES) >= 10
    for title, arguments, files in build.CASES:
        code, printed, left = build.run_command(arguments, files)
        assert code == 2, title
        is_one = "\n  rule:   " in printed and "\n  change: " in printed
        assert printed.startswith("windlass: ") and (is_one or " mistakes\n  " in printed), printed
        assert left == sorted(files) and "Traceback" not in printed, title
