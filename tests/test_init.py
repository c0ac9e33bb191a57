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


def test_importing_the_package_loads_nothing_heavy():
    program = "import sys, windlass; print({'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_name_is_there_and_nothing_else():
    assert set(windlass.__all__) == {*windlass.PLACES, "Stopped", "UserError", "__version__"}
    assert all(callable(getattr(windlass, name)) and getattr(windlass, name).__doc__ for name in windlass.PLACES)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = windlass.trian


def test_the_page_of_the_door_runs(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "recipe.yaml").write_text(to_yaml(tiny.recipe(tmp_path)))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
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
