"""Kubernetes: manifests that train a recipe, as a JobSet or as a TrainJob of Kubeflow Trainer 2.

Each host of the run is a pod that runs `windlass launch nodes` (of one host, `windlass train`). Restarts of ranks are ours, those
of pods are the JobSet's: a pod that stopped and saved (75), or lost its node, is started again with all others, and a mistake
(2, 3, 4) ends the job. A pod's disk ends with it, so the run directory is on a volume that all pods mount, or, on one host, its
checkpoints are copied to `checkpoint.remote`. The recipe travels in a ConfigMap, secrets as references to Secrets of the cluster.

With `prepare_parts` three jobs of the JobSet prepare before that: one pod makes the tokenizer, N pods a part each, one joins
them. Each waits for the one before (`dependsOn`). A restart runs all of them again, and what is prepared is skipped.

Fields: jobset.x-k8s.io/v1alpha2, and trainer.kubeflow.org/v1alpha1, where a run's volumes are a patch of the runtime
(`runtimePatches`; what was `podTemplateOverrides` is dropped there without a word).
"""

import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import PurePath
from typing import Any, Final, Literal

import yaml

from windlass.errors import FINAL, Unavailable, UserError
from windlass.launch.agent import SHUTDOWN_S
from windlass.launch.config import KubernetesConfig
from windlass.launch.job_names import checked_job_name
from windlass.launch.slurm import Size
from windlass.launch.volume import check_shared, off_volume
from windlass.safe_text import redacted

PORT: Final = 29_400
FOLDER: Final = "/windlass"
"""Where the recipe is mounted."""
WINDLASS: Final = ("python3", "-m", "windlass")
WORKERS: Final = "workers"
RUNTIME_JOB: Final = "node"
"""The job of the pods, and their container, in Kubeflow's runtime for torch."""

START_THERE: Final = ": pods start there"

Tree = dict[str, Any]


class Blocks(yaml.SafeDumper):
    """Writes texts of several lines as they are read."""


Blocks.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def check_pods(kubernetes: KubernetesConfig, run: PurePath, data: PurePath, has_remote: bool, size: Size) -> None:
    """Raises UserError where pods would lose what a run keeps, or would not see the same directories. `has_remote`: whether
    checkpoints are copied to a store."""
    if kubernetes.image is None:
        raise UserError(
            "launch.kubernetes.image is missing",
            "a pod runs an image that has windlass (see Containerfile)",
            "build and push one, and name it there",
        )
    if kubernetes.claim is None and (size.nodes > 1 or not has_remote):
        raise UserError(
            f"{size.nodes} pods without launch.kubernetes.claim" if size.nodes > 1 else "a pod whose disk ends with it",
            "all hosts of a run see its directory and its data, and the directory outlives them",
            "name a PersistentVolumeClaim that all of them can mount (ReadWriteMany)"
            + ("" if size.nodes > 1 else ", or set checkpoint.remote"),
        )
    if kubernetes.claim is not None:
        check_shared(kubernetes.mount, run, data, START_THERE)


def check_kubernetes_parts(
    kubernetes: KubernetesConfig, kind: Literal["jobset", "trainjob"], key: str, directory: PurePath
) -> None:
    """Raises UserError where the parts of a preparation could not be made or joined. `directory`: theirs, given as `key`."""
    parts = f"launch.kubernetes.prepare_parts={kubernetes.prepare_parts}"
    if kind == "trainjob":
        raise UserError(
            f"{parts} with --kind trainjob",
            "a TrainJob begins at once: jobs that wait for each other are a JobSet's",
            "give --kind jobset; or leave prepare_parts out, and the TrainJob prepares the data by itself",
        )
    if kubernetes.claim is None:
        raise UserError(
            f"{parts} without launch.kubernetes.claim",
            "a part is made by one pod, and joined by another",
            "name a PersistentVolumeClaim that all of them can mount (ReadWriteMany)",
        )
    rule = f"parts are beside {key}, where all pods see them"
    if error := off_volume(f"{parts}, and {key}", directory, kubernetes.mount, rule, START_THERE):
        raise error


