"""The recipe's `launch:` block: how ranks are started and started again. It never changes what is trained."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from pydantic import Field

from windlass.errors import UserError
from windlass.launch.slurm_config import SlurmConfig
from windlass.settings import Settings, Written

Variable = Annotated[
    str, Written(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name: letters, digits and underscores, no digit first")
]
Directory = Annotated[str, Written(r"/[^\x00-\x1f]+", "an absolute path, such as /runs")]
Quantity = Annotated[str, Written(r"[1-9]\d*[MGT]i", "a whole number and Mi, Gi or Ti: 400Gi")]


SUBDOMAIN: Final = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"
"""The pattern of a Kubernetes subdomain (RFC 1123)."""
Label = Annotated[
    str, Written(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a label: lower-case letters, digits and inner dashes")
]
Name = Annotated[str, Written(SUBDOMAIN, "a name of Kubernetes: lower-case letters, digits, and inner dashes and dots")]
SecretKey = Annotated[
    str, Written(rf"{SUBDOMAIN}/[-._A-Za-z0-9]+", "SECRET/KEY, as the cluster names them: store/secret")
]


class KubernetesConfig(Settings):
    image: str | None = None
    """The image of the pods, with windlass in it (see Containerfile)."""

    namespace: Label | None = None
    """Namespace of the pods. Default: kubectl's."""

    claim: Name | None = None
    """A PersistentVolumeClaim that every pod mounts (ReadWriteMany) and that holds run directory and data. A single host does
    not need it if checkpoint.remote is set."""

    mount: Directory = "/runs"
    """Where pods mount the claim, and the directory in which they start: relative paths of the recipe are below it."""

    cpu: int | None = Field(default=None, ge=1)
    """Cores of a pod. Default: the cluster's."""

    memory: Annotated[str, Written(r"[1-9]\d*[MGT]i?", "a whole number and a unit: 400Gi, or 400G")] | None = None
    """Memory of a pod: 400Gi. Default: the cluster's."""

    shm_gib: int = Field(default=16, ge=1)
    """Size of /dev/shm, which counts as memory: at least a GiB per rank."""

    gpu_resource: str = "nvidia.com/gpu"
    """The cluster's name for a GPU."""

    node_selector: dict[str, str] = {}
    """Labels that a pod's node must have."""

    environment: dict[Variable, str | int] = {}
    """Variables of the pods, such as NCCL's."""

    secrets: dict[Variable, SecretKey] = {}
    """Variable -> SECRET/KEY of the cluster: `AWS_SECRET_ACCESS_KEY: store/secret`."""

    prepare_parts: int | None = Field(default=None, ge=2, le=10_000)
    """Pods of a JobSet that prepare the data in parallel, between a pod that makes the tokenizer and a pod that joins the
    parts. All of them end before the run begins. Default: the first pod of the run prepares all."""

    retries: int = Field(default=20, ge=0)
    """How often a JobSet restarts all pods: after a stop that saved, a lost node, or a failure that is not the recipe's."""

    runtime: Name = "torch-distributed"
    """The ClusterTrainingRuntime of a TrainJob."""


class FlyteConfig(Settings):
    image: str | None = None
    """The image of the tasks, with windlass and its `flyte` extra in it."""

    cpu: int | None = Field(default=None, ge=1)
    """Cores of a pod that trains, and of the pod that prepares. Default: the cluster's, as with memory."""

    memory: Quantity | None = None
    """Memory of such a pod: 400Gi."""

    gpu: (
        Annotated[str, Written(r"([A-Za-z0-9 -]+:)?[1-9]\d*", "a count, or a kind and a count: H200:8")]
        | Annotated[int, Field(ge=1)]
        | None
    ) = None
    """GPUs of each pod that trains, one per rank, as Flyte writes them: 8, or H200:8. Default: none, ranks on CPUs."""

    shm: Quantity | None = None
    """Size of /dev/shm in pods that train, which counts as memory: 16Gi. NCCL and the loader use it."""

    nodes: int = Field(default=1, ge=1)
    """Pods that train together. More than one pod needs launch.flyte.mount, and Kubeflow's training operator in the cluster."""

    retries: int = Field(default=0, ge=0)
    """How often Flyte restarts training after a lost pod, a stop that saved, or a failure that is not the recipe's. A retry has
    an empty disk, so it needs checkpoint.remote or launch.flyte.mount."""

    prepare_parts: int | None = Field(default=None, ge=2, le=10_000)
    """Tasks that prepare the data in parallel, between a task that makes the tokenizer and a task that joins the parts. They
    need launch.flyte.mount, and are retried like training. Default: one task prepares all."""

    mount: Directory | None = None
    """Where the cluster's own pod template mounts a volume that all pods share; relative paths of the recipe are below it."""


