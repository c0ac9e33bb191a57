"""`windlass launch flyte`: what is printed, and what is refused. tests/flyte runs what is launched."""

import ast
import json

import pytest
import yaml

from tests import tiny
from tests.commands.command_line import run_command
from windlass.commands.launch import flyte as command
from windlass.config import to_yaml


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path)))
    tree["run"]["directory"], tree["data"]["directory"] = "mine", "shards"
    tree["launch"] = {"flyte": {"image": "i:1", "mount": "/runs", "retries": 4}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "r.yaml"


def launch(arguments, monkeypatch, capsys):
    return run_command(["launch", "flyte", *arguments.split()], monkeypatch, capsys)


def test_a_dry_run_prints_the_pipeline_and_its_inputs(recipe, monkeypatch, capsys):
    before = sorted(recipe.parent.iterdir())
    code, printed = launch("r.yaml run.steps=3 --nproc 2 --dry-run", monkeypatch, capsys)
    assert code == 0, printed.err
    tree = ast.parse(printed.out)
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert names == ["prepare", "train", "pipeline"] and "nproc_per_node=2" in printed.out
    inputs = json.loads(printed.out.splitlines()[-1].partition("overrides=")[2])
    assert inputs == ["run.steps=3", 'run.directory="/runs/mine"', 'data.directory="/runs/shards"']
    assert sorted(recipe.parent.iterdir()) == before


def test_parts_are_on_the_volume(recipe, monkeypatch, capsys):
    at_a_url = "data.directory=memory://d data.cache.directory=cache launch.flyte.prepare_parts=3 --dry-run"
    code, printed = launch(f"r.yaml {at_a_url}", monkeypatch, capsys)
    assert code == 0, printed.err
    inputs = json.loads(printed.out.splitlines()[-1].partition("overrides=")[2])
    assert inputs[-2:] == ['run.directory="/runs/mine"', 'data.cache.directory="/runs/cache"']


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("r.yaml launch.flyte.image=null --dry-run", "launch.flyte.image is missing"),
        ("r.yaml launch.flyte.mount=null --dry-run", "launch.flyte.retries=4 without checkpoint.remote"),
        (
            "r.yaml launch.flyte.prepare_parts=3 launch.flyte.retries=0 launch.flyte.mount=null --dry-run",
            "launch.flyte.prepare_parts=3 without launch.flyte.mount",
        ),
        (
            "r.yaml launch.flyte.prepare_parts=3 data.directory=/d --dry-run",
            "launch.flyte.prepare_parts=3, and data.directory=/d with the volume mounted at /runs",
        ),
        (
            "r.yaml launch.flyte.prepare_parts=3 data.order.first_epoch=written --dry-run",
            "data.order.first_epoch: written, and a preparation in parts",
        ),
        ("r.yaml launch.flyte.gpu=much --dry-run", "launch.flyte.gpu"),
        ("r.yaml launch.flyte.gpu=4 --nproc 2 --dry-run", "--nproc 2 with launch.flyte.gpu=4"),
        ("r.yaml parallel.context=2 --nproc 3 --dry-run", "3 ranks"),
        ("r.yaml --job-name a_b --dry-run", "`a_b` as the name of a job"),
        ('r.yaml data.sources=[{"path":"https://me:pass-word-1@h/x"}] --dry-run', "would hold a secret"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_submitted(recipe, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(command, "_submit", lambda *_: pytest.fail("submitted"))
    code, printed = launch(arguments, monkeypatch, capsys)
    assert code == 2 and said in printed.err and printed.out == ""


def test_without_flyte_it_says_what_to_install(recipe, monkeypatch, capsys):
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    code, printed = launch("r.yaml --local", monkeypatch, capsys)
    assert code == 2 and "pip install 'windlass-lm[flyte]'" in printed.err