def manifests(
    kubernetes: KubernetesConfig,
    text: str,
    arguments: list[str],
    size: Size,
    name: str,
    kind: Literal["jobset", "trainjob"],
) -> str:
    """YAML for `kubectl apply`. `text`: the recipe; `arguments`: overrides behind it. Raises UserError."""
    metadata: Tree = {
        "name": checked_job_name(name),
        **({"namespace": kubernetes.namespace} if kubernetes.namespace else {}),
    }
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "name": f"{name}-recipe"},
        "data": {"recipe.yaml": text},
    }
    write = _jobset if kind == "jobset" else _trainjob
    job = write(kubernetes, arguments, size, metadata)
    made = yaml.dump_all([recipe, job], Dumper=Blocks, sort_keys=False)
    if redacted(made) != made:
        raise UserError(
            "the manifest would hold a secret: a URL with a password or a signature, or a token of the hub",
            "a ConfigMap is a text that others of the cluster may read",
            "write ${NAME} for it, in quotes, and name a Secret for it in launch.kubernetes.secrets",
        )
    return made


def command(arguments: list[str], size: Size, endpoint: str) -> list[str]:
    """What a pod runs."""
    recipe = [*_recipe(arguments), "--nproc", str(size.tasks_per_node)]
    if size.nodes == 1:
        return [*WINDLASS, "train", *recipe]
    return [*WINDLASS, "launch", "nodes", *recipe, "--nodes", str(size.nodes), "--endpoint", endpoint]


def _literal(argument: str) -> str:
    """Text that Kubernetes hands on unchanged, though it expands $(NAME) in a command."""
    return argument.replace("$(", "$$(")


def _recipe(arguments: list[str]) -> list[str]:
    return [f"{FOLDER}/recipe.yaml", *map(_literal, arguments)]


def _jobset(kubernetes: KubernetesConfig, arguments: list[str], size: Size, metadata: Tree) -> Tree:
    name = metadata["name"]
    inside = command(arguments, size, f"{name}-{WORKERS}-0-0.{name}:{PORT}")
    jobs = [*_preparation(kubernetes, arguments, name), _job(kubernetes, name, WORKERS, inside, size)]
    for before, job in pairwise(jobs):
        job["dependsOn"] = [{"name": before["name"], "status": "Complete"}]
    rule = {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": kubernetes.retries, "rules": [rule]},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": jobs,
        },
    }


def _preparation(kubernetes: KubernetesConfig, arguments: list[str], name: str) -> list[Tree]:
    """The jobs that prepare in parts, in their order. A pod that its node lost is started again alone."""
    count = kubernetes.prepare_parts
    if count is None:
        return []
    steps = {"tokenizer": ["--tokenizer-only"], "parts": ["--part", f"auto/{count}"], "join": ["--join", "--data-only"]}
    jobs, anywhere = [], kubernetes.changed(node_selector={})  # nodes with GPUs are often closed to pods without
    for step, options in steps.items():
        inside = [*WINDLASS, "prepare", *_recipe(arguments), *options]
        job = _job(anywhere, name, step, inside, Size(count if step == "parts" else 1, 1))
        lost = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        job["template"]["spec"]["podFailurePolicy"]["rules"].insert(0, lost)
        jobs.append(job)
    return jobs


def _job(kubernetes: KubernetesConfig, name: str, job: str, inside: list[str], size: Size) -> Tree:
    """A replicated job of the JobSet `name`, whose pods run `inside`."""
    container = {
        "name": "windlass",
        "image": kubernetes.image,
        "command": inside,
        "workingDir": kubernetes.mount,
        "env": _environment(kubernetes),
        "resources": _resources(kubernetes, size),
        "volumeMounts": _mounts(kubernetes),
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SHUTDOWN_S,
        **({"nodeSelector": dict(kubernetes.node_selector)} if kubernetes.node_selector else {}),
        "containers": [container],
        "volumes": _volumes(kubernetes, name),
    }
    codes = {"containerName": "windlass", "operator": "In", "values": list(FINAL)}
    spec = {
        "parallelism": size.nodes,
        "completions": size.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one pod alone cannot go on: the JobSet starts all again
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {"spec": pod},
    }
    return {"name": job, "replicas": 1, "template": {"spec": spec}}


