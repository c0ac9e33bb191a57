"""Models and tokenizers by hub name (`org/name`): fetched once per host, pinned to a commit, read from the cache. No torch.

A branch or tag moves; a commit does not. `resolve_commit` asks the hub which commit a revision is, the recipe's resolved form
keeps it, and everything later names the commit. `fetch_*` brings the few files of that commit that are needed: never pickled
weights, never other formats, never code of a model. An outage is never taken for a file that is not there. `locate` answers
from the cache alone, so the ranks of a run never touch the network. `cache` is a directory for them (`hub.cache` of the
recipe), in place of huggingface_hub's own.

huggingface_hub does the work: its cache (one file per content, locked, so that two processes download once), its tokens
(HF_TOKEN, `hf auth login`), its mirrors (HF_ENDPOINT), its offline mode (HF_HUB_OFFLINE), its reconnecting: a connection
that dies goes on from the last 10 MB, five times in a row. What a killed process had of a file is lost; whole files stay.
What it raises becomes a UserError in hub/errors.py.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final

from windlass.errors import UserError
from windlass.hub.config import COMMIT, NAME
from windlass.hub.errors import (
    MAIN,
    SHOWN,
    cache_directory,
    hub_reason,
    is_outage,
    refused,
    repository_renamed,
    unreachable,
)
from windlass.units import MIB, format_bytes

CONFIG: Final = "config.json"
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")
TOKENIZER_BESIDE: Final = ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
INDEX_BYTES: Final = 256 * MIB  # a bound, not a target: 10 MB name the tensors of the largest published models
DOWNLOADS: Final = 8  # files at a time, as huggingface_hub's own snapshot_download
GENERATION: Final = "generation_config.json"
CARD: Final = "README.md"
ANSWER_S: Final = 30.0  # how long the hub may take to say what a repository is
Report = Callable[[str], None]


def is_hub_name(given: str) -> bool:
    """Whether `given` has the form org/name and nothing here is called so: a directory comes first, as in transformers."""
    return NAME.fullmatch(given) is not None and not Path(given).exists()


def locate(given: str, revision: str | None, setting: str, cache: str | None = None) -> Path:
    """The local directory that `setting` names: itself, or a hub name's files in the cache. No network. Raises UserError."""
    if not is_hub_name(given):
        return Path(given).expanduser()
    commit = _known_commit(given, revision, cache)
    paths = [_cached(given, commit, file, cache) for file in (CONFIG, *TOKENIZER)] if commit is not None else []
    for path in paths:
        if path is not None:
            return path.parent
    raise UserError(
        f"{setting}: {given} ({revision or MAIN}) is neither a directory here nor in the cache of the hub, "
        f"{cache_directory(cache)}",
        "a hub name is fetched once per host, before ranks start",
        "start with `windlass train` or `windlass prepare`, which fetch it; or give a directory",
    )


def resolve_commit(name: str, revision: str | None, report: Report = print, cache: str | None = None) -> str:
    """The commit that `revision` (a branch, a tag or a commit; None: main) of `name` is now. Where the hub cannot be reached,
    what the cache knows of it, and `report` says so. Raises UserError."""
    if (
        revision is not None
        and COMMIT.fullmatch(revision)
        and any(_cached(name, revision, f, cache) for f in (CONFIG, *TOKENIZER))
    ):
        return revision  # it cannot have moved
    from httpx2 import TransportError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    hub = HfApi(library_name="windlass")
    try:
        info = hub.model_info(name, revision=revision, timeout=ANSWER_S)
        if info.id != name:
            raise repository_renamed(name, str(info.id))
        found = hub.resolve_revision(name, revision=revision, cache_dir=cache)
        commit = str(found.resolved)  # which the cache then remembers
    except (TransportError, OfflineModeIsEnabled, HfHubHTTPError, ValueError) as error:
        if not is_outage(error):
            raise refused(error, name, revision, cache=cache) from None
        known = _known_commit(name, revision, cache)
        if known is None:
            raise unreachable(error, name, revision, cache=cache) from None
        report(
            f"{name}: the hub was not asked ({hub_reason(error)}); {revision or MAIN} is {known[:SHOWN]} in the cache"
        )
        return known
    return commit


def resolve_dataset(name: str, revision: str | None, report: Report = print) -> str:
    """The commit of a dataset's revision. Raises UserError."""
    from httpx2 import TransportError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionResolutionError

    hub = HfApi(library_name="windlass")
    try:
        info = hub.dataset_info(name, revision=revision, timeout=ANSWER_S)
        if info.id != name:
            raise repository_renamed(name, str(info.id))
        return str(hub.resolve_revision(name, repo_type="dataset", revision=revision).resolved)
    except (TransportError, OfflineModeIsEnabled, HfHubHTTPError, ValueError) as error:
        if not is_outage(error):
            raise refused_dataset(error, name, revision) from None
        try:
            found = hub.resolve_revision(name, repo_type="dataset", revision=revision, local_files_only=True)
        except RevisionResolutionError:
            raise refused_dataset(error, name, revision) from None
        known = str(found.resolved)
        report(
            f"{name}: the hub was not asked ({hub_reason(error)}); {revision or MAIN} is {known[:SHOWN]} in the cache"
        )
        return known


def refused_dataset(error: BaseException, name: str, revision: str | None) -> UserError:
    """What kept a dataset from being read."""
    return refused(error, f"datasets/{name}", revision)


