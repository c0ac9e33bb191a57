"""An S3-compatible server on loopback, for tests and for trying things: nanio, pure Python, files below a directory.

    python scripts/s3_server.py [--directory DIR] [--port 0] [--bucket NAME]

It prints the environment that reaches it, as lines for a shell, makes the bucket, and serves until it is ended (Ctrl-C,
or the end of its standard input with --until-eof). Without --directory what it stores goes with it. It checks
credentials, and does multipart uploads, ranges and paging. (For Ceph's gateway, the heavier and more exact one, see
scripts/ceph_server.sh.)
"""

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

START_S = 60.0
PR_SET_PDEATHSIG = 1  # prctl(2)


@contextlib.contextmanager
def s3_server(
    directory: Path, port: int = 0, bucket: str = "windlass", secret: str = ""
) -> Iterator[tuple[dict[str, str], "subprocess.Popen[bytes]"]]:
    """(the environment that reaches it, its process). The server ends with the block, or before if the block kills it. `secret`:
    of one that ran before in this directory, drawn where there is none."""
    port = port or free_port()
    key, secret = "windlass-test", secret or secrets.token_hex(16)
    endpoint = f"http://127.0.0.1:{port}"
    (directory / bucket).mkdir(parents=True, exist_ok=True)  # nanio's buckets are folders
    command = [sys.executable, "-m", "nanio", "serve", "--data-dir", str(directory), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--no-access-log", "--log-level", "error"]
    environment = {**os.environ, "NANIO_ACCESS_KEY": key, "NANIO_SECRET_KEY": secret}
    with open(directory / ".log", "ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with(os.getpid()),
        )
    try:
        _wait(endpoint, process, directory / ".log")
        reached = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_ENDPOINT_URL": endpoint}
        yield {**reached, "AWS_DEFAULT_REGION": "us-east-1"}, process
    finally:
        process.kill()
        process.wait()


def _die_with(parent: int) -> Callable[[], None]:
    """For the child, before it becomes the server: the kernel ends it when `parent` is gone, however that died (Linux)."""

    def ask() -> None:
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the line above
                os.kill(os.getpid(), signal.SIGKILL)

    return ask


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(endpoint: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}: {log.read_text()[-500:]}")
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers: 403 to a request without a signature
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server did not answer on {endpoint} within {START_S:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", default="windlass")
    parser.add_argument("--until-eof", action="store_true")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        s3_server(arguments.directory or Path(scratch), arguments.port, arguments.bucket) as (environment, process),
        contextlib.suppress(KeyboardInterrupt),
    ):
        print("".join(f"export {name}={value}\n" for name, value in environment.items()), end="", flush=True)
        if arguments.until_eof:
            sys.stdin.read()
        else:
            process.wait()


if __name__ == "__main__":
    main()
