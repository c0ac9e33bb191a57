"""Manifests of Kubernetes: nothing in them is unknown to the controllers' own models, and what a pod runs is the run."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
import yaml

import windlass
from tests import tiny
from tests.data.prepare.test_prepare import content
from windlass.config import to_yaml
from windlass.data.prepare.prepare import prepare
from windlass.errors import Unavailable, UserError
from windlass.launch import kubernetes as made_by
from windlass.launch.config import KubernetesConfig
from windlass.launch.kubernetes import apply, check_kubernetes_parts, check_pods, command, manifests
from windlass.launch.slurm import Size

models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api (the dev extra)")
MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
}
FULL = KubernetesConfig(
    image="registry.invalid/windlass:1",
    namespace="lm",
    claim="runs",
    cpu=32,
    memory="400Gi",
    node_selector={"gpu": "h100"},
    environment={"NCCL_DEBUG": "WARN"},
    secrets={"AWS_SECRET_ACCESS_KEY": "store/secret"},
    retries=7,
)
RECIPE = "run: {directory: runs/mine}\n"


def made(kubernetes=FULL, kind="jobset", text=RECIPE):
    recipe, job = yaml.safe_load_all(manifests(kubernetes, text, ["run.steps=9"], Size(2, 4, 4), "mine", kind))
    return recipe, job


def lost(tree):
    """What the controllers' own models do not take over: paths in `tree`."""
    kept = getattr(models, MODELS[tree["kind"]]).from_dict(tree).to_dict()

    def walk(given, found, path):
        if isinstance(given, dict):
            for key, value in given.items():
                if not isinstance(found, dict) or key not in found:
                    yield f"{path}.{key}"
                else:
                    yield from walk(value, found[key], f"{path}.{key}")
        elif isinstance(given, list):
            if not isinstance(found, list) or len(found) != len(given):
                yield path
            else:
                for at, value in enumerate(given):
                    yield from walk(value, found[at], f"{path}[{at}]")
        elif str(given) != str(found):
            yield path

    return list(walk(tree, kept, tree["kind"]))


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
@pytest.mark.parametrize("kubernetes", [FULL, KubernetesConfig(image="i", claim="c"), FULL.changed(prepare_parts=8)])
def test_nothing_is_lost_in_the_controllers_models(kind, kubernetes):
    recipe, job = made(kubernetes, kind=kind)
    assert lost(recipe) == lost(job) == []
    assert recipe["data"] == {"recipe.yaml": RECIPE} and recipe["metadata"]["name"] == "mine-recipe"


@pytest.mark.parametrize(
    ("kind", "path", "typo"),
    [
        ("jobset", ("spec", "failurePolicy"), "maxRestart"),
        ("jobset", ("spec",), "replicatedJob"),
        ("jobset", ("spec", "replicatedJobs", 1), "dependOn"),
        ("jobset", ("spec", "replicatedJobs", 1, "dependsOn", 0), "state"),
        ("jobset", ("spec", "replicatedJobs", 1, "template", "spec"), "completion"),
        ("trainjob", ("spec", "trainer"), "numNode"),
        ("trainjob", ("spec",), "podTemplateOverrides"),
    ],
)
def test_a_typo_would_be_seen(kind, path, typo):
    _, job = made(FULL.changed(prepare_parts=8), kind) if kind == "jobset" else made(kind=kind)
    place = job
    for key in path:
        place = place[key]
    place[typo] = 3 if typo != "podTemplateOverrides" else [{}]
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    assert lost(job) == [f"{job['kind']}{where}.{typo}"]


def test_a_wrong_type_is_refused_by_the_models():
    _, job = made(kind="trainjob")
    job["spec"]["trainer"]["numProcPerNode"] = "auto"
    with pytest.raises(ValueError):
        lost(job)


