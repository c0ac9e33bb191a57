"""Tasks of SkyPilot: their fields by value, its own reader of them, and what hosts run, run."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import yaml

import windlass
from tests import tiny
from windlass.config import to_yaml
from windlass.errors import UserError
from windlass.launch import sky as made_by
from windlass.launch.config import SkyConfig
from windlass.launch.sky import check_sky_hosts, submit_sky, task
from windlass.launch.slurm import Size

OTHER = Path(__file__).parents[2] / ".venv-sky/bin/python"
FULL = SkyConfig(
    image="registry.invalid/windlass:1",
    setup=["mount-it /runs", "echo ready"],
    infra="aws/us-east-1",
    gpu="H100",
    cpus=32,
    memory_gib=400,
    disk_gib=500,
    spot=True,
    mount="/runs",
    volume="shared",
    environment={"NCCL_DEBUG": "WARN", "LIMIT": 3},
    secrets=["AWS_SECRET_ACCESS_KEY"],
)
RECIPE = "run: {directory: runs/mine}\n"
RECOVERY = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}


def test_a_task_has_these_fields():
    assert yaml.safe_load(task(FULL, RECIPE, ["run.steps=9", "run.name=$(x) 'y'"], Size(2, 4, 4), "mine")) == {
        "name": "mine",
        "num_nodes": 2,
        "resources": {
            "infra": "aws/us-east-1",
            "accelerators": "H100:4",
            "cpus": "32+",
            "memory": "400+",
            "disk_size": 500,
            "image_id": "docker:registry.invalid/windlass:1",
            "use_spot": True,
            "job_recovery": RECOVERY,
        },
        "volumes": {"/runs": "shared"},
        "envs": {"NCCL_DEBUG": "WARN", "LIMIT": "3"},
        "secrets": {"AWS_SECRET_ACCESS_KEY": None},
        "setup": "mount-it /runs\necho ready\n",
        "run": "cat > \"$HOME/windlass-recipe.yaml\" <<'RECIPE'\n"
        "run: {directory: runs/mine}\n"
        "RECIPE\n"
        "cd /runs\n"
        'exec python3 -m windlass launch nodes "$HOME/windlass-recipe.yaml" run.steps=9 '
        "'run.name=$(x) '\"'\"'y'\"'\"'' --nproc 4 --nodes 2 "
        '--endpoint "$(echo "$SKYPILOT_NODE_IPS" | head -n 1):29400"\n',
    }


def test_one_host_on_cpus_has_the_least():
    assert yaml.safe_load(task(SkyConfig(setup=["pip install it"]), RECIPE, [], Size(1, 8), "mine")) == {
        "name": "mine",
        "num_nodes": 1,
        "resources": {"use_spot": False, "job_recovery": RECOVERY},
        "setup": "pip install it\n",
        "run": f"cat > \"$HOME/windlass-recipe.yaml\" <<'RECIPE'\n{RECIPE}RECIPE\ncd ~\n"
        'exec python3 -m windlass train "$HOME/windlass-recipe.yaml" --nproc 8\n',
    }


def test_a_recipe_that_has_the_closing_word_gets_another():
    run = yaml.safe_load(task(FULL, "# RECIPE\nRECIPE\n", [], Size(1, 1), "mine"))["run"]
    assert run.startswith("cat > \"$HOME/windlass-recipe.yaml\" <<'RECIPE_'\n# RECIPE\nRECIPE\nRECIPE_\n")


def test_a_secret_in_a_recipe_is_refused():
    with pytest.raises(UserError, match="the task would hold a secret"):
        task(FULL, "data: {directory: 's3://user:pa55word@host/x'}\n", [], Size(1, 1), "mine")


@pytest.mark.parametrize("name", ["Mine", "1st", "a_b", "a" * 41, "mine-", ""])
def test_a_name_that_it_does_not_take_is_refused(name):
    with pytest.raises(UserError, match="--job-name"):
        task(FULL, RECIPE, [], Size(1, 1), name)


@pytest.mark.parametrize(
    ("changes", "run", "has_remote", "size", "said"),
    [
        ({"image": None, "setup": []}, "runs/a", True, Size(1, 1), "neither launch.sky.image nor launch.sky.setup"),
        ({"gpu": None}, "runs/a", True, Size(1, 2, 2), "--gpus-per-node 2 without launch.sky.gpu"),
        ({"mount": None, "volume": None}, "runs/a", True, Size(2, 1), "2 hosts without launch.sky.mount"),
        ({"mount": None, "volume": None}, "runs/a", False, Size(1, 1), "a host whose disk ends with it"),
        ({}, "/scratch/a", False, Size(2, 1), "run.directory=/scratch/a with the volume mounted at /runs"),
    ],
)
def test_hosts_that_would_lose_the_run_are_refused(changes, run, has_remote, size, said):
    with pytest.raises(UserError, match=said):
        check_sky_hosts(FULL.changed(**changes), PurePosixPath(run), PurePosixPath("data"), has_remote, size)


@pytest.mark.parametrize("nodes", [1, 2])
def test_data_that_other_hosts_would_not_see_are_refused(nodes):
    with pytest.raises(UserError, match=r"data\.directory=/scratch/data with the volume mounted at /runs"):
        check_sky_hosts(FULL, PurePosixPath("a"), PurePosixPath("/scratch/data"), True, Size(nodes, 1))
    check_sky_hosts(FULL, PurePosixPath("a"), PurePosixPath("s3://bucket/data"), True, Size(nodes, 1))


@pytest.mark.parametrize(
    ("changes", "run", "size"),
    [
        ({}, "/runs/a", Size(2, 1)),
        ({"volume": None}, "a", Size(2, 1)),
        ({"mount": None, "volume": None}, "/any", Size(1, 1)),
    ],
)
def test_hosts_that_keep_it_are_not(changes, run, size):
    check_sky_hosts(FULL.changed(**changes), PurePosixPath(run), PurePosixPath("data"), True, size)


def test_a_volume_needs_a_directory():
    with pytest.raises(UserError, match=r"launch\.sky\.volume=v without launch\.sky\.mount"):
        SkyConfig(volume="v")


@pytest.mark.parametrize(("code", "said"), [(0, "Job submitted"), (1, "No cloud is enabled")])
def test_sky_answers_or_its_refusal_is_shown(monkeypatch, code, said):
    asked = []

    def run(command, **_):
        asked.append((command[:-1], Path(command[-1]).read_text()))
        return SimpleNamespace(returncode=code, stdout=said + "\n", stderr=said)

    monkeypatch.setattr(made_by.shutil, "which", lambda _name: "/bin/sky")
    monkeypatch.setattr(made_by.subprocess, "run", run)
    monkeypatch.setenv("TOKEN", "hidden")
    if code == 0:
        assert submit_sky("text", "mine", ["TOKEN"]) == said
    else:
        with pytest.raises(UserError) as caught:
            submit_sky("text", "mine", ["TOKEN"])
        assert said in caught.value.given
    command = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", "mine", "--secret", "TOKEN"]
    assert asked == [(command, "text")]


def test_without_sky_or_without_a_secret_it_says_so(monkeypatch):
    monkeypatch.setattr(made_by.shutil, "which", lambda _name: None)
    with pytest.raises(UserError, match="SkyPilot is not installed here"):
        submit_sky("text", "mine", [])
    monkeypatch.setattr(made_by.shutil, "which", lambda _name: "/bin/sky")
    monkeypatch.setattr(made_by.subprocess, "run", lambda *_, **__: pytest.fail("submitted"))
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(UserError, match=r"launch\.sky\.secrets names TOKEN, which is not set here"):
        submit_sky("text", "mine", ["TOKEN"])


READ = """
import json, sys, sky
from sky.utils import schemas
known = schemas._get_single_resources_schema()["properties"]["job_recovery"]["anyOf"][1]["properties"]
answers = []
for tree in json.load(sys.stdin):
    names = list(tree.get("resources", {}).get("job_recovery", {}))
    try:
        read = sky.Task.from_yaml_config(tree)
        kept = read.to_yaml_config()
        rest = [name for name in names if name not in known]  # the one place where SkyPilot's client refuses no name
        answers.append({"kept": kept, "unknown": rest, "secrets": [ref.name for ref in read._managed_secret_refs]})
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
json.dump(answers, sys.stdout, default=str)
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Tasks -> what SkyPilot's own reader takes over of each."""
    if not OTHER.is_file():
        pytest.skip("needs .venv-sky: sh scripts/sky_environment.sh")

    def read(*trees):
        home = tmp_path_factory.mktemp("home")
        environ = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONPATH": ""}
        pipes = {"input": json.dumps(trees), "capture_output": True, "text": True, "timeout": 1800}
        done = subprocess.run([OTHER, "-c", READ], env=environ, cwd=home, **pipes)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return read