class SkyConfig(Settings):
    image: str | None = None
    """The image of the hosts, with windlass in it (see Containerfile). Default: the cloud's, and `setup` installs windlass."""

    setup: list[str] = []
    """Shell lines to run on each new host before anything else: `pip install ...`, or the mount of a file system."""

    infra: str | None = None
    """Where hosts are rented: aws, gcp/us-central1, k8s/my-context. Default: where SkyPilot finds them cheapest."""

    gpu: str | None = None
    """SkyPilot's name of the hosts' GPU: H100. --gpus-per-node says how many."""

    cpus: int | None = Field(default=None, ge=1)
    """Smallest number of cores of a host. Default: SkyPilot's."""

    memory_gib: int | None = Field(default=None, ge=1)
    """Smallest memory of a host. Default: SkyPilot's."""

    disk_gib: int | None = Field(default=None, ge=1)
    """Disk of a host. Default: SkyPilot's."""

    spot: bool = False
    """Spot hosts, which cost less and may be taken back: SkyPilot then rents others, and the run resumes from its last
    commit."""

    mount: Directory | None = None
    """A directory that all hosts share and that outlives them; hosts start there, and relative paths of the recipe are below
    it. A single host does not need it if checkpoint.remote is set."""

    volume: str | None = None
    """A SkyPilot volume (`sky volumes ls`) that is mounted at `mount`. Default: a line of `setup` mounts something."""

    environment: dict[Variable, str | int] = {}
    """Variables of the hosts, such as NCCL's."""

    secrets: list[Variable] = []
    """Names of variables whose values come from the environment of the command that submits: [AWS_SECRET_ACCESS_KEY]."""

    def rules(self) -> Sequence[Iterator[UserError]]:
        return (self._volume(),)

    def _volume(self) -> Iterator[UserError]:
        if self.volume is not None and self.mount is None:
            yield UserError(
                f"launch.sky.volume={self.volume} without launch.sky.mount",
                "a volume is mounted at a directory",
                "name it: launch.sky.mount=/runs",
            )


class LaunchConfig(Settings):
    max_restarts: int = Field(default=3, ge=0)
    """How often our launcher restarts the ranks from the last commit after a rank died or stalled. It never retries a mistake
    that only the user can fix, or a step that has failed three times. Under SLURM: how often a job is requeued without a new
    checkpoint."""

    stall_s: float = Field(default=180.0, ge=0)
    """If a rank begins nothing new for this many seconds, and for ten times the longest duration of its phase so far, it is
    named and stopped with all others; on one host, forward, backward and update get a minute if they take milliseconds. Waiting
    for data ends earlier, by data.timeout_s. 0: never."""

    slurm: SlurmConfig = SlurmConfig()
    """Settings of the jobs of `windlass launch slurm` at this site."""

    kubernetes: KubernetesConfig = KubernetesConfig()
    """Settings of the pods of `windlass launch kubernetes` in this cluster."""

    flyte: FlyteConfig = FlyteConfig()
    """Settings of the tasks of `windlass launch flyte`."""

    sky: SkyConfig = SkyConfig()
    """Settings of the hosts that SkyPilot rents for `windlass launch sky`."""