def _trainjob(kubernetes: KubernetesConfig, arguments: list[str], size: Size, metadata: Tree) -> Tree:
    container = {"name": RUNTIME_JOB, "volumeMounts": _mounts(kubernetes)}
    pod = {
        "terminationGracePeriodSeconds": SHUTDOWN_S,
        **({"nodeSelector": dict(kubernetes.node_selector)} if kubernetes.node_selector else {}),
        "containers": [container],
        "volumes": _volumes(kubernetes, metadata["name"]),
    }
    patch = {"replicatedJobs": [{"name": RUNTIME_JOB, "template": {"spec": {"template": {"spec": pod}}}}]}
    inside = command(arguments, size, "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)")  # which the controller sets
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": kubernetes.runtime},
            "trainer": {
                "image": kubernetes.image,
                # the directory that a container starts in is no field there
                "command": [
                    "/bin/sh",
                    "-c",
                    f'cd {_literal(shlex.quote(kubernetes.mount))} && exec "$@"',
                    "sh",
                    *inside,
                ],
                "numNodes": size.nodes,
                "numProcPerNode": size.tasks_per_node,
                "env": _environment(kubernetes),
                "resourcesPerNode": _resources(kubernetes, size),
            },
            "runtimePatches": [
                {"manager": "windlass.dev/launch", "trainingRuntimeSpec": {"template": {"spec": patch}}}
            ],
        },
    }


def _environment(kubernetes: KubernetesConfig) -> list[Tree]:
    plain = [{"name": name, "value": str(value)} for name, value in kubernetes.environment.items()]
    parts = ((name, *reference.split("/")) for name, reference in kubernetes.secrets.items())
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in parts
    ]


def _resources(kubernetes: KubernetesConfig, size: Size) -> Tree:
    """Requests and limits alike, so that no pod is throttled or evicted first."""
    wanted = {"cpu": kubernetes.cpu, "memory": kubernetes.memory, kubernetes.gpu_resource: size.gpus_per_node or None}
    found = {name: str(value) for name, value in wanted.items() if value is not None}
    return {"requests": found, "limits": dict(found)}


def _mounts(kubernetes: KubernetesConfig) -> list[Tree]:
    return [
        {"name": "recipe", "mountPath": FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "runs", "mountPath": kubernetes.mount},
    ]


def _volumes(kubernetes: KubernetesConfig, name: str) -> list[Tree]:
    """Without a claim the run directory is on the pod's own disk."""
    claim = {"persistentVolumeClaim": {"claimName": kubernetes.claim}} if kubernetes.claim else {"emptyDir": {}}
    return [
        {"name": "recipe", "configMap": {"name": f"{name}-recipe"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{kubernetes.shm_gib}Gi"}},
        {"name": "runs", **claim},
    ]


def apply(text: str) -> str:
    """Hands manifests to the cluster -> what kubectl says. Raises UserError where there is no kubectl or it refuses, Unavailable
    where the cluster does not answer."""
    if shutil.which("kubectl") is None:
        raise UserError(
            "kubectl is not installed here",
            "manifests are handed to the cluster by kubectl, with its own settings",
            "install it, or print them with --dry-run and apply them elsewhere",
        )
    done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    said = " ".join(done.stderr.split())
    is_away = any(words in said for words in ("was refused", "Unable to connect", "i/o timeout", "no such host"))
    raise (Unavailable if is_away else UserError)(
        f"kubectl refused the manifests: {said}",
        "the cluster has the JobSet controller (or Kubeflow Trainer 2), and this user may create jobs in the namespace",
        "kubectl config current-context says which cluster was asked; correct launch.kubernetes, or install the controller",
    )
