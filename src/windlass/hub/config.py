"""What a recipe may say about the hub: where its models and tokenizers are kept. No torch, no file touched."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError, field_validator

from windlass.errors import UserError
from windlass.settings import BrokenRule, Settings

NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class HubConfig(Settings):
    cache: str | None = None
    """Directory for what `model.from` and `data.tokenizer.from` name on the hub, instead of huggingface_hub's own
    (HF_HUB_CACHE, HF_HOME). For a cluster without a network, name a directory that compute nodes see: `windlass prepare` fills
    it on a node with a network, and with HF_HUB_OFFLINE=1 a run reads it."""

    @field_validator("cache")
    @classmethod
    def _local(cls, cache: str | None) -> str | None:
        if cache is not None and (not cache or "://" in cache):
            change = "give a local directory that every node sees as .cache"
            raise BrokenRule({"cache": cache}, "the cache is a local directory", change)
        return cache if cache is None else str(Path(cache).expanduser())

    def errors_beside(self, *names: str | None) -> Iterator[UserError]:
        """A UserError where none of `names`, the `from` of model and tokenizer, may be a name of the hub."""
        if self.cache is not None and all(name is None for name in names):
            yield UserError(
                f"hub.cache={self.cache} with neither model.from nor data.tokenizer.from",
                "it keeps what those name of the hub",
                "remove hub.cache",
            )


def revision_errors(section: str, given: str | None, revision: str | None, commit: str | None) -> Iterator[UserError]:
    """What `revision` and `commit` may not be beside `from: given`; no file is touched."""
    for key, value in (("revision", revision), ("commit", commit)):
        if value is not None and (given is None or not NAME.fullmatch(given)):
            yield UserError(
                f"{section}.{key}: {value} with {section}.from: {given}",
                "only a name of the hub (org/name) has revisions",
                f"remove {section}.{key}",
            )
    if commit is not None and not COMMIT.fullmatch(commit):
        yield UserError(
            f"{section}.commit: {commit}",
            "a commit is named by all 40 hexadecimal digits",
            f"give a branch, a tag or a short name as {section}.revision, and remove {section}.commit",
        )
    if commit is not None and revision is not None and COMMIT.fullmatch(revision) and revision != commit:
        yield UserError(
            f"{section}.revision: {revision} and {section}.commit: {commit}",
            "the commit is the one that the revision names",
            "remove one of the two",
        )


def with_hub_cache(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """`recipe` with `hub.cache` as `hub_cache` of its sections model and data.tokenizer, where these are plain mappings."""
    hub, model, data = (recipe.get(section) for section in ("hub", "model", "data"))
    try:
        cache = HubConfig.model_validate(hub).cache if isinstance(hub, Mapping) else None
    except ValidationError:  # which the section itself reports
        return dict(recipe)
    changed = dict(recipe)
    if isinstance(model, Mapping):
        changed["model"] = {**model, "hub_cache": cache}
    if isinstance(data, Mapping) and isinstance(tokenizer := data.get("tokenizer"), Mapping):
        changed["data"] = {**data, "tokenizer": {**tokenizer, "hub_cache": cache}}
    return changed
