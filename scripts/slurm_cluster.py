"""SLURM on this machine: one node, its controller and its daemon on loopback, for tests and for trying things.

    python scripts/slurm_cluster.py             prints SLURM_CONF=..., and serves until it is ended

Debian's packages: slurmctld slurmd slurm-client munge. It runs as root, as SLURM's daemons do.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
START_S = 60.0
CONFIG = """
ClusterName=windlass
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={daemon_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurmctld slurmd slurm-client munge)"
    return None if os.getuid() == 0 else "SLURM's daemons run as root"


@contextlib.contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """The environment in which srun finds a cluster of one node with eight CPUs, whatever this machine has."""
    with tempfile.TemporaryDirectory(prefix="windlass-slurm-") as name, contextlib.ExitStack() as daemons:
        folder = Path(name)
        for each in ("state", "spool"):
            (folder / each).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        ports = {"controller_port": _free_port(), "daemon_port": _free_port()}
        (folder / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname(), folder=folder, **ports))
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={files['socket']}"]
        munged += [f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}"]
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.enter_context(_daemon(command, environment))
            _wait(files["socket"].exists)
        _wait(lambda: _is_idle(environment))
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


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
    return done.stdout.strip() == "idle"


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
    with slurm_cluster() as found:
        print("\n".join(f"export {name}={value}" for name, value in found.items()), flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
