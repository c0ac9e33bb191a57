"""Which code, packages and hosts made a checkpoint: enough to find the very lines again, nothing that is secret.

Written: the commit, branch and uncommitted diff of the repository that the command was started in (the user's code),
names of untracked files, the command line, parts of a script, Python, platform, installed packages, hosts. Not written:
environment variables, addresses of repositories and indices (they may hold credentials), the values of arguments whose name marks
them as secret, and the secrets of URLs, in arguments and in the diff. All of it is data for people; nothing in it is
ever executed or loaded.
"""

import functools
import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from windlass.safe_text import redacted

NONE: Final[Mapping[str, str]] = MappingProxyType({})
MAX_DIFF_BYTES = 1 << 20
MAX_UNTRACKED = 200
GIT_TIMEOUT_S = 20
GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false")

_SECRET = re.compile(r"(^|[._-])(token|secret|password|passwd|key|credentials?)$", re.IGNORECASE)  # by its last word


def collect_provenance(
    argv: list[str],
    hosts: list[str],
    directory: Path | None = None,
    *,
    parts: Mapping[str, str] = NONE,
    is_written: bool = True,
) -> dict[str, Any]:
    """A JSON dict. `hosts`: one name per rank or node, as the caller likes. `directory`: the user's code, else cwd. `parts`: what
    a script trains with in place of windlass's, by kind. Empty on a rank whose record is not written: it would cost each rank
    half a second."""
    if not is_written:
        return {}
    return {
        "argv": redact(argv),
        "hosts": hosts,
        "parts": dict(parts),
        "platform": platform.platform(),
        "python": sys.version,
        "packages": packages(),
        "git": git_state(directory or Path.cwd()),
    }


def redact(argv: list[str]) -> list[str]:
    """`--hub-token=abc` and `--hub-token abc` -> the name stays, the value does not; nor do the secrets of URLs."""
    result, hide_next = [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = _SECRET.search(name) is not None
        if hide_next and not argument.startswith("-"):
            result.append("[hidden]")
        elif secret and equals:
            result.append(f"{name}=[hidden]")
        else:
            result.append(redacted(argument))
        hide_next = secret and not equals and argument.startswith("-")
    return result


@functools.cache
def packages() -> dict[str, str]:
    """name -> version of everything installed when it is first asked for."""
    parsed = [one.metadata for one in importlib.metadata.distributions()]  # each use of `metadata` parses the file anew
    found = {str(one["Name"]): str(one["Version"]) for one in parsed if one["Name"]}
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit, branch, diff against it (at most 1 MiB), untracked names; None where there is no repository or no git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = redacted(_git(directory, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--submodule=short") or "")
    untracked = (_git(directory, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    return {
        "commit": commit.strip(),
        "branch": (_git(directory, "rev-parse", "--abbrev-ref", "HEAD") or "").strip(),
        "diff": diff.encode()[:MAX_DIFF_BYTES].decode(errors="ignore"),
        "diff_is_cut": len(diff.encode()) > MAX_DIFF_BYTES,
        "untracked": untracked[:MAX_UNTRACKED],
        "num_untracked": len(untracked),
    }


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints; None where it is not installed, fails or is slow: a run must not fail for want of git."""
    command = [*GIT, "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
