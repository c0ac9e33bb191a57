"""Files at URLs: which there are, their rows, and what is wrong where a file system fails.

A file is known by its size and by the mark that its store gives it (ETag, or what fsspec makes of version and time); both are
asked again when it is opened and when it has been read.

fsspec raises FileNotFoundError for every failure of an http server, with the real error as its cause. The difference matters:
where the source does not exist, or this host has no network, a run may use what was prepared before (`AbsentSource`, see
training/preflight). A server that refuses or fails, or a missing package, is an error that somebody can fix.
"""

import errno
import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import xxhash

from windlass.data.sources.bad_rows import Row
from windlass.data.sources.formats import read_rows
from windlass.data.sources.source_files import SourceFile, all_source_rows, check_unchanged, is_remote
from windlass.errors import AbsentSource, Unavailable, UnreachableSource, UserError
from windlass.object_store import EXTRAS
from windlass.safe_text import HIDDEN, redacted, without_values

RULE: Final = "a source at a URL is read with fsspec; credentials come from the environment, as its libraries take them"
NO_NETWORK: Final = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN)
GONE: Final = (404, 410)
DENIED: Final = (401, 403)
BUSY: Final = (408, 425, 429)  # of statuses below 500, those that ask for another attempt
MARKS: Final = (
    "ETag",
    "etag",
    "versionId",
    "generation",
    "md5Hash",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
    "Last-Modified",  # these three: HTTP headers, under the names that fsspec keeps
    "Content-MD5",
    "Digest",
)


def scan_url(pattern: str, text_key: str, log: Callable[[str], None]) -> list[SourceFile]:
    """The files at a URL (a file, a directory, a glob), with size and mark. Raises UserError."""
    files, root = _attempt(pattern, lambda: _find(pattern), is_first_look=True)
    if not files:
        rule = "a source needs at least one file"
        raise AbsentSource(f"`path: {pattern}` matches no file", rule, "fix the URL")
    prefix = pattern.partition("://")[0]
    found = []
    for path, info in sorted(files.items()):
        url = path if "://" in path else f"{prefix}://{path.lstrip('/') if prefix != 'file' else path}"
        name = _bare(path).removeprefix(root).lstrip("/") or _bare(path).rpartition("/")[2]
        found.append(SourceFile(url, name, int(info.get("size") or 0), _mark(info), text_key))
    unmarked = [file for file, path in zip(found, sorted(files)) if not _marks(files[path])]
    if unmarked:
        first, more = str(unmarked[0].path), f" and {len(unmarked) - 1} more" if len(unmarked) > 1 else ""
        known = "has no ETag and no time of change there, and is known by its size alone"
        log(f"{first}{more} {known}: delete the preparation when it changes at the same size")
    return found


def _find(pattern: str) -> tuple[dict[str, Any], str]:
    import fsspec

    system, path = fsspec.url_to_fs(pattern, skip_instance_cache=True, use_listings_cache=False)
    found, root = _listed(system, path)
    # a listing may hold less than `info`, which is compared when the file is read; a web server's does
    return {name: info if _marks(info) else system.info(name) for name, info in found.items()}, root


def _listed(system: Any, path: str) -> tuple[dict[str, Any], str]:
    if any(letter in path for letter in "*["):
        found = {name: info for name, info in system.glob(path, detail=True).items() if info["type"] == "file"}
        root = path.partition("*")[0].rpartition("/")[0]
        if not found:
            system.ls(root)  # a glob passes over a folder that cannot be listed; this says why
        fixed = re.split(r"[*\[]", path)[0].rpartition("/")[0]
        return (found if "/." in path.removeprefix(fixed) else _not_hidden(found, fixed)), root
    info = system.info(path)
    if info["type"] == "file":
        return {path: info}, _bare(path).rpartition("/")[0]
    return _not_hidden(system.find(path, detail=True), path), path


def _bare(path: str) -> str:
    """Without the query, which an http server's file system alone keeps: a fresh signature is no other file."""
    return path.partition("?")[0] if "://" in path else path


def _not_hidden(found: dict[str, Any], root: str) -> dict[str, Any]:
    """Without hidden files, and those in hidden folders below `root`."""
    return {name: info for name, info in found.items() if "/." not in "/" + name.removeprefix(root)}


def _mark(info: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([info.get("size"), _marks(info)]).encode())


def _marks(info: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(info[key])) for key in MARKS if info.get(key) is not None]


