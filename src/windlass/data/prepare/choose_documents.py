"""The documents of every set: held out, without duplicates, counted.

Documents are read more than once (hash, count, tokenizer, ids); reading costs a hundredth of encoding. So rows that are not on
this host, of a dataset of the hub or of files at a URL, are fetched once, beside the preparation. Only a training set that is
trained on while it grows is read as its documents arrive (`fetch.Stream`). Nothing that needs all of them works there: the
validation share is of the first documents, duplicates stay, the tokenizer must be given.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.held_out import HeldOutConfig
from windlass.data.prepare.chunked_sets import ChunkedSets
from windlass.data.prepare.hold_out import validation_of
from windlass.data.prepare.plan import PreparePlan
from windlass.data.sources.bad_rows import BadRows, Report, judge
from windlass.data.sources.config import DEFAULT_SPLIT
from windlass.data.sources.fetch import Stream, fetch
from windlass.data.sources.growing import Patience
from windlass.data.sources.hub import split_names
from windlass.data.sources.select import Amount, Selection, check_not_empty, duplicates, select
from windlass.data.sources.source_files import Source, SourceFile, is_remote, source_of_files
from windlass.data.tokenize.pool import TaskRunner
from windlass.data.tokenize.template_files import special_tokens
from windlass.data.tokens.documents import stored_documents
from windlass.errors import UserError

COUNTS_NAME: Final = ".counts"
FETCHED_NAME: Final = "fetched"
DEFAULT_SHARE: Final = 0.02  # held out where a dataset lacks the split that was asked for


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