def test_a_jobset_starts_all_pods_again_and_ends_by_a_mistake():
    _, job = made()
    assert job["spec"]["failurePolicy"] == {
        "maxRestarts": 7,
        "rules": [{"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    (workers,) = job["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"], spec["backoffLimit"]) == (
        2,
        2,
        "Indexed",
        0,
    )
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "windlass", "operator": "In", "values": [2, 3, 4]},
    }
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "400Gi", "nvidia.com/gpu": "4"}
    assert container["env"] == [
        {"name": "NCCL_DEBUG", "value": "WARN"},
        {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": {"secretKeyRef": {"name": "store", "key": "secret"}}},
    ]
    assert container["workingDir"] == "/runs" and pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 600
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"recipe": "/windlass", "shm": "/dev/shm", "runs": "/runs"}
    assert [volume["name"] for volume in pod["volumes"]] == list(mounts)


def test_pods_meet_at_the_first_of_a_jobset_and_at_the_controllers_name_in_a_trainjob():
    _, jobset = made()
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["command"] == [
        *("python3", "-m", "windlass", "launch", "nodes", "/windlass/recipe.yaml", "run.steps=9", "--nproc", "4"),
        *("--nodes", "2", "--endpoint", "mine-workers-0-0.mine:29400"),
    ]
    _, trainjob = made(kind="trainjob")
    trainer = trainjob["spec"]["trainer"]
    assert trainer["command"][:4] == ["/bin/sh", "-c", 'cd /runs && exec "$@"', "sh"]
    assert trainer["command"][-1] == "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)


def test_a_jobset_prepares_in_parts_before_it_trains():
    _, alone = made()
    _, job = made(FULL.changed(prepare_parts=8))
    assert {**job["spec"], "replicatedJobs": None} == {**alone["spec"], "replicatedJobs": None}
    *before, workers = job["spec"]["replicatedJobs"]
    assert workers.pop("dependsOn") == [{"name": "join", "status": "Complete"}]
    assert [workers] == alone["spec"]["replicatedJobs"]
    assert [one["name"] for one in before] == ["tokenizer", "parts", "join"]
    assert [one.get("dependsOn") for one in before] == [
        None,
        [{"name": "tokenizer", "status": "Complete"}],
        [{"name": "parts", "status": "Complete"}],
    ]
    specs = [one["template"]["spec"] for one in before]
    assert [(one["completions"], one["parallelism"], one["completionMode"]) for one in specs] == [
        *((1, 1, "Indexed"), (8, 8, "Indexed"), (1, 1, "Indexed"))
    ]
    ends = [["--tokenizer-only"], ["--part", "auto/8"], ["--join", "--data-only"]]
    trains = workers["template"]["spec"]["template"]["spec"]
    for spec, end in zip(specs, ends):
        assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "FailJob"]
        assert spec["podFailurePolicy"]["rules"][0]["onPodConditions"] == [
            {"type": "DisruptionTarget", "status": "True"}
        ]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        recipe = ["python3", "-m", "windlass", "prepare", "/windlass/recipe.yaml", "run.steps=9"]
        assert container["command"] == recipe + end
        assert container["resources"]["limits"] == {"cpu": "32", "memory": "400Gi"}, "no GPU"
        for key in ("env", "volumeMounts", "workingDir", "image"):
            assert container[key] == trains["containers"][0][key], key
        assert {**pod, "containers": None, "nodeSelector": trains["nodeSelector"]} == {**trains, "containers": None}
        assert "nodeSelector" not in pod, "nodes with GPUs are often closed to pods without"


@pytest.mark.parametrize(
    ("kind", "changes", "place", "said"),
    [
        ("trainjob", {}, "data", "launch.kubernetes.prepare_parts=8 with --kind trainjob"),
        ("jobset", {"claim": None}, "data", "launch.kubernetes.prepare_parts=8 without launch.kubernetes.claim"),
        ("jobset", {}, "/tmp/x", "prepare_parts=8, and data.directory=/tmp/x with the volume mounted at /runs"),
    ],
)
def test_parts_that_could_not_be_joined_are_refused(kind, changes, place, said):
    with pytest.raises(UserError, match=said):
        check_kubernetes_parts(FULL.changed(prepare_parts=8, **changes), kind, "data.directory", PurePosixPath(place))
    for kept in ("data", "/runs/data"):
        check_kubernetes_parts(FULL.changed(prepare_parts=8), "jobset", "data.directory", PurePosixPath(kept))


def test_no_name_of_a_variable_in_a_mount_is_expanded():
    _, trainjob = made(FULL.changed(mount="/runs $(HOME)"), kind="trainjob")
    assert trainjob["spec"]["trainer"]["command"][2] == "cd '/runs $$(HOME)' && exec \"$@\""


