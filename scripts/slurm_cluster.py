"""SLURM on this machine: its controller and the daemons of one node or several on loopback, for tests and for trying things.

    python scripts/slurm_cluster.py [NODES]     prints SLURM_CONF=..., and serves until it is ended

Two partitions: jobs in `high` preempt those in `main`, which are requeued. Several nodes are called n0, n1, ...; no such host
exists, so ranks on them need MASTER_ADDR=127.0.0.1.

Debian's packages: slurmctld slurmd slurm-client munge. It runs as root, as SLURM's daemons do.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
START_S = 60.0
CONFIG = """
ClusterName=windlass
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 State=UNKNOWN\n"


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.getuid() == 0 else "SLURM's daemons run as root"


class Cluster:
    """`environment`: in which srun and sbatch find the cluster. `nodes`: names of its nodes, with eight CPUs each, whatever this
    machine has."""

    def __init__(self, folder: Path, nodes: list[str]):
        self.nodes, self._daemons = nodes, contextlib.ExitStack()
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, *command: str) -> None:
        """A daemon that ends with the cluster."""
        self._daemons.enter_context(_daemon([*command], os.environ | self.environment))

    def start_node(self, name: str) -> None:
        self.start("slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """Its daemon and all that it has started, by SIGKILL: what a power cut does."""
        daemon, steps, tasks = [], {}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                environment = process.environ()
                if environment.get("SLURM_CONF") != self.environment["SLURM_CONF"]:
                    continue
                if process.cmdline()[-2:] == ["-N", name]:
                    daemon.append(process)
                elif environment.get("SLURMD_NODENAME") == name:
                    tasks.append(process)
                    if (parent := process.parent()) is not None and parent.name() == "slurmstepd":
                        steps[parent.pid] = parent  # its title is written over its environment
        for process in (*daemon, *steps.values(), *tasks):  # none is left to report the death of another
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        for name in self.nodes:  # a job that still runs would outlive the daemons
            self.kill_node(name)
        self._daemons.close()


@contextlib.contextmanager
def slurm_cluster(num_nodes: int = 1) -> Iterator[Cluster]:
    """A cluster that is idle. One node has this host's name."""
    with tempfile.TemporaryDirectory(prefix="windlass-slurm-", ignore_cleanup_errors=True) as temporary:
        folder, host = Path(temporary), socket.gethostname()
        nodes = [host] if num_nodes == 1 else [f"n{number}" for number in range(num_nodes)]
        for each in ("state", *(f"spool.{name}" for name in nodes)):
            (folder / each).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        config = CONFIG.format(host=host, folder=folder, controller_port=_free_port())
        defined = [NODE.format(name=name, host=host, port=_free_port()) for name in nodes]
        first_partition = config.index("PartitionName")
        (folder / "slurm.conf").write_text(config[:first_partition] + "".join(defined) + config[first_partition:])
        files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}"]
        munged += [f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}"]
        with contextlib.closing(Cluster(folder, nodes)) as cluster:
            cluster.start(*munged)
            _wait(files["socket"].exists)
            cluster.start("slurmctld", "-D")
            for name in nodes:
                cluster.start_node(name)
            _wait(lambda: _is_idle(os.environ | cluster.environment))
            yield cluster


@contextlib.contextmanager
def _daemon(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_idle(environment: dict[str, str]) -> bool:
    done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
    return set(done.stdout.split()) == {"idle"}


def _wait(is_ready: Callable[[], bool]) -> None:
    for _ in range(int(START_S / 0.1)):
        if is_ready():
            return
        time.sleep(0.1)
    raise RuntimeError("SLURM did not start")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    if why := missing():
        raise SystemExit(why)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the daemons would stay
    with contextlib.suppress(KeyboardInterrupt), slurm_cluster(int(sys.argv[1]) if len(sys.argv) > 1 else 1) as found:
        print("\n".join(f"export {name}={value}" for name, value in found.environment.items()), flush=True)
        signal.pause()
