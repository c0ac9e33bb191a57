"""Hub names of a recipe, pinned to commits: asked of the hub once, by one process; every rank and every resume uses the answer.

Settings `revision` (what the recipe asks for) and `commit` (what that was when the run began) are side by side in
resolved.yaml and in every checkpoint. A run that goes on takes the commit of its checkpoint, without a network, as long as
the recipe asks for the same revision; another revision is drift, which training/start/drift.py names.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from windlass.config import RunConfig
from windlass.data.config import TokenizerConfig
from windlass.data.prepare.prepare import planned
from windlass.errors import UserError
from windlass.hub import client as hub
from windlass.hub.config import COMMIT
from windlass.mistakes import check_is_recipe
from windlass.model.config import ModelConfig

Named = TypeVar("Named", ModelConfig, TokenizerConfig)


def keep_pins(config: RunConfig, trainer_state: Mapping[str, Any]) -> RunConfig:
    """`config` with the commits that the checkpoint's run began with, where it names the same repositories."""
    then = trainer_state["config"]
    model = _as_before(config.model, then["model"])
    tokenizer = config.data.tokenizer
    if not {"data.tokenizer.revision", "data.tokenizer.commit"} & set(config.run.accept_drift):
        tokenizer = _as_before(tokenizer, then["data"]["tokenizer"])
    return _with(config, model, tokenizer)


def _as_before(now: Named, then: Mapping[str, Any]) -> Named:
    commit = then.get("commit")
    if commit is None or now.from_ != then["from"] or now.commit not in (None, commit):
        return now
    if now.revision not in (None, commit) and COMMIT.fullmatch(now.revision):
        return now  # another commit by its full name: drift, which training/start/drift names
    revision = then["revision"] if now.revision == commit else now.revision  # the same, said by its full name
    return now.changed(commit=commit, revision=revision)


def pin_model(config: RunConfig) -> RunConfig:
    """`config` with the commit of `model.from`, whose config.json is in the cache then. Raises UserError."""
    model = config.model
    if not _is_hub(model, "model"):
        return config
    assert model.from_ is not None
    commit = hub.resolve_commit(model.from_, model.commit or model.revision, cache=config.hub.cache)
    hub.fetch_config(model.from_, commit, config.hub.cache)
    return _with(config, model.changed(commit=commit), config.data.tokenizer)


def pin_tokenizer(config: RunConfig) -> RunConfig:
    """`config` with the commit of `data.tokenizer.from`, whose files are in the cache then. Raises UserError."""
    tokenizer, model = config.data.tokenizer, config.model
    if not _is_hub(tokenizer, "data.tokenizer"):
        return config
    assert tokenizer.from_ is not None
    asked = tokenizer.commit or tokenizer.revision
    if model.commit is not None and (tokenizer.from_, asked) == (model.from_, model.revision):
        asked = model.commit  # one repository is one commit, however fast it moves
    cache = config.hub.cache
    commit = hub.resolve_commit(tokenizer.from_, asked, cache=cache)
    hub.fetch_tokenizer(tokenizer.from_, commit, cache, with_code=tokenizer.trust_remote_code is not None)
    return _with(config, model, tokenizer.changed(commit=commit))


def fingerprint(recipe: RunConfig) -> str:
    """The hash of all that decides what `recipe` prepares, 32 hexadecimal digits: sources and their contents, tokenizer, and the
    settings of `data` that shards depend on. Two recipes with one fingerprint share a preparation; `prepared.json` holds that of
    what is there. Sources are read, nothing is written, torch is not loaded. Raises UserError for sources that are not here."""
    check_is_recipe("fingerprint", recipe)
    return planned(pin_tokenizer(recipe).data, recipe.evaluate.sets).fingerprint


def fetch_base_weights(config: RunConfig) -> None:
    """The weights of a pinned `model.from`, in this host's cache. Raises UserError."""
    model = config.model
    if model.from_ is not None and model.commit is not None:
        hub.fetch_config(model.from_, model.commit, config.hub.cache)  # another host has not even that
        hub.fetch_weights(model.from_, model.commit, config.hub.cache)


def pin_lines(config: RunConfig) -> list[str]:
    """Where the files of pinned names are, a line each."""
    found = []
    for section, named in (("model", config.model), ("data.tokenizer", config.data.tokenizer)):
        if named.from_ is not None and named.commit is not None:
            setting = f"{section}.from"
            directory = hub.locate(named.from_, named.commit, setting, config.hub.cache)
            found.append(f"{setting} {named.from_}: commit {named.commit} in {directory}")
    return found


def pins(config: RunConfig) -> list[str]:
    """The overrides that hand the pins of `config` to other processes."""
    found = []
    for section, named in (("model", config.model), ("data.tokenizer", config.data.tokenizer)):
        if named.commit is not None:  # quoted: 40 digits without a letter are a number in YAML
            revision = "null" if named.revision is None else f'"{named.revision}"'
            found += [f"{section}.revision={revision}", f'{section}.commit="{named.commit}"']
    return found


def _is_hub(named: ModelConfig | TokenizerConfig, section: str) -> bool:
    if named.from_ is None:
        return False
    if hub.is_hub_name(named.from_):
        return True
    if named.revision is not None or named.commit is not None:
        raise UserError(
            f"{section}.from: {named.from_} is a directory here, and {section} has a revision",
            "a directory comes before the hub, and has no revisions",
            f"remove {section}.revision and {section}.commit, or start where there is no directory of that name",
        )
    return False


def _with(config: RunConfig, model: ModelConfig, tokenizer: TokenizerConfig) -> RunConfig:
    return config.changed(model=model, data=config.data.changed(tokenizer=tokenizer))