@pytest.mark.long
def test_skypilot_reads_every_field_and_refuses_a_typo_in_each(read):
    tree = yaml.safe_load(task(FULL, RECIPE, ["run.steps=9"], Size(2, 4, 4), "mine"))
    least = yaml.safe_load(task(SkyConfig(setup=["pip install it"]), RECIPE, [], Size(1, 8), "mine"))
    resources, recovery = tree["resources"], tree["resources"]["job_recovery"]
    typos = [tree | {f"{key}x": value} for key, value in tree.items()]
    typos += [tree | {"resources": resources | {f"{key}x": value}} for key, value in resources.items()]
    in_recovery = [f"{key}x" for key in recovery]
    typos += [tree | {"resources": resources | {"job_recovery": recovery | {key: 1}}} for key in in_recovery]
    whole, small, *refused = read(tree, least, *typos)
    kept = whole["kept"]
    for key in ("name", "num_nodes", "envs", "volumes", "setup", "run"):
        assert kept[key] == tree[key], key
    assert whole["unknown"] == [] and whole["secrets"] == ["AWS_SECRET_ACCESS_KEY"]
    found = kept["resources"]
    for key in ("infra", "cpus", "memory", "use_spot", "disk_size"):
        assert found[key] == resources[key], key
    assert found["accelerators"] == {"H100": 4}
    assert found["image_id"] == {"us-east-1": "docker:registry.invalid/windlass:1"}
    assert {key: found["job_recovery"][key] for key in RECOVERY} == RECOVERY
    assert small["kept"]["run"] == least["run"]
    assert [answer.get("unknown") for answer in refused[-2:]] == [[key] for key in in_recovery]
    assert len(refused) == 18 and all("error" in answer for answer in refused[:-2]), refused


@pytest.mark.long
def test_what_two_hosts_run_is_one_run_of_two_ranks(tmp_path):
    """The task's `run` in bash, with the variables that SkyPilot gives to hosts."""
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path)))
    tree["run"]["directory"] = "mine"
    made = yaml.safe_load(
        task(SkyConfig(image="i", mount=str(tmp_path)), yaml.safe_dump(tree), ["run.steps=4"], Size(2, 1), "mine")
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = made["run"].replace(f":{made_by.PORT}", f":{port}")
    hosts = []
    for rank in range(2):
        home = tmp_path / f"home{rank}"
        home.mkdir()
        given = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": str(rank), "HOME": str(home)}
        python = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environ = {**os.environ, **given, **python, "PYTHONPATH": str(Path(windlass.__file__).parent.parent)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        hosts.append(subprocess.Popen(["bash", "-c", script], env=environ, **pipes))
    said = [host.communicate(timeout=1800)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    found = [line for line in tiny.lines(tmp_path / "mine") if line["kind"] in ("start", "step")]
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4]
    assert found[0]["derived"]["ranks"].startswith("2 on ")
