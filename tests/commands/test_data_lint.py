"""`windlass data lint` through the command line."""

import pytest
from typer.testing import CliRunner

from tests import tiny
from windlass.cli.main import app
from windlass.commands import data_lint as lint
from windlass.config import to_yaml
from windlass.data.lint.findings import Finding
from windlass.data.lint.lint import LintResult
from windlass.data.prepare.prepare import prepare
from windlass.errors import UserError

ERRORS = [Finding(code, f"train: sample {n}", "much", 1) for n, code in enumerate(["mask-empty", "eos-missing"] * 2)]
WARNING = Finding("duplicate-documents", "train: sample 9", "twice", 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with prepared data, its recipe, and a second recipe whose validation documents are training documents."""
    base = tmp_path_factory.mktemp("lint")
    config = tiny.recipe(base)
    prepare(config.data, config.evaluate.sets, log=lambda line: None)
    (base / "tiny.yaml").write_text(to_yaml(config))
    overlapping = tiny.recipe(
        base, data={"validation": {"path": str(base / "corpus")}, "directory": str(base / "other")}
    )
    prepare(overlapping.data, overlapping.evaluate.sets, log=lambda line: None)
    (base / "overlap.yaml").write_text(to_yaml(overlapping))
    return base


def logged(*arguments):
    """(exit code, lines of stdout)."""
    done = CliRunner().invoke(app, ["data", "lint", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout.splitlines()


@pytest.mark.parametrize("place", ["tiny.yaml", "data"])
def test_clean_data_is_reported_clean_with_what_was_looked_at(base, place):
    code, lines = logged(base / place)
    assert code == 0 and lines[-1] == "nothing found"
    assert lines[0].startswith("train: all ") and lines[1].startswith("validation: all ")


def test_warnings_are_reported_with_what_to_change_and_exit_0(base):
    code, lines = logged(base / "overlap.yaml")
    assert code == 0 and lines[-1] == "0 errors, 1 warnings"
    assert lines[0].startswith(
        "warning validation-in-train: 60 of 60 documents are training documents; the longest, of "
    )
    assert lines[1] == "  change: the validation loss looks too good: take them out of the training documents"


def test_an_error_exits_with_2(base, monkeypatch):
    monkeypatch.setattr(lint, "lint", lambda *a, **k: LintResult([*ERRORS, WARNING], []))
    code, lines = logged(base / "tiny.yaml")
    assert code == 2 and lines[0] == "error mask-empty: much (train: sample 0)" and lines[-1] == "4 errors, 1 warnings"


def test_a_directory_without_prepared_data_is_refused(base):
    with pytest.raises(UserError) as caught:
        lint.lint_data(str(base / "corpus"), [])
    assert caught.value.given == f"{base / 'corpus'} holds no prepared data"
    assert "windlass prepare RECIPE" in caught.value.change


def test_settings_with_a_directory_are_refused(base):
    with pytest.raises(UserError) as caught:
        lint.lint_data(str(base / "data"), ["run.steps=3"])
    assert caught.value.given == f"run.steps=3 with the directory {base / 'data'}"
    assert caught.value.change == "give the recipe instead of the directory, or leave the settings out"


def test_a_recipe_that_is_not_prepared_is_refused(base):
    with pytest.raises(UserError) as caught:
        lint.lint_data(str(base / "tiny.yaml"), [f"data.directory={base / 'nowhere'}"])
    assert "holds no prepared data" in caught.value.given and caught.value.change == "run `windlass prepare RECIPE`"
