"""What to prepare: every source scanned, and what a preparation is recognised by."""

import datetime
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.curate.filters import Filters
from windlass.data.prepare.fingerprint import (
    corpus_hash,
    preparation_fingerprint,
    settings_of,
    stream_fingerprint,
    without_bad_rows,
)
from windlass.data.sources.bad_rows import BadRows
from windlass.data.sources.config import HELD
from windlass.data.sources.growing import what_changed
from windlass.data.sources.hub import commit_of
from windlass.data.sources.known_hashes import KnownHashes
from windlass.data.sources.scan import scan, scan_texts
from windlass.data.sources.source_files import ListedTexts, SourceFile
from windlass.data.tokenize import tokenizer
from windlass.data.tokenize.fill_in_middle import middles_of
from windlass.data.tokenize.template_files import check_has_template, reads_clock
from windlass.data.tokens.documents import IdVocabulary
from windlass.data.tokens.token_files import id_vocabulary, scan_tokens
from windlass.errors import UserError


class PreparePlan(NamedTuple):
    """What to prepare, and from what."""

    config: DataConfig
    sets: Mapping[str, SourceConfig]
    files: Mapping[str, list[SourceFile]]
    """The files of every source, by its use: sources.0, validation, sets.NAME; and sources.0.decontaminate."""
    loaded: list[Path]
    """The tokenizer's files, where one is given."""
    log: Callable[[str], None]
    written_order: dict[str, dict[str, str]]
    """Files and hashes read from each source that grows, by its use; filled while they are read."""
    bad_rows: dict[str, BadRows]
    """What was found of each source, by its use; filled while they are read."""
    filters: dict[str, Filters]
    """The filters of each source that has some, by its use, with what they removed; filled while sources are read."""
    vocabulary: IdVocabulary | None = None
    """What ids mean, where a source holds some."""
    date: str | None = None
    """The day that the chat template sees as today; None where no template writes it (`dated`)."""

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.config, self.sets)

    @property
    def fingerprint(self) -> str:
        return preparation_fingerprint(self.settings, self.files, self.loaded, self.date)

    @property
    def stream(self) -> str:
        return stream_fingerprint(self.settings, self.files, self.loaded, self.date)

    @property
    def work(self) -> str:
        """The fingerprint of what was fetched and encoded before: all of it stays where more bad rows are allowed."""
        return preparation_fingerprint(without_bad_rows(self.settings), self.files, self.loaded, self.date)

    @property
    def named(self) -> dict[str, SourceConfig]:
        return _named(self.config, self.sets)

    @property
    def corpus_hash(self) -> str:
        return corpus_hash(self.training_files)

    @property
    def training_files(self) -> list[SourceFile]:
        return [file for name in self.named if name.startswith("sources.") for file in self.files[name]]

    def what_changed(self, written_order: Mapping[str, Mapping[str, str]]) -> str | None:
        """The first file of a source that grew that is not as it was when it was read, if any."""
        found = (what_changed(self.named[name], taken) for name, taken in written_order.items())
        return next(filter(None, found), None)

    @property
    def commits(self) -> dict[str, str]:
        found = {_pin(source): commit_of(self.files[name][0]) for name, source in self.named.items() if source.hub}
        return {pin: commit for pin, commit in found.items() if commit is not None}


def scan_sources(
    config: DataConfig,
    sets: Mapping[str, SourceConfig],
    log: Callable[[str], None],
    commits: Mapping[str, str],
    hashes: KnownHashes,
) -> PreparePlan:
    """Every source scanned, once the tokenizer is known to be one. `commits`: those to use of the hub's datasets; `hashes`: those
    of local files that need not be read. Raises UserError."""
    named = _named(config, sets)
    loaded = tokenizer.tokenizer_files(config.tokenizer) if config.tokenizer.from_ is not None else []
    if any(source.format == "chat" for source in named.values()):
        check_has_template(loaded, str(config.tokenizer.from_))
    for source in config.sources:
        middles_of(source.fill_in_middle, loaded)
    for name, source in sets.items():
        if source.fill_in_middle is not None:
            rule = "a loss is measured on texts as they are; only training documents have their middle moved"
            raise UserError(f"evaluate.sets.{name}.fill_in_middle", rule, "take it out")
    of_tokens = [source for source in named.values() if source.format == "tokens"]
    vocabulary = id_vocabulary(config.tokenizer, loaded, of_tokens[0]) if of_tokens else None
    files = {
        name: scan_tokens(source, hashes)
        if source.format == "tokens"
        else scan(source, log, commits.get(_pin(source)), hashes)
        for name, source in named.items()
    }
    filters = dict[str, Filters]()
    for name, source in named.items():
        if source.filters is not None:
            avoided = source.filters.decontaminate
            where = f"filters.decontaminate of {source.label}"
            of_texts = scan_texts(where, avoided.path, avoided.text, log, hashes) if avoided else []
            filters[name] = Filters(source.filters, source.label, ListedTexts(tuple(of_texts)))
            if of_texts:
                files[f"{name}.decontaminate"] = of_texts  # decides what is on disk
    return PreparePlan(config, sets, files, loaded, log, {}, {}, filters, vocabulary)


def dated(plan: PreparePlan, kept: Iterable[tuple[str, str | None]]) -> PreparePlan:
    """The plan with its date. A template that writes the date of the day would make other shards of the same sources tomorrow. So
    the day on which a preparation begins is part of it. `kept`: (fingerprint or stream, date) of what is there, finished or not:
    where all else is equal, its date stays."""
    named = plan.named.values()
    if not any(source.format in HELD for source in named) or not reads_clock(plan.loaded):
        return plan
    for known, date in kept:
        found = plan._replace(date=date)
        if date is not None and known in (found.fingerprint, found.stream, found.work):
            return found
    return plan._replace(date=_today())


def _today() -> str:
    return datetime.date.today().isoformat()


def _named(config: DataConfig, sets: Mapping[str, SourceConfig]) -> dict[str, SourceConfig]:
    """Every source by its use."""
    named = {f"sources.{number}": source for number, source in enumerate(config.sources)}
    if isinstance(config.validation, SourceConfig):
        named["validation"] = config.validation
    return named | {f"sets.{name}": source for name, source in sets.items()}


def _pin(source: SourceConfig) -> str:
    return f"{source.hub}@{source.revision or 'main'}"
