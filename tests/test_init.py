"""The Python door: every name is there, lazily, and the page that shows it runs."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import windlass
from tests import tiny
from windlass.config import to_yaml

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "python.md"
CODE, PROOF = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, windlass; print({'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_name_is_there_and_nothing_else():
    assert set(windlass.__all__) == {*windlass.MODULE_OF, "Stopped", "UserError", "__version__"}
    assert all(callable(getattr(windlass, name)) and getattr(windlass, name).__doc__ for name in windlass.MODULE_OF)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = windlass.trian


def test_the_page_of_the_door_runs(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny.recipe(tmp_path)))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(CODE, str(PAGE), "exec"), names)
    assert names["same"] == names["recipe"] and len(windlass.fingerprint(names["recipe"])) == 32
    assert names["result"].step == 20 and not names["result"].stopped and len(names["texts"]) == 2
    (score,) = names["evaluate"](tmp_path / "run")
    logged = [line for line in tiny.lines(tmp_path / "run") if line["kind"] == "validation"][-1]
    assert score.loss == pytest.approx(logged["loss"], rel=1e-5) and (score.step, score.unit) == (20, "targets")
    assert score.count == logged["targets"] and f"loss {score.loss:.4f}" in score.line
    assert names["done"].largest_difference <= 1e-5 and (tmp_path / "exported" / "model.safetensors").is_file()
    shown = names["result"]._repr_html_()
    page = html.unescape(re.fullmatch(r'<iframe title="report" srcdoc="([^"]*)" style="[^"]*"></iframe>', shown)[1])
    assert page == (tmp_path / "run" / "report.html").read_text() and "<title>run - windlass</title>" in page
    (tmp_path / "run" / "report.html").unlink()
    assert names["result"]._repr_html_() is None, "then a notebook shows the plain result"


@pytest.mark.long
def test_its_script_of_a_proof_runs(tmp_path):
    (tmp_path / "script.py").write_text(PROOF)
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny.recipe(tmp_path, parallel={"shard": 2})))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "agrees"), done.stdout + done.stderr
    assert "proved: 1 of 1 layout trains what one process trains" in done.stdout


def test_every_function_of_the_door_has_an_example_that_runs():
    shown = {name for name in windlass.MODULE_OF if re.search(rf"\b{name}\(", CODE + PROOF)}
    assert shown == set(windlass.MODULE_OF)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (lambda door: door.train("r.yaml"), "train('r.yaml')"),
        (lambda door: door.train(None), "train(None)"),
        (lambda door: door.prepare(Path("r.yaml")), "prepare("),
        (lambda door: door.fingerprint({"run": {}}), "fingerprint({'run': {}})"),
        (lambda door: door.parse_recipe({"run": {}}), "the recipe is given as dict"),
        (lambda door: door.parse_recipe(None), "the recipe is given as NoneType"),
        (lambda door: door.load_recipe({"run": {}}), "the recipe is given as dict"),
        (lambda door: door.generate("run", "wind"), "generate(..., 'wind')"),
        (lambda door: door.generate("run", None), "generate(..., None)"),
        (lambda door: door.generate("run", {"prompt": "wind"}), "generate(..., {'prompt': 'wind'})"),
    ],
)
def test_what_a_function_cannot_use_is_refused_in_words(tmp_path, monkeypatch, call, given):
    """An AttributeError or a TypeError before; of a text as `prompts` one text per letter."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(windlass.UserError) as caught:
        call(windlass)
    assert caught.value.given.startswith(given) and caught.value.change and not list(tmp_path.iterdir())


def test_the_change_is_the_call_to_write():
    with pytest.raises(windlass.UserError) as caught:
        windlass.train("my.yaml")
    assert caught.value.change == "for example train(load_recipe('my.yaml'))"


class Silent:
    def numbers(self, step, time_s, values): ...
    def flush(self): ...
    def close(self): ...


@pytest.mark.parametrize(
    "part",
    [
        {"sinks": ["wandb"]}, {"sinks": "wandb"}, {"sinks": [object()]}, {"sinks": object()}, {"sinks": [Silent]},
        {"family": 3}, {"family": object}, {"on_event": 3}, {"schedule": "cosine"}, {"objective": object()},
        {"source": 3},
    ],
)  # fmt: skip
def test_a_part_that_is_none_is_refused_before_anything_is_made(tmp_path, part):
    recipe = tiny.recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(windlass.UserError) as caught:
        windlass.train(recipe, **part)
    ((name, _),) = part.items()
    assert caught.value.given.startswith(f"train({name}=") and caught.value.rule.startswith(f"{name} is a")
    page = {"sinks": "sink", "on_event": "sink"}.get(name, name)
    assert f"docs/howto/own-{page}.md" in caught.value.change and PAGE.with_name(f"own-{page}.md").is_file()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_source_that_returns_no_stream_is_named(tmp_path):
    with pytest.raises(windlass.UserError, match="the source nothing returns None"):

        def nothing(stream):
            return None

        windlass.train(tiny.recipe(tmp_path), source=nothing, sinks=[Silent()])
