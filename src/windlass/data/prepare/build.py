"""Writes a preparation: tokenizer, shards, and what a model must beat.

`make` writes all sets into a temporary directory that replaces the old one when it is complete. `make_growing` is for training
that begins meanwhile: all sets but the training set are written that way; then the shards of the training set are written in
place and entered into the journal one by one. Both produce the same files.

    make           tokenizer, sets, small first | prepared.json | in place
    make_growing   tokenizer, other sets | begin | in place | shard, shard, ... | index.json | end | prepared.json
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import xxhash

from windlass.data.prepare import baselines
from windlass.data.prepare.appended import KeptSources
from windlass.data.prepare.choose_documents import choose_documents
from windlass.data.prepare.chunked_sets import ChunkedSets
from windlass.data.prepare.counted_set import REPORT_EVERY_S
from windlass.data.prepare.directory import check_room, replaced
from windlass.data.prepare.manifest import TOKENIZER_NAME, Prepared, SetInfo, load_prepared
from windlass.data.prepare.plan import PreparePlan
from windlass.data.prepare.write_set import (
    Growing,
    SetTokenizer,
    SharedSettings,
    most_workers,
    workers_write_all,
    write_set,
)
from windlass.data.shards import journal
from windlass.data.shards.mds import Folder
from windlass.data.shards.small_files import hashes_of
from windlass.data.sources.config import HELD
from windlass.data.sources.preference_rows import texts_of_pair
from windlass.data.sources.select import HASHES, UNKNOWN_BYTES, Amount, Selection, total_of
from windlass.data.tokenize import tokenizer
from windlass.data.tokenize.fill_in_middle import middles_of
from windlass.data.tokenize.pool import TaskRunner, document_pieces
from windlass.data.tokenize.tiktoken_encoder import fast_encoder
from windlass.errors import BadShard, UserError
from windlass.units import MIB, counted, format_bytes, format_duration

TOKENIZER_TRAINING_BYTES = 512 * MIB  # a sample of a larger corpus trains the tokenizer; about 2 minutes on 2 cores


def set_tokenizer(
    plan: PreparePlan,
    selections: Mapping[str, Selection],
    amounts: Mapping[str, list[Amount]],
    directory: Path,
    work: Path,
) -> SetTokenizer:
    """The tokenizer, written to `directory`; one that is trained is kept in `work` too."""
    if plan.config.tokenizer.train is not None:
        total = total_of(amounts["train"])
        _train_tokenizer(plan.config.tokenizer.train, selections["train"], total, directory, work, plan.log)
    else:
        tokenizer.copy_loaded(plan.loaded, plan.config.tokenizer, directory, plan.log)
    opened, eos_id = tokenizer.open_tokenizer(directory)
    for source in plan.config.sources:
        middles_of(source.fill_in_middle, [directory / tokenizer.TOKENIZER_FILE], eos_id)
    is_here = total_of(amounts["train"]).bytes < UNKNOWN_BYTES  # else it arrives while it is read, perhaps slowly
    sampled = selections.get("train" if is_here else "validation")  # nothing to compare tiktoken on: it is not used
    is_fast = sampled is not None and fast_encoder(directory, sampled.texts(), plan.log)
    return SetTokenizer(directory, eos_id, tokenizer.token_bytes(opened), is_fast, plan.date)


def _log_corpus(plan: PreparePlan) -> None:
    scanned = plan.training_files
    size = format_bytes(sum(file.num_bytes for file in scanned))
    plan.log(f"corpus {plan.corpus_hash}: {counted(len(scanned), 'file')}, {size}")


def make(plan: PreparePlan, temporary: Path, work: Path, kept: KeptSources | None = None) -> Prepared:
    """Everything but prepared.json, into `temporary`. `work`: a directory that survives a kill; `kept`: sources whose shards are
    there. Raises UserError."""
    with TaskRunner(most_workers(plan.config)) as runner:
        selections, amounts, chunked = choose_documents(plan, work, runner)
        num_bytes = sum(total_of(found).bytes for found in amounts.values())
        check_room(temporary, num_bytes, keeps_ids=not workers_write_all(plan.config, selections.values(), chunked))
        _log_corpus(plan)
        known = set_tokenizer(plan, selections, amounts, temporary / TOKENIZER_NAME, work)
        shared = SharedSettings(plan.config, known, work, plan.log)
        infos = {
            name: write_set(temporary / name, selections[name], amounts[name], shared, chunked=chunked, kept=kept)
            for name in _in_order(amounts, chunked)
        }
    prepared = _prepared(plan, temporary, selections, infos, known)
    return prepared if kept is None else replace(prepared, bad_rows=kept.with_bad_rows(prepared.bad_rows))


def _in_order(amounts: Mapping[str, list[Amount]], chunked: ChunkedSets) -> list[str]:
    """Small sets first: mistakes show early. But a set that is encoded together with the training set comes last: else all ids
    of the training set would be on disk before its first shard."""
    names = sorted(amounts, key=lambda name: total_of(amounts[name]).bytes)
    behind = [name for name in names if name != "train" and chunked.share_sources(name, "train")]
    return [name for name in names if name not in behind] + behind


def make_growing(plan: PreparePlan, directory: Path, work: Path, begun: Callable[[], None] = lambda: None) -> None:
    """Prepares in `directory` itself, whose training set others may read while it is written. A begun preparation of the same
    plan is continued, anything else replaced; then `begun` is called. Raises UserError."""
    beat = journal.Beat()
    with journal.beating(directory), TaskRunner(most_workers(plan.config)) as runner:
        selections, amounts, _ = choose_documents(plan, work, runner, beat.tick)
        _log_corpus(plan)
        goes_on = _goes_on(plan, directory)
    if not goes_on:
        with replaced(directory) as temporary:
            known = set_tokenizer(plan, selections, amounts, temporary / TOKENIZER_NAME, work)
            shared = SharedSettings(plan.config, known, work, plan.log)
            others = sorted(selections.keys() - {"train"}, key=lambda name: total_of(amounts[name]).bytes)
            infos = {name: write_set(temporary / name, selections[name], amounts[name], shared) for name in others}
            (temporary / "train").mkdir()
            facts: dict[str, Any] = {"fingerprint": plan.fingerprint, "stream": plan.stream, "settings": plan.settings}
            facts |= {"corpus_hash": plan.corpus_hash, "vocab_size": len(known.bytes_V), "eos_id": known.eos_id}
            facts |= {
                "commits": plan.commits,
                "files": hashes_of(temporary),
                "is_fast": known.is_fast,
                "date": plan.date,
            }
            facts["sets"] = {name: asdict(info) for name, info in infos.items()}
            journal.begin_journal(temporary, facts)
    begun()
    written = journal.Journal(directory)
    written.read()
    opened, eos_id = tokenizer.open_tokenizer(directory / TOKENIZER_NAME)
    bytes_V, is_fast = tokenizer.token_bytes(opened), written.begin["is_fast"]
    known = SetTokenizer(directory / TOKENIZER_NAME, eos_id, bytes_V, is_fast, plan.date)
    beat.begin(directory)
    try:
        growing = Growing(written, beat)
        train = directory / "train"
        shared = SharedSettings(plan.config, known, work, plan.log)
        info = write_set(train, selections["train"], amounts["train"], shared, growing)
        infos = {name: SetInfo(**facts) for name, facts in written.begin["sets"].items()} | {"train": info}
        _check_enough(plan, info)
        if written.end is None:
            written.add({"kind": "end", "train": asdict(info)})
        _prepared(plan, directory, selections, infos, known).save(directory)
    except UserError as error:
        journal.log_failure(directory, error)
        raise


def _goes_on(plan: PreparePlan, directory: Path) -> bool:
    """Whether `directory` holds a growing preparation of this plan, intact as far as its journal goes."""
    try:
        written = journal.open_journal(directory)
        if (
            written is None
            or written.begin["fingerprint"] != plan.fingerprint
            or hashes_of(directory, written.begin["sets"]) != written.begin["files"]
        ):
            return False
        finished = load_prepared(directory)
        if finished is not None and plan.what_changed(finished.written_order) is not None:
            return False
        for name in written.begin["sets"]:
            Folder(directory / name).check()
    except BadShard as error:
        plan.log(f"preparing again from the start: {error.given}")
        return False
    plan.log(f"{len(written.shards)} shards of the training set exist: continuing after them")
    return True


def _check_enough(plan: PreparePlan, info: SetInfo) -> None:
    length = plan.config.sequence_length
    if info.tokens < length:
        given = f"sequence_length {length}, but the training text has {info.tokens} tokens"
        raise UserError(given, "the training text fills at least one sequence", "shorten it, or give more text")


def _prepared(
    plan: PreparePlan,
    directory: Path,
    selections: Mapping[str, Selection],
    infos: Mapping[str, SetInfo],
    known: SetTokenizer,
) -> Prepared:
    _check_enough(plan, infos["train"])
    scored = _baselines(plan.log, selections, infos, directory, known)
    dropped = selections["train"].dropped
    return Prepared(
        directory=directory,
        fingerprint=plan.fingerprint,
        stream=plan.stream,
        settings=plan.settings,
        corpus_hash=plan.corpus_hash,
        vocab_size=len(known.bytes_V),
        eos_id=known.eos_id,
        sets={name: infos[name] for name in selections},
        baselines=scored[0],
        isolated_baselines=scored[1],
        commits=plan.commits,
        written_order=plan.written_order,
        bad_rows={name: dict(found.counts) for name, found in plan.bad_rows.items() if found.num},
        filtered={name: found.counts for name, found in plan.filters.items()},
        duplicates={} if dropped is None else {f"sources.{n}": count for n, count in enumerate(dropped.counts)},
        near_pairs=[] if dropped is None else [pair._asdict() for pair in dropped.pairs],
        date=plan.date,
    )


def _baselines(
    log: Callable[[str], None],
    selections: Mapping[str, Selection],
    infos: Mapping[str, SetInfo],
    directory: Path,
    known: SetTokenizer,
) -> tuple[baselines.Scores, baselines.Scores]:
    """Scores on all targets, and on those of isolated documents. Empty for a corpus that is too large, for chat and pairs, and
    without a validation set."""
    if "validation" not in selections:
        return {}, {}
    sources = [*selections["train"].sources, *selections["validation"].sources]
    if any(source.format in HELD or source.is_samples for source in sources):
        return {}, {}  # what is learned of a conversation is not its text; a row has no token before its first
    if not baselines.are_affordable(infos["train"].tokens, infos["validation"].bytes):
        return {}, {}
    is_here = all(
        source.stream is None for source in selections["train"].sources
    )  # else there may be more text than the limit allows
    log(f"baselines: what a model must beat on {format_bytes(infos['validation'].bytes)} of validation")
    primes = is_here and infos["train"].bytes <= baselines.MAX_PRIMED_BYTES
    train = "".join(selections["train"].texts()).encode() if primes else b""
    directories = (directory / "train", directory / "validation")
    num_bytes = infos["validation"].bytes
    fitted, isolated = baselines.fit_and_score(*directories, known.eos_id, known.bytes_V, num_bytes)
    if any(source.format == "tokens" for source in sources):
        return fitted, isolated  # there is no text to compress
    validation = "".join(selections["validation"].texts()).encode()
    return fitted | baselines.compress(train, validation), isolated


def _train_tokenizer(
    vocab_size: int, train: Selection, amount: Amount, directory: Path, work: Path, log: Callable[[str], None]
) -> None:
    kept = work / TOKENIZER_NAME
    if kept.is_dir():
        log("tokenizer: trained before, on the same text")
        shutil.copytree(kept, directory)
        return
    border = int(min(1.0, TOKENIZER_TRAINING_BYTES / amount.bytes) * HASHES)

    is_pairs = train.sources[0].format == "preference"  # of all or none
    size = format_bytes(min(amount.bytes, TOKENIZER_TRAINING_BYTES))
    start_s = time.monotonic()

    def sampled() -> Iterator[str]:
        num_bytes, logged_s = 0, start_s
        for num_documents, document in enumerate(train.texts()):
            if time.monotonic() - logged_s > REPORT_EVERY_S:
                logged_s = time.monotonic()
                log(f"tokenizer: documents read: {num_documents:,}, {format_bytes(num_bytes)} of about {size}")
            for text in texts_of_pair(document) if is_pairs else [document]:
                for piece, _ in document_pieces(text):
                    encoded = piece.encode()
                    if xxhash.xxh64_intdigest(encoded, seed=1) < border:
                        num_bytes += len(encoded)
                        yield piece
        log(f"tokenizer: all {format_bytes(num_bytes)} read, merging the most frequent pairs")

    log(f"tokenizer: training a byte-level BPE of {vocab_size} tokens on about {size} of text")
    trained = tokenizer.train_tokenizer(sampled(), vocab_size)
    tokenizer.save_trained(trained, directory)
    shutil.copytree(directory, kept.with_suffix(".tmp"), dirs_exist_ok=True)
    kept.with_suffix(".tmp").rename(kept)
    found = tokenizer.vocab_size_of(trained)
    fewer = "" if found == vocab_size else f" (asked for {vocab_size}: the text has no more pairs to merge)"
    took = format_duration(time.monotonic() - start_s)
    log(f"tokenizer: byte-level BPE of {found} tokens{fewer}, trained on {size} in {took}")
