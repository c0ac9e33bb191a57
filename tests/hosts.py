"""Hosts of a cluster on one machine: a network namespace each, on one bridge, with process ids, a name and shared memory of its
own. They share the file system. As root on Linux only."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

LIMIT_S = 1800  # more than a process that lives takes on any machine


def missing() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in ("ip", "unshare") if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install iproute2 util-linux)"
    probe = subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True)
    return None if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode().strip()}"


class Host:
    """One of them. `address`: among the others."""

    def __init__(self, name: str, namespace: str, address: str, names: Path, port: tuple[str, str]):
        self.name, self.namespace, self.address, self._names, self._port = name, namespace, address, names, port

    def start(self, command: list[str], output: Path, **more: str) -> psutil.Popen:
        """-> the first process of the host's own process ids: whatever kills it kills all that `command` starts."""
        own = "mount -t tmpfs none /dev/shm && mount -t proc proc /proc"
        names = f"mount --bind {self._names} /etc/hosts && hostname {self.name}"
        # the shell stays the first process: that takes no signals, and what it starts may be signalled like any process
        inside = ["sh", "-c", f'{own} && {names} && "$@"; exit $?', "sh", *command]
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **more}
        with output.open("ab") as file:
            return psutil.Popen(
                ["ip", "netns", "exec", self.namespace, *spaces, *inside], stdout=file, stderr=file, env=environment
            )

    def link(self, state: str) -> None:
        """`up` or `down`."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)

    def shape(self, rate: str) -> None:
        """Lets this host send and receive at `rate`, such as 20mbit."""
        bucket = ["root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
        for namespace, device in ((self.namespace, "eth0"), self._port):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "add", "dev", device, *bucket], check=True, capture_output=True
            )


def agent_of(process: psutil.Popen) -> psutil.Process:
    """The launcher that runs in the host: what its shell has started. The shell leads the host's own process ids."""
    return shell_of(process).children()[0]


def shell_of(process: psutil.Popen) -> psutil.Process:
    """The first process of the host: who kills it kills all."""
    return process.children()[0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """`number` hosts: host0 at 10.78.0.1, ... They and all of their processes are gone afterwards."""
    prefix = f"wl{os.getpid() % 10000}"
    found: list[Host] = []
    with tempfile.TemporaryDirectory(prefix="windlass-hosts-") as folder:
        names = Path(folder, "hosts")
        names.write_text("127.0.0.1 localhost\n" + "".join(f"10.78.0.{one + 1} host{one}\n" for one in range(number)))
        try:
            _ip("netns", "add", f"{prefix}x")  # the bridge has a namespace of its own: two tests do not meet
            _ip("-n", f"{prefix}x", "link", "add", "bridge", "type", "bridge")
            _ip("-n", f"{prefix}x", "link", "set", "bridge", "up")
            for one in range(number):
                host = Host(f"host{one}", f"{prefix}h{one}", f"10.78.0.{one + 1}", names, (f"{prefix}x", f"port{one}"))
                _ip("netns", "add", host.namespace)
                found.append(host)
                ends = [
                    "eth0",
                    "netns",
                    host.namespace,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"port{one}",
                    "netns",
                    f"{prefix}x",
                ]
                _ip("link", "add", *ends)
                _ip("-n", f"{prefix}x", "link", "set", f"port{one}", "master", "bridge", "up")
                _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", host.namespace, "link", "set", device, "up")
            yield found
        finally:
            for namespace in [*(host.namespace for host in found), f"{prefix}x"]:
                listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
                for pid in listed.split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip("netns", "del", namespace)
