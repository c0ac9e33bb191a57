"""An object store or any other store with a URL, through fsspec: whole files in and out, each within a deadline.

fsspec speaks s3://, gs://, http(s)://, file://, memory:// and more, and takes credentials and endpoints from the
environment, as each library of its own does (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...). What it does not promise is an
end: a server that accepts and never answers, or dies in the middle, can block a call for ever. So every operation runs in
a thread of its own and is waited for until the deadline, which covers all attempts (pauses of 0.25, 0.5, 1, ... s
between them); a thread that is stuck is left behind, and does not keep the process from ending.

What cannot get better is not tried again: a file or bucket that is not there (FileNotFoundError), credentials that are
refused, a protocol without its package, a full disk. Messages name the URL, never what a URL may carry besides: user,
password, query.
"""

import contextlib
import errno
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from windlass.errors import Unavailable, UserError
from windlass.safe_text import redacted
from windlass.signals import TooLate, in_time

EXTRAS: Final = {"s3": "s3", "s3a": "s3"}  # protocol -> extra of windlass that reads it; fsspec names any other package
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
PROBE: Final = ".windlass-probe"
Result = TypeVar("Result")

# by protocol: options of its file system. s3fs: one attempt of botocore's per attempt of ours, so that the deadline
# decides; file: folders are made, as a store has none.
OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"retries": {"max_attempts": 0}}, "default_block_size": 32 << 20},
    "file": {"auto_mkdir": True},
}
DENIED = ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError")


def is_url(given: str) -> bool:
    return "://" in given


class Store:
    """Files below `url`, named relative to it. Every method raises UserError, with the URL, where the store fails.

    `file_timeout_s`: of one file, all attempts together; `setting`: the key of a recipe that sets it, for messages.
    `bytes_per_s`: a file's size over this is added, so that no large file is too late; 0 for none."""

    def __init__(
        self, url: str, file_timeout_s: float, setting: str | None = "data.cache.deadline_s", bytes_per_s: float = 0.0
    ):
        import fsspec

        self.url, self.file_timeout_s = redacted(url.rstrip("/")), file_timeout_s
        self._setting, self._bytes_per_s = setting, bytes_per_s
        protocol = url.partition("://")[0]
        rule = "this is a local directory or a URL that fsspec opens (s3://, gs://, https://, file://)"
        try:
            options = OPTIONS.get(protocol, {})
            found: tuple[Any, str] = fsspec.url_to_fs(
                url, skip_instance_cache=True, use_listings_cache=False, **options
            )
        except ImportError as error:
            package = f"install it: pip install 'windlass-lm[{EXTRAS[protocol]}]'" if protocol in EXTRAS else str(error)
            raise UserError(f"{self.url}: the package for {protocol}:// is not installed", rule, package) from None
        except (ValueError, OSError) as error:
            raise UserError(f"{self.url}: {error}", rule, "fix the URL") from None
        self._fs, self._root = found[0], found[1].rstrip("/")
        self.is_read_only = protocol in ("http", "https")

    def check_writable(self) -> None:
        """Raises UserError where files are read only, by the protocol."""
        if self.is_read_only:
            rule = "windlass writes where it can write files: s3://, gs://, file://, a local directory"
            change = "give such a directory; prepared data may be prepared elsewhere, and served by this URL"
            raise UserError(f"{self.url} is read only here", rule, change)

    def check_takes_files(self) -> None:
        """Writes a small file, and removes it."""
        self.write(PROBE, b"windlass")
        self.remove([PROBE])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError where there is none (or no such bucket)."""
        data: bytes = self._attempt(name, lambda: self._fs.cat_file(self._path(name)))
        return data

    def write(self, name: str, source: bytes | Path) -> None:
        """The file is there, whole, when this returns; what had the name is replaced."""
        self.check_writable()
        num_bytes = len(source) if isinstance(source, bytes) else source.stat().st_size

        def put() -> None:
            if isinstance(source, bytes):
                self._fs.pipe_file(self._path(name), source)
            else:
                self._fs.put_file(str(source), self._path(name))
            self._fs.invalidate_cache()
            found = self._fs.info(self._path(name))["size"]
            if found != num_bytes:
                raise OSError(f"{found} of {num_bytes} bytes arrived")

        try:
            self._attempt(name, put, num_bytes)
        except FileNotFoundError as error:
            rule = "windlass makes files, not buckets"
            raise UserError(f"{self.url}/{name} cannot be written: {error}", rule, "make it") from None

    def download(self, name: str, target: Path, num_bytes: int) -> None:
        """The whole file of `num_bytes`, at `target`. Raises FileNotFoundError where there is none."""
        self._attempt(name, lambda: self._fs.get_file(self._path(name), str(target)), num_bytes)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:

            def remove(path: str = self._path(name)) -> None:
                with contextlib.suppress(FileNotFoundError):  # an attempt before this one got through after all
                    self._fs.rm_file(path)

            self._attempt(name, remove)

    def sizes(self) -> dict[str, int]:
        """Every file below the URL, by its relative name -> bytes. Empty where there is none."""

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
            return {path[len(self._root) :].lstrip("/"): int(info["size"]) for path, info in found.items()}

        try:
            return self._attempt("", find)
        except FileNotFoundError:
            return {}

    def _attempt(self, name: str, operation: Callable[[], Result], num_bytes: int = 0) -> Result:
        """operation() on `num_bytes`, again after what may pass, until the deadline."""
        where = f"{self.url}/{name}".rstrip("/")
        timeout_s = self.file_timeout_s + (num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0)
        end_s, pause_s, last = time.monotonic() + timeout_s, FIRST_PAUSE_S, "no answer"
        while True:
            try:
                return in_time(operation, end_s - time.monotonic())
            except FileNotFoundError:
                raise
            except TooLate:
                break
            except Exception as error:  # each library has its own; what passes is known by trying again
                self._raise_if_final(where, error)
                last = f"{type(error).__name__}: {error}".rstrip(": ")
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
        raise Unavailable(
            f"{where} failed for {timeout_s:g} s{f' ({self._setting})' if self._setting else ''}; last: {last}",
            "a store answers within the deadline, all attempts together",
            "see that the store runs and is reached from this host"
            + (f"; raise {self._setting} for a slow one" if self._setting else ""),
        )

    def _raise_if_final(self, where: str, error: Exception) -> None:
        given = f"{where}: {error}"
        if isinstance(error, PermissionError) or type(error).__name__ in DENIED:
            rule = "the store lets this process in: credentials come from the environment, as fsspec takes them"
            change = "check the credentials and rights (s3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
            raise UserError(given, rule, change) from None
        if isinstance(error, NotImplementedError):
            rule = "windlass writes where files can be written"
            raise UserError(
                f"{where} cannot be written by this protocol", rule, "give another directory or URL"
            ) from None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise UserError(given, "this needs room to write", "free space, or give another directory or URL") from None
