"""What to prepare: every source scanned, and the documents of every set chosen.

Documents are read more than once (hash, count, tokenizer, ids); reading costs a hundredth of encoding. So rows that are not on
this host, of a dataset of the hub or of files at a URL, are fetched once, beside the preparation. Only a training set that is
trained on while it grows is read as its documents arrive (`fetch.Stream`). Nothing that needs all of them works there: the
validation share is of the first documents, duplicates stay, the tokenizer must be given.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.curate.filters import Filters
from windlass.data.held_out import HeldOutConfig
from windlass.data.prepare.chunked_sets import ChunkedSets
from windlass.data.prepare.fingerprint import (
    corpus_hash,
    preparation_fingerprint,
    settings_of,
    stream_fingerprint,
    without_bad_rows,
)
from windlass.data.prepare.hold_out import validation_of
from windlass.data.sources.bad_rows import BadRows, Report, judge
from windlass.data.sources.config import DEFAULT_SPLIT, HELD
from windlass.data.sources.fetch import Stream, fetch
from windlass.data.sources.growing import Patience, what_changed
from windlass.data.sources.hub import commit_of, split_names
from windlass.data.sources.known_hashes import KnownHashes
from windlass.data.sources.scan import scan, scan_texts
from windlass.data.sources.select import Amount, Selection, check_not_empty, duplicates, select
from windlass.data.sources.source_files import ListedTexts, Source, SourceFile, is_remote, source_of_files
from windlass.data.tokenize import tokenizer
from windlass.data.tokenize.fill_in_middle import middles_of
from windlass.data.tokenize.pool import TaskRunner
from windlass.data.tokenize.template_files import check_has_template, reads_clock, special_tokens
from windlass.data.tokens.documents import IdVocabulary, stored_documents
from windlass.data.tokens.token_files import id_vocabulary, scan_tokens
from windlass.errors import UserError

COUNTS_NAME: Final = ".counts"
FETCHED_NAME: Final = "fetched"
DEFAULT_SHARE: Final = 0.02  # held out where a dataset lacks the split that was asked for


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
    """Those of each source that has some, by its use, with what they removed; filled while they are read."""
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


def choose_documents(
    plan: PreparePlan,
    work: Path,
    runner: TaskRunner,
    tick: Callable[[], None] = lambda: None,
    counts: Path | None = None,
) -> tuple[dict[str, Selection], dict[str, list[Amount]], ChunkedSets]:
    """The documents of every set, and how many; and what workers read of them, in processes of `runner`. Sources that are not
    local are fetched, or, for a growing set, read as they arrive; `tick` is called while waiting. What was found by reading all
    is kept in `work`; or in `counts`, by a part, which reads no more than it needs to encode chunks. Raises UserError."""
    config, files, log = plan.config, plan.files, plan.log
    named = plan.named
    share = config.validation if isinstance(config.validation, float) else None
    amount = config.validation if isinstance(config.validation, HeldOutConfig) else None
    if isinstance(config.validation, SourceConfig) and _lacks_split(config, files["validation"]):
        share = DEFAULT_SHARE
        given = f"{config.validation.label} has no split `{config.validation.split}`"
        log(f"{given}: {share:g} of the training documents are held out for validation, by the hash of their text")
        del named["validation"]
    streamed = [n for n in named if n.startswith("sources.") and config.may_grow and any(map(is_remote, files[n]))]
    for name in streamed:
        _check_streamed(config, named[name], share, amount)
    plan.bad_rows.update(_bad_rows(named, streamed))
    for filters in plan.filters.values():
        filters.check(log)
    opened = _opened(plan, named, streamed, work, tick)
    sources = {name: source._replace(filters=plan.filters.get(name)) for name, source in opened.items()}
    kept = counts or work / COUNTS_NAME
    training = [source for name, source in sources.items() if name.startswith("sources.")]
    selections = select(
        training,
        validation_of(config, share, plan.loaded, log, kept, bool(streamed)) or sources.get("validation"),
        {name.removeprefix("sets."): source for name, source in sources.items() if name.startswith("sets.")},
        duplicates(training, config.deduplicate, runner.map, log),
        config.order.held_out_of,
    )
    if config.order.held_out_of is not None:
        held_out = (
            f"{share:g} of the first {config.order.held_out_of} documents of each source are held out for validation"
        )
        log(f"{held_out}; later ones are trained on, except copies of held-out ones")
    chunked = ChunkedSets(selections, runner, kept)
    amounts = chunked.measure(["train"] if streamed else [], only_chunked=counts is not None)
    judge([plan.bad_rows[name] for name in named], log)
    for name, filters in plan.filters.items():
        if name in named and name not in streamed and (counts is None or filters.num_documents):
            filters.end(log)
    check_not_empty(amounts, share)
    return selections, amounts, chunked


def _opened(
    plan: PreparePlan, named: Mapping[str, SourceConfig], streamed: Sequence[str], work: Path, tick: Callable[[], None]
) -> dict[str, Source]:
    """The sources by their use, fetched where they are not local; those of `streamed` are read as they arrive."""
    specials = special_tokens(plan.loaded)
    sources: dict[str, Source] = {}
    for name, source in named.items():
        files = [file._replace(specials=specials) for file in plan.files[name]]
        bad_rows = plan.bad_rows[name]
        if source.format == "tokens":
            assert plan.vocabulary is not None
            ids = partial(stored_documents, source, files, plan.vocabulary, plan.config.sequence_length)
            sources[name] = source_of_files(source, files)._replace(ids=ids)
            continue
        if not any(map(is_remote, files)):
            sources[name] = source_of_files(source, files)._replace(bad_rows=bad_rows)
            continue
        taken: dict[str, str] = {}
        if source.grows_until is not None:
            plan.written_order[name] = taken
        kept, patience = work / FETCHED_NAME / name, Patience(plan.config.order.deadline_s, tick, taken.__setitem__)
        sources[name] = source_of_files(source, [])._replace(rows=(0, None), num_documents=None, bad_rows=bad_rows)
        if name in streamed:
            stream = Stream(source, files, kept, plan.log, patience)
            sources[name] = sources[name]._replace(stream=stream.texts)
        else:
            fetched = fetch(source, files, kept, plan.log, patience, bad_rows)
            sources[name] = sources[name]._replace(files=fetched)
    return sources


def _bad_rows(named: Mapping[str, SourceConfig], streamed: Sequence[str]) -> dict[str, BadRows]:
    """What collects the bad rows of each source. Raises UserError where a report cannot be written."""
    paths = dict.fromkeys(source.bad_rows.report for source in named.values())
    reports = {path: Report(path) for path in paths if path is not None}
    return {
        name: BadRows(name, source.label, source.bad_rows, reports.get(source.bad_rows.report or ""), name in streamed)
        for name, source in named.items()
    }


def _check_streamed(
    config: DataConfig, source: SourceConfig, share: float | None, amount: HeldOutConfig | None
) -> None:
    """Raises UserError where a setting needs all documents before training begins."""
    rule = f"data.order.first_epoch: written, and {source.label} comes as it is read"
    if amount is not None:
        change = "give a share, with data.order.held_out_of; or a source of its own; or none"
        raise UserError(f"data.validation: {amount.in_words}, chosen among all documents", rule, change)
    if share is not None and config.order.held_out_of is None:
        change = "set data.order.held_out_of, such as 10000; or give validation a source of its own"
        raise UserError(f"data.validation: {share:g}, a share of all documents", rule, change)
    if config.tokenizer.train is not None:
        change = "give data.tokenizer.from; `windlass prepare` with first_epoch: shuffled trains one on all text"
        raise UserError(f"data.tokenizer.train: {config.tokenizer.train}, on all training text", rule, change)
    if config.deduplicate:
        raise UserError("data.deduplicate, which compares all documents first", rule, "leave it out")
    if isinstance(source.bad_rows.at_most, float):
        given = f"bad_rows.at_most: {source.bad_rows.at_most:g} of {source.label}, a share of all its rows"
        raise UserError(given, rule, "give a number of rows")


def _lacks_split(config: DataConfig, files: list[SourceFile]) -> bool:
    """Whether `validation` is a split that does not exist, of a dataset that is trained on."""
    asked = config.validation
    assert isinstance(asked, SourceConfig)
    if asked.hub is None or (asked.hub, asked.subset) not in [(s.hub, s.subset) for s in config.sources]:
        return False
    return (asked.split or DEFAULT_SPLIT) not in split_names(asked, files[0])