def _attempt(url: str, operation: Callable[[], Any], is_first_look: bool = False) -> Any:
    """operation(), with errors of a file system or its store as a UserError that shows no secret of the URL. AbsentSource only
    during the scan: later, the file is known to differ from what was prepared."""
    try:
        return operation()
    except UserError:
        raise
    except Exception as error:  # each library has its own
        if not is_of_a_library(error):
            raise
        refused = refused_url(url, error)
        if isinstance(refused, AbsentSource) and not is_first_look:
            refused = (Unavailable if refused.retry else UserError)(*refused.args)
        raise refused from None


def url_rows(files: list[SourceFile]) -> Iterator[Row]:
    """Every row of local files and files at URLs, empty and bad ones too. Raises UserError where a file fails or has changed."""
    import fsspec

    for file in files:
        if not is_remote(file):
            yield from all_source_rows([file])
            continue
        url = str(file.path)
        system, path = _attempt(url, lambda url=url: fsspec.url_to_fs(url, skip_instance_cache=True))  # type: ignore[misc]
        check_unchanged(file, _mark(_attempt(url, lambda s=system, p=path: s.info(p))))  # type: ignore[misc]
        with _attempt(url, lambda s=system, p=path: s.open(p, "rb")) as stream:  # type: ignore[misc]
            known = file.text_key, file.kind, file.max_row_bytes, file.specials, file.shape
            rows = read_rows(stream, redacted(url), *known)
            while (row := _attempt(url, lambda r=rows: next(r, None))) is not None:  # type: ignore[misc]
                yield row
        system.invalidate_cache()
        check_unchanged(file, _mark(_attempt(url, lambda s=system, p=path: s.info(p))))  # type: ignore[misc]


def is_of_a_library(error: Exception) -> bool:
    """Whether a file system raises this: errors of the operating system, bad values, and any library's own types. Others
    (KeyError, AssertionError, ...) are bugs of windlass and keep their traceback."""
    return isinstance(error, OSError | ValueError | RuntimeError | ImportError) or type(error).__module__ != "builtins"


def refused_url(url: str, error: Exception) -> UserError:
    """The error to raise instead of `error`; an AbsentSource where the file, or the network, is not there."""
    if HIDDEN in url:
        return UserError(
            f"{url} has {HIDDEN} where its secret was",
            "the copy of a recipe that a run keeps hides the secrets of URLs",
            "give the recipe that the run began with, or write the secret as ${NAME}",
        )
    causes = list(_causes(error))
    if isinstance(error, ImportError):
        protocol = url.partition("://")[0]
        install = f"pip install 'windlass-lm[{EXTRAS[protocol]}]'" if protocol in EXTRAS else "install that package"
        return UserError(f"{url}: {error}", RULE, install)
    status = _status(causes)
    if status in GONE or (isinstance(error, FileNotFoundError) and len(causes) == 1):
        return AbsentSource(f"`path: {url}` matches no file", RULE, "fix the URL")
    if status in DENIED or any(isinstance(cause, PermissionError) for cause in causes):
        said = _said(causes) if status is None else f"status {status}"
        return UserError(f"{url} is refused to this process: {said}", RULE, "check the URL, the credentials and rights")
    if status is not None:
        change = "see what the server says of it, and try again"
        kind = Unavailable if status >= 500 or status in BUSY else UserError
        return kind(f"{url} is answered with status {status}", "a source's server gives its files", change)
    if any(_is_no_network(cause) for cause in causes):
        change = "check the host's name and the network; or copy what was prepared elsewhere to this host"
        return UnreachableSource(f"{url} cannot be reached from this host: {_said(causes)}", RULE, change)
    kind = Unavailable if any(_is_outage(cause) for cause in causes) else UserError
    return kind(f"{url}: {_said(causes)}", RULE, "check the URL, the credentials, the network and the server")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(causes: list[BaseException]) -> int | None:
    """The status of the HTTP answer among `causes`; None where there is none."""
    import aiohttp

    return next((cause.status for cause in causes if isinstance(cause, aiohttp.ClientResponseError)), None)


def _is_no_network(cause: BaseException) -> bool:
    import aiohttp

    if isinstance(
        cause, socket.gaierror | aiohttp.ConnectionTimeoutError
    ):  # no name service, or a firewall that drops packets
        return True
    return isinstance(cause, OSError) and cause.errno in NO_NETWORK


def _is_outage(cause: BaseException) -> bool:
    """No answer, or half of one: another attempt may get it."""
    import aiohttp

    return isinstance(
        cause, ConnectionError | TimeoutError | aiohttp.ClientConnectionError | aiohttp.ClientPayloadError
    )


def _said(causes: list[BaseException]) -> str:
    """The message of the first cause that says more than the URL."""
    cause = causes[1] if isinstance(causes[0], FileNotFoundError) and len(causes) > 1 else causes[0]
    return without_values(str(cause).splitlines()[0]) if str(cause) else type(cause).__name__
