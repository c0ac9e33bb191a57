"""From sources to shards, once: documents -> split by hash -> tokenizer -> ids -> samples of T+1 -> MDS shards.

Unchanged sources and settings (manifest.fingerprint) are recognised and skipped. Changed ones are prepared again, never reused;
the new preparation replaces the old one only when it is complete (directory). A preparation that was killed continues where it
was (tokenize/resume). Where training may begin meanwhile, the training set grows in place (build.make_growing). A second process
waits until the first is done or dead, then continues its work.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.prepare.appended import kept_sources
from windlass.data.prepare.build import make, make_growing
from windlass.data.prepare.directory import (
    check_apart,
    check_is_directory,
    check_is_no_source,
    check_ours,
    check_writable,
    has_leftovers,
    kept_work,
    local_directory,
    locked_to_prepare,
    refused_if_full,
    replaced,
    sibling,
)
from windlass.data.prepare.manifest import (
    Prepared,
    check_shards,
    find_growing,
    find_prepared,
    load_prepared,
    open_prepared,
)
from windlass.data.prepare.part_record import (
    PartDirectory,
    check_complete,
    check_same,
    found_parts,
    kept_dates,
    parts_directory,
    take,
)
from windlass.data.prepare.plan import PreparePlan, dated, scan_sources
from windlass.data.shards.journal import beating
from windlass.data.shards.remote import PREPARED_NAME, claim, publish
from windlass.data.sources.known_hashes import KNOWN_NAME, KnownHashes
from windlass.data.tokenize.resume import kept_for, open_parts
from windlass.errors import BadShard, UserError
from windlass.object_store import Store, is_url
from windlass.safe_text import say

__all__ = ["Prepared", "open_prepared", "prepare"]


def prepare(
    config: DataConfig,
    sets: Mapping[str, SourceConfig],
    log: Callable[[str], None] = say,
    begun: str | None = None,
    on_fingerprint: Callable[[str], None] = lambda _fingerprint: None,
    is_join: bool = False,
) -> Prepared:
    """The preparation of `config` and of the further `sets`: found if unchanged, else made. `log` is called with lines of text.

    `begun`: the stream (Prepared.stream) that a run has begun to read. A different one is refused and nothing is replaced.
    `on_fingerprint(fp)` is called once all sources are scanned. `is_join`: of the parts that were encoded before (part), which
    are then deleted.
    Raises UserError for what is wrong with sources, tokenizer, split or directory; then nothing half-made is left.
    """
    directory = local_directory(config)
    where = config.directory if is_url(config.directory) else str(directory)
    check_is_directory(directory)
    parts = _parts(config, directory) if is_join else []
    hashes = known_hashes(config, directory)
    with beating(directory) if config.may_grow else contextlib.nullcontext():
        plan, found = make_plan(config, sets, log, directory, hashes)
        is_stale = _is_stale(plan, None if is_url(config.directory) else found)
    check_same(parts, plan)
    wanted = plan.fingerprint
    if begun is not None and (plan.stream != begun or is_stale):
        raise other_stream(where)
    if not is_stale:  # else only once the old one is gone: it has the same fingerprint
        on_fingerprint(wanted)
    whole = found if found is not None and found.is_whole else None
    if what_is_wrong(lambda: whole or find_prepared(config), plan, config.max_bad_shards) is None and not (
        parts or has_leftovers(directory)
    ):
        prepared = open_prepared(config, sets, whole)
        hashes.save()
        log(f"{where} is prepared already and unchanged: skipped (corpus {prepared.corpus_hash})")
        return prepared
    check_ours(directory)  # before a lock is made beside it
    check_writable(directory)
    with locked_to_prepare(directory, log):
        wrong = what_is_wrong(lambda: find_prepared(config), plan, config.max_bad_shards)
        if wrong is not None:  # else another process made it while this one waited
            _look_at_parts(parts, is_join, directory, log)
            log(f"preparing {where}: {wrong}")
            _make_and_publish(plan, directory, lambda: on_fingerprint(wanted), parts)
        if parts:
            _delete_parts(directory)
    on_fingerprint(wanted)
    hashes.save()
    return open_prepared(config, sets)


def planned(config: DataConfig, sets: Mapping[str, SourceConfig]) -> PreparePlan:
    """What `prepare` would make of the sources as they are now, with the fingerprints by which it recognises its work. Every
    source that has changed since it was prepared is read, to be hashed; nothing is written. Raises UserError."""
    directory = local_directory(config)
    hashes = known_hashes(config, directory)
    plan, _ = make_plan(config, sets, lambda _line: None, directory, hashes, is_asked=True)
    return plan


def known_hashes(config: DataConfig, directory: Path) -> KnownHashes:
    """The hashes of local files that are kept beside what was prepared of them, or begun; of data at a URL on this host, beside
    its cache."""
    return KnownHashes(known_path(config, directory), config.rehash, sibling(directory, "work") / KNOWN_NAME)


def known_path(config: DataConfig, directory: Path) -> Path:
    return sibling(directory, KNOWN_NAME) if is_url(config.directory) else directory / KNOWN_NAME


def make_plan(
    config: DataConfig,
    sets: Mapping[str, SourceConfig],
    log: Callable[[str], None],
    directory: Path,
    hashes: KnownHashes,
    is_asked: bool = False,
) -> tuple[PreparePlan, Prepared | None]:
    """What to prepare, with the commits and the date of what is there; and what is there. Raises UserError. `is_asked`: nothing
    will be written."""
    named = [one for one in (*config.sources, *sets.values(), config.validation) if isinstance(one, SourceConfig)]
    paths = [path for source in named for path in (*source.paths, *source.avoided_paths)]
    check_apart(directory, paths)
    for report in (source.bad_rows.report for source in named):
        if report is not None:
            check_apart(Path(report).expanduser(), paths, "bad_rows.report")
            check_is_no_source(Path(report).expanduser(), paths)
    found = _what_is_there(config)
    if found is None and not is_asked:  # else it may be used as it is, where nothing can be written
        check_writable(directory)
    plan = scan_sources(config, sets, log, found.commits if found else {}, hashes)
    return dated(plan, _kept_dates(directory, found)), found


def _parts(config: DataConfig, directory: Path) -> list[PartDirectory]:
    """The parts to join; none where none is there. Raises UserError where some are missing."""
    check_may_be_joined(config)
    parts = found_parts(directory)
    if parts:
        check_complete(parts, directory)
    return parts


def _look_at_parts(parts: Sequence[PartDirectory], is_join: bool, directory: Path, log: Callable[[str], None]) -> None:
    """Raises UserError where the parts to join are not all there; says so where there are some that are not joined."""
    of_parts = parts_directory(directory)
    if is_join:
        check_complete(parts, directory)  # none may be there
    elif of_parts.exists():
        log(f"{of_parts} is not checked: `windlass prepare RECIPE --join` joins what parts have encoded")


def check_data_directory(config: DataConfig, file_timeout_s: float) -> None:
    """Raises UserError where no prepared data are, and none can be written; a store has `file_timeout_s` to answer."""
    if is_url(config.directory):
        store = Store(config.directory, file_timeout_s, setting=None)
        try:
            store.read(PREPARED_NAME)
        except FileNotFoundError:
            store.check_takes_files()
    elif not Path(config.directory, PREPARED_NAME).exists():
        check_writable(Path(config.directory))


def check_may_be_joined(config: DataConfig) -> None:
    """Raises UserError where the training set is to be read while it is written."""
    if config.may_grow:
        raise UserError(
            "data.order.first_epoch: written, and a preparation in parts",
            "parts are joined when all are encoded, and a first epoch in written order begins before",
            "prepare with data.order.first_epoch=shuffled: the shards are the same, and a run may read them in written order",
        )


def _delete_parts(directory: Path) -> None:
    """Renamed first, since the next join would refuse some of them alone; `locked_to_prepare` deletes what is left of that
    name."""
    parts = parts_directory(directory)
    if parts.is_symlink():  # to a larger disk
        target = parts.resolve()
        parts.unlink()
        shutil.rmtree(target, ignore_errors=True)
    elif parts.exists():  # else another process has joined them
        os.rename(parts, sibling(directory, "preparing"))
        shutil.rmtree(sibling(directory, "preparing"))


def _make_and_publish(
    plan: PreparePlan, directory: Path, begun: Callable[[], None], parts: Sequence[PartDirectory]
) -> None:
    config, log = plan.config, plan.log
    if is_url(config.directory):
        log(f"shards are written to {directory} first, and copied when all are whole")
    store = Store(config.directory, config.cache.deadline_s) if config.cache is not None else None
    token = claim(store) if store is not None else b""
    if what_is_wrong(lambda: load_prepared(directory), plan) is not None:  # else made, but not published
        _make(plan, directory, begun, parts)
    if store is not None:
        publish(directory, store, token, log)
        shutil.rmtree(directory)


def _make(plan: PreparePlan, directory: Path, begun: Callable[[], None], parts: Sequence[PartDirectory]) -> None:
    if plan.config.may_grow:
        with refused_if_full(directory, directory), kept_work(directory) as work:
            make_growing(plan, directory, open_parts(work, plan.work, plan.date), begun)
        return
    kept = kept_sources(plan, directory)
    if kept is not None:
        shards = sum(kept.prepared.sets["train"].source_shards)
        plan.log(
            f"sources appended to {kept.num_sources} that are as they were: their {shards} shards of training text are kept"
        )
    with replaced(directory) as temporary, kept_work(directory) as work:
        take(parts, open_parts(work, plan.work, plan.date))
        make(plan, temporary, work, kept).save(temporary)


def other_stream(where: str) -> UserError:
    return UserError(
        "the files of data.sources, the tokenizer's, or settings of data that make samples of them, are not those that the run's "
        f"checkpoint has read ({where})",
        "a resumed run continues its stream with its tokenizer",
        "put the old files and settings back, and with filters.language or deduplicate.similarity the old py3langid or rensa; or "
        "take another run.directory and data.directory, with run.start_from for the weights; or accept another stream with "
        "'run.accept_drift=[data]'",
    )


def _is_stale(plan: PreparePlan, found: Prepared | None) -> bool:
    """Whether a finished preparation of this plan is there, and a source that grew has other files since."""
    return (
        found is not None
        and found.is_whole
        and found.fingerprint == plan.fingerprint
        and plan.what_changed(found.written_order) is not None
    )


def what_is_wrong(find: Callable[[], Prepared | None], plan: PreparePlan, max_missing: int = 0) -> str | None:
    """Why what `find` returns is not the preparation of this plan; None if it is. `max_missing`: training shards that may be
    missing: those that a run may skip are no reason to prepare again."""
    try:
        found = find()
        if found is None:
            return "nothing is there yet"
        if found.fingerprint != plan.fingerprint:
            return "the sources or settings have changed since it was prepared"
        changed = plan.what_changed(found.written_order)
        if changed is not None:
            return changed
        check_shards(found, max_missing)
    except BadShard as error:
        return error.given
    return None


def _what_is_there(config: DataConfig) -> Prepared | None:
    """The finished or unfinished preparation, whatever it was made from. Commits of the hub's datasets stay what they were in it,
    wherever a branch moves meanwhile, and so does its date."""
    try:
        return find_prepared(config) or (None if is_url(config.directory) else find_growing(config))
    except (BadShard, UserError):  # logged when it is prepared again
        return None


def _kept_dates(directory: Path, found: Prepared | None) -> Iterator[tuple[str, str | None]]:
    """(fingerprint or stream, date) of what is prepared, or was begun."""
    if found is not None:
        yield found.stream, found.date
    yield kept_for(sibling(directory, "work"))
    yield from kept_dates(directory)