def fetch_config(name: str, commit: str, cache: str | None = None) -> None:
    """config.json, and what an export takes over: generation_config.json and the card, for its license. Raises UserError."""
    if _fetch(name, commit, CONFIG, cache) is None:
        raise _lacks(name, commit, CONFIG, "a model has one beside its weights", "name a repository that holds a model")
    for file in (GENERATION, CARD):
        _fetch(name, commit, file, cache, optional=True)


def fetch_weights(name: str, commit: str, cache: str | None = None) -> None:
    """The safetensors files: one, or those that the index names. Raises UserError."""
    if _fetch(name, commit, SINGLE, cache) is not None:
        return
    index = _fetch(name, commit, INDEX, cache)
    if index is None:
        raise _no_weights(name, commit)
    shards = indexed_files(
        index, f"{name}: {INDEX} of {commit[:SHOWN]}", "report it to its owner, or take another revision"
    )
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        paths = pool.map(lambda file: _fetch(name, commit, file, cache), shards)
        absent = [shard for shard, path in zip(shards, paths) if path is None]
    if absent:
        raise _lacks(name, commit, ", ".join(absent), f"{INDEX} names {len(shards)} files", "take another revision")


def fetch_tokenizer(name: str, commit: str, cache: str | None = None, *, with_code: bool = False) -> None:
    """tokenizer.json, tokenizer_config.json and what may be beside them (the model's configs may know how a text ends);
    `with_code`: Python files too. Raises UserError."""
    for file in TOKENIZER:
        if _fetch(name, commit, file, cache) is None and not (with_code and file == TOKENIZER[0]):
            raise _lacks(
                name,
                commit,
                file,
                f"a tokenizer is {' and '.join(TOKENIZER)}",
                "write both with AutoTokenizer.from_pretrained(...).save_pretrained(directory), and give that directory",
            )
    for file in (*TOKENIZER_BESIDE, CONFIG, GENERATION):
        _fetch(name, commit, file, cache, optional=True)
    if with_code:
        for file in _files(name, commit):
            if "/" not in file and file.endswith((".json", ".py", ".model", ".txt", ".tiktoken")):
                _fetch(name, commit, file, cache)


def indexed_files(index: Path, named: str, change: str) -> list[str]:
    """The safetensors files that an index names. It comes from elsewhere, so it names nothing outside its own directory.
    `named`: the index, for messages. Raises UserError."""
    if (size := index.stat().st_size) > INDEX_BYTES:
        raise UserError(
            f"{named} has {format_bytes(size)}", f"an index has at most {format_bytes(INDEX_BYTES)}", change
        )
    try:
        names = list(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        rule = "the index is JSON with a `weight_map` from tensor to file"
        raise UserError(f"{named}: {error!r}", rule, change) from None
    for name in names:
        if not isinstance(name, str) or not _is_inside(name):
            raise UserError(
                f"{named}: its weight_map names {name!r}",
                "an index names files that end in .safetensors and are in its own directory",
                change,
            )
    return sorted(set(names))


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and not path.is_absolute() and ".." not in path.parts
    return plain and path.suffix == ".safetensors"


def _fetch(name: str, commit: str, file: str, cache: str | None, *, optional: bool = False) -> Path | None:
    """The file in the cache, downloaded where it is not there; None where the repository has none, which the cache remembers.
    Offline, an `optional` file that was never asked for counts as none; a hub that fails to answer is an error."""
    from httpx2 import TransportError
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RemoteEntryNotFoundError

    known = try_to_load_from_cache(name, file, cache, commit)
    if known is not None:
        return Path(known) if isinstance(known, str) else None
    try:
        return Path(hf_hub_download(name, file, revision=commit, library_name="windlass", cache_dir=cache))
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError as error:  # what kept it from the hub is its cause
        if optional and isinstance(error.__cause__, OfflineModeIsEnabled):
            return None
        raise refused(error.__cause__ or error, name, commit, file, cache) from None
    except (
        TransportError,
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # the hub's errors are OSErrors, xet's RuntimeErrors
        raise refused(error, name, commit, file, cache) from None


def _cached(name: str, commit: str, file: str, cache: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, file, cache, commit)
    return Path(path) if isinstance(path, str) else None


def _known_commit(name: str, revision: str | None, cache: str | None) -> str | None:
    """The commit of a revision as the cache has it."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    try:
        found = HfApi().resolve_revision(name, revision=revision, local_files_only=True, cache_dir=cache)
        return str(found.resolved)
    except RevisionResolutionError:
        return None


def _files(name: str, commit: str) -> list[str]:
    """Names of all files of a commit. Raises UserError."""
    from httpx2 import TransportError
    from huggingface_hub import HfApi

    try:
        return HfApi(library_name="windlass").list_repo_files(name, revision=commit)
    except (TransportError, OSError) as error:
        raise refused(error, name, commit) from None


def _lacks(name: str, commit: str, file: str, rule: str, change: str) -> UserError:
    return UserError(f"{name} ({commit[:SHOWN]}) has no {file}", rule, change)


def _no_weights(name: str, commit: str) -> UserError:
    pickled = [file for file in _files(name, commit) if file.endswith(PICKLED) and "/" not in file]
    if not pickled:
        return _lacks(
            name, commit, f"{SINGLE} and no {INDEX}", "weights are read from one of these", "name another one"
        )
    return UserError(
        f"{name} ({commit[:SHOWN]}) has pickled weights only: {', '.join(pickled[:3])}",
        "unpickling runs whatever code the file holds, so only safetensors are read",
        f"look for a safetensors version under {name}'s pull requests on the hub (`revision: refs/pr/N`); or convert it where "
        f"you trust it: AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained(DIRECTORY), and give that directory",
    )