def test_a_trainjobs_pods_have_what_a_jobsets_have():
    _, jobset = made()
    _, trainjob = made(kind="trainjob")
    ours = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (patch,) = trainjob["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    theirs = node["template"]["spec"]["template"]["spec"]
    for key in ("terminationGracePeriodSeconds", "nodeSelector", "volumes"):
        assert theirs[key] == ours[key], key
    assert theirs["containers"] == [{"name": "node", "volumeMounts": ours["containers"][0]["volumeMounts"]}]
    trainer = trainjob["spec"]["trainer"]
    assert (trainer["env"], trainer["resourcesPerNode"]) == (
        ours["containers"][0]["env"],
        ours["containers"][0]["resources"],
    )


def test_one_host_trains_without_a_meeting_and_an_override_is_no_variable_of_kubernetes():
    assert command(["run.name=$(HOME)"], Size(1, 8, 8), "nowhere") == [
        *("python3", "-m", "windlass", "train", "/windlass/recipe.yaml", "run.name=$$(HOME)", "--nproc", "8")
    ]


def test_the_recipe_is_read_in_the_manifest_as_it_was_written():
    text = "run:\n  directory: 'runs/mine'  # a comment\n\nmodel: {family: \"qwen3\"}\n"
    shown = manifests(FULL, text, [], Size(1, 1), "mine", "jobset").partition("---")[0]
    assert "  recipe.yaml: |\n" + "".join(f"    {line}".rstrip() + "\n" for line in text.splitlines()) in shown
    assert yaml.safe_load(shown)["data"]["recipe.yaml"] == text


def test_a_secret_in_a_recipe_is_refused():
    with pytest.raises(UserError, match="would hold a secret"):
        made(text="data: {directory: 's3://user:pa55word@host/x'}\n")


@pytest.mark.parametrize("name", ["Mine", "1st", "a_b", "a" * 41, "mine-", ""])
def test_a_name_that_dns_does_not_take_is_refused(name):
    with pytest.raises(UserError, match="--job-name"):
        manifests(FULL, RECIPE, [], Size(1, 1), name, "jobset")


@pytest.mark.parametrize(
    ("changes", "run", "has_remote", "nodes", "said"),
    [
        ({"image": None}, "runs/a", False, 1, "launch.kubernetes.image is missing"),
        ({"claim": None}, "runs/a", True, 2, "2 pods without launch.kubernetes.claim"),
        ({"claim": None}, "runs/a", False, 1, "a pod whose disk ends with it"),
        ({}, "/scratch/runs", False, 2, "run.directory=/scratch/runs with the volume mounted at /runs"),
        ({}, "../runs-b/a", False, 2, "run.directory=../runs-b/a with the volume mounted at /runs"),
    ],
)
def test_pods_that_would_lose_the_run_are_refused(changes, run, has_remote, nodes, said):
    with pytest.raises(UserError, match=said):
        check_pods(FULL.changed(**changes), PurePosixPath(run), PurePosixPath("data"), has_remote, Size(nodes, 1))


@pytest.mark.parametrize("nodes", [1, 2])
def test_data_that_other_pods_would_not_see_are_refused(nodes):
    with pytest.raises(UserError, match=r"data\.directory=/scratch/data with the volume mounted at /runs"):
        check_pods(FULL, PurePosixPath("a"), PurePosixPath("/scratch/data"), True, Size(nodes, 1))
    check_pods(FULL, PurePosixPath("a"), PurePosixPath("s3://bucket/data"), True, Size(nodes, 1))


@pytest.mark.parametrize(("claim", "run", "nodes"), [("runs", "/runs/a", 2), ("runs", "a", 2), (None, "/anywhere", 1)])
def test_pods_that_keep_it_are_not(claim, run, nodes):
    for data in ("data", "/runs/data") if claim else ("/scratch/data",):
        check_pods(FULL.changed(claim=claim), PurePosixPath(run), PurePosixPath(data), True, Size(nodes, 1))


@pytest.mark.parametrize(
    ("code", "said", "raised"),
    [
        (0, "jobset.jobset.x-k8s.io/mine created", None),
        (1, "error: no matches for kind JobSet", UserError),
        (1, "The connection to the server localhost:8080 was refused", Unavailable),
    ],
)
def test_kubectl_answers_or_its_refusal_is_shown(monkeypatch, code, said, raised):
    asked = []

    def run(arguments, input, **_):
        asked.append((arguments, input))
        return SimpleNamespace(returncode=code, stdout=said + "\n", stderr=said)

    monkeypatch.setattr(made_by.shutil, "which", lambda _name: "/bin/kubectl")
    monkeypatch.setattr(made_by.subprocess, "run", run)
    if raised is None:
        assert apply("text") == said
    else:
        with pytest.raises(UserError) as caught:
            apply("text")
        assert type(caught.value) is raised and said in caught.value.given
    assert asked == [(["kubectl", "apply", "-f", "-"], "text")]


def test_without_kubectl_it_says_so(monkeypatch):
    monkeypatch.setattr(made_by.shutil, "which", lambda _name: None)
    with pytest.raises(UserError, match="kubectl is not installed here"):
        apply("text")


def fill(text, variables):
    """As the kubelet does: $(NAME) is the container's variable."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


@pytest.mark.long
def test_what_two_pods_run_is_one_run_of_two_ranks(tmp_path, monkeypatch):
    """The commands of a TrainJob with the variables of Kubeflow's controller, as the kubelet fills them in; its volume and its
    ConfigMap are directories."""
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path)))
    tree["run"]["directory"] = "mine"
    monkeypatch.setattr(made_by, "FOLDER", str(tmp_path / "windlass"))
    kubernetes = KubernetesConfig(image="i", claim="c", mount=str(tmp_path))
    text = manifests(kubernetes, yaml.safe_dump(tree), ["run.steps=4"], Size(2, 1), "mine", "trainjob")
    recipe, job = yaml.safe_load_all(text)
    (tmp_path / "windlass").mkdir()
    (tmp_path / "windlass" / "recipe.yaml").write_text(recipe["data"]["recipe.yaml"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    pods = []
    for rank in range(2):
        controller = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
        controller |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
        filled = [fill(part, controller) for part in job["spec"]["trainer"]["command"]]
        python = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        environ = {**os.environ, **controller, **python, "PYTHONPATH": str(Path(windlass.__file__).parent.parent)}
        pods.append(subprocess.Popen(filled, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [pod.communicate(timeout=1800)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    found = [line for line in tiny.lines(tmp_path / "mine") if line["kind"] in ("start", "step")]
    assert [line["step"] for line in found] == [0, 1, 2, 3, 4]
    assert found[0]["derived"]["ranks"].startswith("2 on ")


@pytest.mark.long
def test_what_the_pods_of_a_preparation_run_gives_one_machines_shards(tmp_path, monkeypatch):
    """The commands of the JobSet's jobs, in their order, each with the index that Kubernetes sets."""
    monkeypatch.setattr(made_by, "FOLDER", str(tmp_path / "windlass"))
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path)))
    tree["data"]["directory"] = "parts"
    kubernetes = KubernetesConfig(image="i", claim="c", mount=str(tmp_path), prepare_parts=3)
    text = manifests(kubernetes, yaml.safe_dump(tree), [], Size(1, 1), "mine", "jobset")
    recipe, jobset = yaml.safe_load_all(text)
    (tmp_path / "windlass").mkdir()
    (tmp_path / "windlass" / "recipe.yaml").write_text(recipe["data"]["recipe.yaml"])
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environ = {**os.environ, **path, "PYTHONPATH": str(Path(windlass.__file__).parent.parent)}
    for job in jobset["spec"]["replicatedJobs"][:3]:
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        for index in reversed(range(spec["completions"])):
            variables = {**environ, "JOB_COMPLETION_INDEX": str(index)}
            done = subprocess.run(
                container["command"], env=variables, cwd=container["workingDir"], capture_output=True, text=True
            )
            assert done.returncode == 0, (job["name"], index, done.stdout, done.stderr)
    whole = tiny.recipe(tmp_path).data
    joined, alone = tmp_path / "parts", Path(prepare(whole, {}, log=lambda _line: None).directory)
    assert content(joined) == content(alone)
