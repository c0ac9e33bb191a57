"""What a URL's file system raised -> what is wrong: nothing is there, no network, no package, refused, or not answering.

fsspec says FileNotFoundError for every failure of an http server, and keeps what happened as its cause. The difference counts:
where a source is truly not here, or this host has no network, a run may take what was prepared of it before (`AbsentSource`,
see training/preflight); a server that refuses or fails, or a package that is missing, is an error that somebody can mend.
"""

import errno
import socket
from collections.abc import Iterator
from typing import Final

from windlass.data.shards.store import EXTRAS, shown
from windlass.errors import AbsentSource, UserError

RULE: Final = "a source at a URL is read with fsspec; credentials come from the environment, as its libraries take them"
NO_NETWORK: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
GONE: Final = (404, 410)
DENIED: Final = (401, 403)


def is_of_a_library(error: Exception) -> bool:
    """Whether a file system raises such: what the system refuses, bad values, and any library's own kinds. The rest (KeyError,
    AssertionError, ...) is a mistake of ours, and keeps its traceback."""
    return isinstance(error, OSError | ValueError | RuntimeError | ImportError) or type(error).__module__ != "builtins"


def refused_url(url: str, error: Exception) -> UserError:
    """The error to raise instead of `error`; an AbsentSource where the file, or the network, is not there."""
    where, causes = shown(url), list(_causes(error))
    if isinstance(error, ImportError):
        protocol = url.partition("://")[0]
        install = f"pip install 'windlass[{EXTRAS[protocol]}]'" if protocol in EXTRAS else "install that package"
        return UserError(f"{where}: {shown(str(error))}", RULE, install)
    status = _status(causes)
    if status in GONE or (isinstance(error, FileNotFoundError) and len(causes) == 1):
        return AbsentSource(f"`path: {where}` matches no file", RULE, "mend the URL")
    if status in DENIED or any(isinstance(cause, PermissionError) for cause in causes):
        said = _said(causes) if status is None else f"status {status}"
        return UserError(
            f"{where} is refused to this process: {said}", RULE, "check the URL, the credentials and rights"
        )
    if status is not None:
        change = "see what the server says of it, and try again"
        return UserError(f"{where} is answered with status {status}", "a source's server gives its files", change)
    if any(_is_no_network(cause) for cause in causes):
        change = "check the host's name and the network; or copy what was prepared elsewhere to this host"
        return AbsentSource(f"{where} cannot be reached from this host: {_said(causes)}", RULE, change)
    return UserError(f"{where}: {_said(causes)}", RULE, "check the URL, the credentials, the network and the server")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(causes: list[BaseException]) -> int | None:
    """Of an http answer."""
    import aiohttp

    return next((cause.status for cause in causes if isinstance(cause, aiohttp.ClientResponseError)), None)


def _is_no_network(cause: BaseException) -> bool:
    import aiohttp

    if isinstance(cause, socket.gaierror | aiohttp.ConnectionTimeoutError):  # no name service, or a wall that swallows
        return True
    return isinstance(cause, OSError) and cause.errno in NO_NETWORK


def _said(causes: list[BaseException]) -> str:
    """What happened, in the words of the first that has more to say than the URL."""
    telling = causes[1] if isinstance(causes[0], FileNotFoundError) and len(causes) > 1 else causes[0]
    return shown(str(telling)).splitlines()[0] if str(telling) else type(telling).__name__
