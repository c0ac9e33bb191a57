"""What is refused before something lasting happens: nothing is prepared, replaced or made."""

from pathlib import Path

import pytest

from tests import tiny
from tests.commands.test_data_lint import ERRORS, WARNING
from tests.commands.test_data_lint import base as base  # a fixture
from windlass.config import load_recipe
from windlass.data.lint.lint import LintResult
from windlass.data.prepare.prepare import open_prepared
from windlass.errors import UserError
from windlass.runtime import start_runtime
from windlass.training import preflight
from windlass.training.loop import train
from windlass.training.preflight import check_before_training, make_ready


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"max_position_embeddings": 8}}, "for a model of 8 positions"),
        ({"run": {"micro_batch": 3}}, "sequences per step must be a multiple"),
        ({"run": {"start_from": "nowhere"}}, "nowhere does not exist"),
        ({"run": {"directory": __file__}}, "is a file"),
        ({"run": {"directory": __file__ + "/run"}}, "is a file"),
    ],
)
def test_a_refused_recipe_leaves_no_trace(tmp_path, sections, said):
    config = tiny.recipe(tmp_path, **sections)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as refused:
        make_ready(config, 1, "cpu")
    assert said in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


def before_training(base, name):
    config, runtime = load_recipe(base / name), start_runtime()
    try:
        return check_before_training(open_prepared(config.data, config.evaluate.sets), config, runtime)
    finally:
        runtime.close()


def test_before_step_0_warnings_are_a_line_each(base):
    assert before_training(base, "tiny.yaml") == []
    (line,) = before_training(base, "overlap.yaml")
    assert line.startswith("warning validation-in-train: 60 of 60 documents are training documents")


def test_before_step_0_errors_are_refused_with_the_command_that_tells_all(base, monkeypatch):
    monkeypatch.setattr(preflight, "lint", lambda *a, **k: LintResult([*ERRORS, WARNING], []))
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
    train(load_recipe(base / "overlap.yaml", "run.steps=2", "optim.warmup_steps=0", f"run.directory={base / 'run'}"))
    out = capfd.readouterr().out
    assert 0 <= out.index("warning validation-in-train") < out.index("step 1/2")


def test_a_run_refuses_to_begin_on_wrong_data_and_makes_no_directory(base, monkeypatch):
    monkeypatch.setattr(preflight, "lint", lambda *a, **k: LintResult([*ERRORS], []))
    with pytest.raises(UserError, match="is wrong: error mask-empty"):
        train(load_recipe(base / "tiny.yaml", f"run.directory={base / 'refused'}"))
    assert not Path(base / "refused").exists()
