"""What huggingface_hub raises, in a UserError's three sentences: what was refused, the hub's rule, what to do. No torch.

The hub answers 401 for a repository that is not there, since it does not show strangers what is private; and 401 or 403 with
`X-Error-Code: GatedRepo` for one whose owner admits accounts one by one. What has no code of the hub's is an outage, and is
distinguished: then the cache may help.
"""

import errno
from pathlib import Path
from typing import Final

from windlass.errors import Unavailable, UserError, nearest_entry

MAIN: Final = "main"  # the hub's name of the default branch
SHOWN: Final = 12  # digits of a commit in a sentence


def cache_directory(cache: str | None = None) -> str:
    from huggingface_hub import constants

    return cache or constants.HF_HUB_CACHE


def is_outage(error: BaseException | None) -> bool:
    """Whether the hub gave no answer, or none of its own (a server's failure), as against a refusal."""
    from httpx2 import TransportError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return isinstance(error, TransportError | OfflineModeIsEnabled)


def hub_reason(error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, HfHubHTTPError):
        return f"it answered {error.response.status_code}"
    return f"{type(error).__name__}: {str(error) or 'no answer'}"


def refused(
    error: BaseException, name: str, revision: str | None, file: str | None = None, cache: str | None = None
) -> UserError:
    """What huggingface_hub raised, in three sentences."""
    from huggingface_hub import constants, errors, get_token

    page, has_token = f"{constants.ENDPOINT}/{name}", get_token() is not None
    match error:
        case errors.GatedRepoError():
            sent = "the token that was sent has no access" if has_token else "no token was sent"
            remedy = "with the token's account" if has_token else "then set HF_TOKEN, or run `hf auth login`"
            return UserError(
                f"{name} is gated, and {sent} ({error.response.status_code})",
                "the owner of a gated repository admits accounts, and the hub knows an account by its token",
                f"ask for access on {page}, {remedy}",
            )
        case errors.RepositoryNotFoundError():
            hidden = "; a private one is not shown to this token" if has_token else "; a private one needs a token"
            return UserError(
                f"the hub has no repository {name}{hidden} ({error.response.status_code})",
                "a hub name is `org/name`, as in the address of its page",
                f"{nearest_entry(Path(name))}look at {page}"
                + ("" if has_token else "; for a private one set HF_TOKEN, or run `hf auth login`"),
            )
        case errors.RevisionNotFoundError():
            return UserError(
                f"{name} has no revision {revision}",
                "a revision is a branch, a tag or a full commit of that repository",
                f"choose one of {page}/tree/main, or leave it out for main",
            )
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return UserError(
                f"{name}: the hub refuses ({error.response.status_code}): {error.server_message or 'no reason given'}",
                "a token is valid and may read the repository" if has_token else "what is not public needs a token",
                "set HF_TOKEN to a valid token, or run `hf auth login`",
            )
        case errors.HFValidationError():
            return UserError(f"{name} is not a hub name: {error}", "a hub name is `org/name`", "fix the name")
        case _ if is_outage(error):
            return unreachable(error, name, revision, file, cache)
        case OSError() if error.errno is not None and not isinstance(error, errors.HfHubHTTPError):
            return _unwritable(error, name, file, cache)
    said = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(
        f"{name}: {constants.ENDPOINT} does not answer as a hub does: {said[0]}",
        "a hub name is fetched from the hub, or from the mirror that HF_ENDPOINT names",
        "try again; check HF_ENDPOINT and the proxy; or give a local directory",
    )


def not_pushed(error: BaseException, name: str, directory: Path) -> UserError:
    """What huggingface_hub raised while `directory` was pushed. The repository is as it was: a commit is its last act."""
    from huggingface_hub import constants, errors

    page, again = f"{constants.ENDPOINT}/{name}", f"{directory} is whole: hf upload {name} {directory}"
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # of a large file
        error = error.__cause__
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    said = (error.server_message if isinstance(error, errors.HfHubHTTPError) else None) or "no reason given"
    if status in (401, 403, 404):
        return UserError(
            f"{name}: the hub does not let this token write ({status}): {said}",
            "a push needs a token of the kind `write`, or a fine-grained one for that repository, from an account that may "
            "write there",
            f"fix the token (HF_TOKEN, or `hf auth login`) or the name; {again}",
        )
    if status == 409:
        return UserError(
            f"{name}: the hub reports a conflict (409): {said}",
            "one commit at a time changes a repository",
            f"look at {page} for what else writes there, then push again; {again}",
        )
    if is_outage(error):
        return Unavailable(
            f"{name} was not pushed: {constants.ENDPOINT} does not take it ({hub_reason(error)})",
            "a push ends with one commit, and before it the repository is as it was",
            f"try again where that address can be reached; {again}",
        )
    if isinstance(error, OSError) and status is None and error.errno is not None:
        return UserError(
            f"{name} was not pushed: {error.filename or directory}: {error.strerror}",
            "every file of the export is read while it is uploaded",
            "fix the disk or the permissions, and export again",
        )
    what = (
        f"({status}): {said}" if status is not None else (str(error).strip().splitlines() or [type(error).__name__])[0]
    )
    return UserError(f"{name} was not pushed: {what}", "the hub takes what is pushed, or says why not", again)


def _unwritable(error: OSError, name: str, file: str | None, cache: str | None) -> UserError:
    setting = "HF_HOME" if cache is None else "hub.cache"
    remedy = f"set {setting} to a directory of this user"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"make room there (`hf cache prune`), or set {setting} to a larger disk; whole files stay"
    return UserError(
        f"{name}: {file or 'its files'}: {error.strerror}: {error.filename or cache_directory(cache)}",
        f"the files of a hub name are kept in this host's cache, {cache_directory(cache)}",
        remedy,
    )


def unreachable(
    error: BaseException, name: str, revision: str | None, file: str | None = None, cache: str | None = None
) -> UserError:
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    near = nearest_entry(Path(name))  # a directory may be meant
    what = f"{file} of {name} ({(revision or MAIN)[:SHOWN]})"
    if file is None:
        what = f"{name} ({revision or MAIN})"
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(
            f"{what} is not in the cache {cache_directory(cache)}, and HF_HUB_OFFLINE is set",
            "offline, windlass reads only what was fetched before",
            f"{near}run `windlass prepare RECIPE` where there is a network and with the same cache (`hub.cache` of the recipe, "
            "or HF_HUB_CACHE): it fetches weights and tokenizer; or unset HF_HUB_OFFLINE",
        )
    return Unavailable(
        f"{what} is not in the cache {cache_directory(cache)}, and {constants.ENDPOINT} does not give it ({hub_reason(error)})",
        "a hub name is fetched from the hub, or from the mirror that HF_ENDPOINT names",
        f"{near}try again where that address can be reached: whole files stay in the cache; or give a local directory"
        + ("" if file is None else "; or set HF_HUB_OFFLINE=1 where `windlass prepare` has brought all that there is"),
    )


def repository_renamed(name: str, now: str) -> UserError:
    return UserError(
        f"{name} is called {now} now",
        "a recipe holds the name that the hub knows: an old one may be taken by somebody else",
        f"write {now}",
    )
