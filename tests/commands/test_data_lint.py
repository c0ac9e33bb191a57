"""`windlass data lint` through the command line, and the same before step 0."""

from pathlib import Path

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
from windlass.runtime import start_runtime

ERRORS = [Finding(code, f"train: sample {n}", "much", 1) for n, code in enumerate(["mask-empty", "eos-missing"] * 2)]
WARNING = Finding("duplicate-documents", "train: sample 9", "twice", 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with prepared data, its recipe, and a second recipe whose validation documents are training documents."""
    base = tmp_path_factory.mktemp("lint")
    config = tiny.recipe(base)
    prepare(config.data, config.evaluate.sets, report=lambda line: None)
    (base / "tiny.yaml").write_text(to_yaml(config))
    overlapping = tiny.recipe(
        base, data={"validation": {"path": str(base / "corpus")}, "directory": str(base / "other")}
    )
    prepare(overlapping.data, overlapping.evaluate.sets, report=lambda line: None)
    (base / "overlap.yaml").write_text(to_yaml(overlapping))
    return base


def told(*arguments):
    """(exit code, lines of stdout)."""
    done = CliRunner().invoke(app, ["data", "lint", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout.splitlines()


@pytest.mark.parametrize("place", ["tiny.yaml", "data"])
def test_clean_data_is_told_clean_with_what_was_looked_at(base, place):
    code, lines = told(base / place)
    assert code == 0 and lines[-1] == "nothing found"
    assert lines[0].startswith("train: all ") and lines[1].startswith("validation: all ")


def test_warnings_are_told_with_what_to_change_and_exit_0(base):
    code, lines = told(base / "overlap.yaml")
    assert code == 0 and lines[-1] == "0 errors, 1 warnings"
    assert lines[0].startswith(
        "warning validation-in-train: 60 of 60 documents are training documents; the longest, of "
    )
    assert lines[1] == "  change: the validation loss flatters: take them out of the training documents"


def test_an_error_exits_with_2(base, monkeypatch):
    monkeypatch.setattr(lint, "lint", lambda *a, **k: LintResult([*ERRORS, WARNING], []))
    code, lines = told(base / "tiny.yaml")
    assert code == 2 and lines[0] == "error mask-empty: much (train: sample 0)" and lines[-1] == "4 errors, 1 warnings"


def test_a_directory_without_prepared_data_is_refused(base):
    with pytest.raises(UserError) as caught:
        lint.check(str(base / "corpus"), [])
    assert caught.value.given == f"{base / 'corpus'} holds no prepared data"
    assert "windlass prepare RECIPE" in caught.value.change


def test_settings_with_a_directory_are_refused(base):
    with pytest.raises(UserError) as caught:
        lint.check(str(base / "data"), ["run.steps=3"])
    assert caught.value.given == f"run.steps=3 with the directory {base / 'data'}"
    assert caught.value.change == "give the recipe instead of the directory, or leave the settings out"


def test_a_recipe_that_is_not_prepared_is_refused(base):
    with pytest.raises(UserError) as caught:
        lint.check(str(base / "tiny.yaml"), [f"data.directory={base / 'nowhere'}"])
    assert "holds no prepared data" in caught.value.given and caught.value.change == "windlass prepare"


def before_training(base, name):
    from windlass.config import load_recipe
    from windlass.data.prepare.prepare import open_prepared

    config, runtime = load_recipe(base / name), start_runtime()
    try:
        return lint.check_before_training(open_prepared(config.data, config.evaluate.sets), config, runtime)
    finally:
        runtime.close()


def test_before_step_0_warnings_are_a_line_each(base):
    assert before_training(base, "tiny.yaml") == []
    (line,) = before_training(base, "overlap.yaml")
    assert line.startswith("warning validation-in-train: 60 of 60 documents are training documents")


def test_before_step_0_errors_are_refused_with_the_command_that_tells_all(base, monkeypatch):
    monkeypatch.setattr(lint, "lint", lambda *a, **k: LintResult([*ERRORS, WARNING], []))
    with pytest.raises(UserError) as caught:
        before_training(base, "tiny.yaml")
    given, rule, change = caught.value.given, caught.value.rule, caught.value.change
    assert given.startswith(
        f"the data in {base / 'data'} is wrong: error mask-empty: much (train: sample 0); error eos"
    )
    assert given.endswith("(train: sample 2); and 1 more errors") and "duplicate" not in given
    assert rule == "training begins on data without errors of `windlass data lint`"
    assert change.startswith("nothing of it would be learned") and change.endswith("windlass data lint RECIPE")


def test_a_run_tells_warnings_before_its_first_step(base, capfd):
    from windlass.config import load_recipe
    from windlass.training.loop import train

    train(load_recipe(base / "overlap.yaml", "run.steps=2", "optim.warmup_steps=0", f"run.directory={base / 'run'}"))
    out = capfd.readouterr().out
    assert 0 <= out.index("warning validation-in-train") < out.index("step 1/2")


def test_a_run_refuses_to_begin_on_wrong_data_and_makes_no_directory(base, monkeypatch):
    from windlass.config import load_recipe
    from windlass.training.loop import train

    monkeypatch.setattr(lint, "lint", lambda *a, **k: LintResult([*ERRORS], []))
    with pytest.raises(UserError, match="is wrong: error mask-empty"):
        train(load_recipe(base / "tiny.yaml", f"run.directory={base / 'refused'}"))
    assert not Path(base / "refused").exists()
