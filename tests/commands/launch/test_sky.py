"""`windlass launch sky`: what is printed, what is submitted, and what is refused before anything is."""

import pytest
import yaml

from tests import tiny
from tests.commands.command_line import run_command
from windlass.commands.launch import sky as command
from windlass.config import to_yaml


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path)))
    tree["data"]["directory"] = "shards"
    tree["run"]["directory"] = "mine"
    tree["launch"] = {"sky": {"image": "i:1", "mount": "/runs", "volume": "v", "gpu": "H100", "secrets": ["TOKEN"]}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "r.yaml"


def launch(arguments, monkeypatch, capsys):
    return run_command(["launch", "sky", *arguments.split()], monkeypatch, capsys)


def test_a_dry_run_prints_the_task_and_submits_none(recipe, monkeypatch, capsys):
    monkeypatch.setattr(command, "submit_sky", lambda *_: pytest.fail("submitted"))
    code, printed = launch("r.yaml run.steps=3 --nodes 2 --gpus-per-node 2 --dry-run", monkeypatch, capsys)
    assert code == 0, printed.err
    task = yaml.safe_load(printed.out)
    assert (task["name"], task["num_nodes"], task["resources"]["accelerators"]) == ("mine", 2, "H100:2")
    assert recipe.read_text() in task["run"] and " run.steps=3 --nproc 2 --nodes 2 " in task["run"]


def test_what_is_submitted_is_followed_by_its_name(recipe, monkeypatch, capsys):
    monkeypatch.setattr(command, "submit_sky", lambda text, *rest: f"{yaml.safe_load(text)['num_nodes']} {rest}")
    code, printed = launch("r.yaml --nodes 1 --gpus-per-node 2 --job-name b", monkeypatch, capsys)
    assert code == 0 and printed.out.splitlines() == [
        "1 ('b', ['TOKEN'])",
        "to follow it:",
        "  sky jobs queue",
        "  sky jobs logs --name b",
        "to stop it: sky jobs cancel --name b",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("r.yaml launch.sky.image=null --nodes 1 --tasks-per-node 1", "neither launch.sky.image nor launch.sky.setup"),
        (
            "r.yaml launch.sky.volume=null launch.sky.mount=null --nodes 2 --tasks-per-node 1",
            "without launch.sky.mount",
        ),
        ("r.yaml launch.sky.mount=null --nodes 2 --tasks-per-node 1", "launch.sky.volume=v without launch.sky.mount"),
        ("r.yaml launch.sky.gpu=null --nodes 1 --gpus-per-node 2", "--gpus-per-node 2 without launch.sky.gpu"),
        ("r.yaml parallel.context=2 --nodes 3 --tasks-per-node 1", "3 ranks"),
        ("r.yaml --nodes 1", "neither --gpus-per-node nor --tasks-per-node"),
        ("r.yaml launch.sky.secrets=[A=b] --nodes 1 --tasks-per-node 1", "launch.sky.secrets"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_submitted(recipe, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(command, "submit_sky", lambda *_: pytest.fail("submitted"))
    code, printed = launch(arguments, monkeypatch, capsys)
    assert code == 2 and said in printed.err
