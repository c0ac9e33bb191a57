"""`windlass launch kubernetes`: what is printed, what is applied, and what is refused before anything is."""

import pytest
import yaml

from tests import tiny
from tests.commands.command_line import run_command
from windlass.commands.launch import kubernetes as command
from windlass.config import to_yaml


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path)))
    tree["data"]["directory"] = "shards"
    tree["run"]["directory"], tree["launch"] = "mine", {"kubernetes": {"image": "i:1", "claim": "runs"}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "r.yaml"


def launch(arguments, monkeypatch, capsys):
    return run_command(["launch", "kubernetes", *arguments.split()], monkeypatch, capsys)


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_a_dry_run_prints_manifests_and_applies_none(recipe, monkeypatch, capsys, kind):
    monkeypatch.setattr(command, "apply", lambda _text: pytest.fail("applied"))
    arguments = f"r.yaml run.steps=3 --nodes 2 --tasks-per-node 2 --kind {kind.lower()} --dry-run"
    code, printed = launch(arguments, monkeypatch, capsys)
    assert code == 0, printed.err
    config_map, job = yaml.safe_load_all(printed.out)
    assert config_map["data"]["recipe.yaml"] == recipe.read_text() and job["kind"] == kind
    assert job["metadata"]["name"] == "mine" and "run.steps=3" in str(job)


def test_what_is_applied_is_followed_by_its_name(recipe, monkeypatch, capsys):
    monkeypatch.setattr(
        command, "apply", lambda text: f"jobset/{list(yaml.safe_load_all(text))[1]['metadata']['name']} created"
    )
    code, printed = launch(
        "r.yaml launch.kubernetes.namespace=lm --nodes 1 --gpus-per-node 2 --job-name b", monkeypatch, capsys
    )
    assert code == 0 and printed.out.splitlines() == [
        "jobset/b created",
        "to follow it:",
        "  kubectl get -n lm jobset/b",
        "  kubectl logs -n lm -f -l jobset.sigs.k8s.io/jobset-name=b --prefix",
        "to stop it, saved: kubectl delete -n lm jobset/b",
    ]


def test_a_run_directory_whose_name_no_cluster_takes_gives_one_that_it_does(recipe, monkeypatch, capsys):
    monkeypatch.setattr(command, "apply", lambda text: pytest.fail("applied"))
    code, printed = launch(
        "r.yaml run.directory=Runs/My_Run --nodes 1 --tasks-per-node 1 --dry-run", monkeypatch, capsys
    )
    assert code == 0, printed.err
    assert list(yaml.safe_load_all(printed.out))[1]["metadata"]["name"] == "my-run", "stdout is YAML alone"
    assert printed.err == "the job is called my-run, after Runs/My_Run; --job-name gives it another name\n"


def test_parts_are_jobs_before_the_run(recipe, monkeypatch, capsys):
    arguments = "r.yaml launch.kubernetes.prepare_parts=4 data.directory=shards --nodes 1 --tasks-per-node 2 --dry-run"
    code, printed = launch(arguments, monkeypatch, capsys)
    assert code == 0, printed.err
    _, job = yaml.safe_load_all(printed.out)
    assert [one["name"] for one in job["spec"]["replicatedJobs"]] == ["tokenizer", "parts", "join", "workers"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("r.yaml launch.kubernetes.image=null --nodes 1 --tasks-per-node 1", "launch.kubernetes.image is missing"),
        ("r.yaml launch.kubernetes.claim=null --nodes 2 --tasks-per-node 1", "2 pods without launch.kubernetes.claim"),
        ("r.yaml parallel.context=2 --nodes 3 --tasks-per-node 1", "3 ranks"),
        (
            "r.yaml launch.kubernetes.prepare_parts=4 --nodes 1 --tasks-per-node 1 --kind trainjob",
            "launch.kubernetes.prepare_parts=4 with --kind trainjob",
        ),
        (
            "r.yaml launch.kubernetes.prepare_parts=4 data.order.first_epoch=written --nodes 1 --tasks-per-node 1",
            "data.order.first_epoch: written, and a preparation in parts",
        ),
        (
            "r.yaml data.directory=/scratch/data --nodes 1 --tasks-per-node 1",
            "data.directory=/scratch/data with the volume mounted at /runs",
        ),
        (
            "r.yaml launch.kubernetes.prepare_parts=4 data.directory=memory://d data.cache.directory=/c "
            "--nodes 1 --tasks-per-node 1",
            "launch.kubernetes.prepare_parts=4, and data.cache.directory=/c with the volume mounted at /runs",
        ),
        ("r.yaml launch.kubernetes.prepare_parts=1 --nodes 1 --tasks-per-node 1", "launch.kubernetes.prepare_parts"),
        ("r.yaml --nodes 1", "neither --gpus-per-node nor --tasks-per-node"),
        ("r.yaml --nodes 1 --tasks-per-node 1 --job-name My_Run", "`My_Run` as the name of a job"),
        ("r.yaml launch.kubernetes.namespace=My_Team --nodes 1 --tasks-per-node 1", "launch.kubernetes.namespace"),
        ("r.yaml launch.kubernetes.claim=runs_1 --nodes 1 --tasks-per-node 1", "launch.kubernetes.claim"),
        ("r.yaml launch.kubernetes.secrets={A:B_C/d} --nodes 1 --tasks-per-node 1", "launch.kubernetes.secrets"),
        ("r.yaml launch.kubernetes.secrets={A:b} --nodes 1 --tasks-per-node 1", "launch.kubernetes.secrets"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_applied(recipe, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(command, "apply", lambda _text: pytest.fail("applied"))
    code, printed = launch(arguments, monkeypatch, capsys)
    assert code == 2 and said in printed.err
