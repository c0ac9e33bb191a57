"""docs/howto/kubernetes.md: its recipe loads, and its first command prints the manifests that it describes."""

from pathlib import Path

import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from windlass.config import to_yaml
from windlass.launch.agent import SHUTDOWN_S

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "kubernetes.md").read_text()


def test_its_first_command_prints_the_manifests(tmp_path, monkeypatch, capsys):
    """The second applies them: commands/launch/test_kubernetes.py."""
    first, second = commands_in(PAGE)
    assert first == f"{second} --dry-run"
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, run={"tokens_per_step": 2048})))
    tree["run"]["directory"], tree["data"]["directory"] = "mine", "shards"
    run_commands([first], tree | yaml.safe_load(recipe_in(PAGE)), tmp_path, monkeypatch, capsys)
    recipe, job = yaml.safe_load_all(capsys.readouterr().out)
    assert (recipe["kind"], job["kind"]) == ("ConfigMap", "JobSet") and "a JobSet whose two pods run" in PAGE
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["parallelism"], container["workingDir"]) == (
        2,
        "/runs",
    ) and "`launch.kubernetes.mount` (`/runs`)" in PAGE
    assert container["command"][:5] == ["python3", "-m", "windlass", "launch", "nodes"]
    assert (
        container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        and container["env"][0]["name"] == "AWS_SECRET_ACCESS_KEY"
    )
    assert (
        pod["terminationGracePeriodSeconds"] == SHUTDOWN_S and f"within the {SHUTDOWN_S} seconds that pods have" in PAGE
    )
