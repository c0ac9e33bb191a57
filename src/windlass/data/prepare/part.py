"""Preparing on several machines: each makes a part of the ids by itself, and one joins them.

    prepare RECIPE --tokenizer-only     once: reads all sources, to hash and count them; trains the tokenizer
    prepare RECIPE --part I/N           N times, anywhere and in any order: encodes every N-th chunk
    prepare RECIPE --join               once: `prepare`, which finds all chunks encoded, as after an interruption

What a chunk gives depends on the chunk alone (chunk_tasks), and everything else happens in `--join`, on the path of one machine.
So the shards are the same bit for bit, whatever N. Only sources that workers read in chunks have parts (chunked_sets). The rest
is encoded by `--join`: a source with a limit by count, one of ids, and all training text where duplicates are dropped.

Without the first step each part counts all sources by itself. It is needed where a tokenizer is trained, and where sources are
not local, which it fetches.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.prepare.build import set_tokenizer
from windlass.data.prepare.choose_documents import COUNTS_NAME, FETCHED_NAME, choose_documents
from windlass.data.prepare.chunked_sets import Settings
from windlass.data.prepare.counted_set import REPORT_EVERY_S
from windlass.data.prepare.directory import (
    check_is_directory,
    check_writable,
    local_directory,
    locked,
    locked_to_prepare,
    refused_if_full,
    sibling,
)
from windlass.data.prepare.manifest import TOKENIZER_NAME, find_prepared
from windlass.data.prepare.part_record import (
    TOKENIZER_COMMAND,
    Part,
    found_parts,
    parts_directory,
    read_record,
    record_of,
    with_tokenizer,
)
from windlass.data.prepare.plan import PreparePlan
from windlass.data.prepare.prepare import check_may_be_joined, known_hashes, known_path, make_plan, what_is_wrong
from windlass.data.prepare.write_set import SourceSettings, most_workers
from windlass.data.sources.fetch import is_fetched
from windlass.data.sources.known_hashes import KNOWN_NAME, KnownHashes
from windlass.data.sources.source_files import Source, is_remote
from windlass.data.tokenize.pool import TaskRunner
from windlass.data.tokenize.resume import kept_for, open_parts
from windlass.errors import UserError
from windlass.safe_text import say


def prepare_tokenizer(config: DataConfig, sets: Mapping[str, SourceConfig], log: Callable[[str], None] = say) -> None:
    """What parts need first: hashes and counts of all sources, those fetched that are not local, and the tokenizer. It is kept
    in the work directory of the preparation. Raises UserError."""
    check_may_be_joined(config)
    directory = local_directory(config)
    check_is_directory(directory)
    work = sibling(directory, "work")
    hashes = KnownHashes(work / KNOWN_NAME, config.rehash, known_path(config, directory))
    plan, _ = make_plan(config, sets, log, directory, hashes)
    if _is_prepared(plan, log):
        return
    check_writable(directory)
    with (
        locked_to_prepare(directory, log),
        refused_if_full(directory, work),
        TaskRunner(most_workers(config)) as runner,
    ):
        open_parts(work, plan.work, plan.date)
        selections, amounts, _ = choose_documents(plan, work, runner)
        tokenizer = sibling(directory, "preparing")  # which the next start removes
        known = set_tokenizer(plan, selections, amounts, tokenizer / TOKENIZER_NAME, work)
        shutil.rmtree(tokenizer)
    hashes.save()
    log(f"{len(known.bytes_V)} tokens; sources are counted: now the parts, `windlass prepare RECIPE --part I/N`")


def prepare_part(
    config: DataConfig, sets: Mapping[str, SourceConfig], part: Part, log: Callable[[str], None] = say
) -> None:
    """Encodes one part, or what is missing of it. Raises UserError."""
    check_may_be_joined(config)
    directory = local_directory(config)
    check_is_directory(directory)
    into = parts_directory(directory) / f"part-{part.number}-of-{part.of}"
    plan, _ = make_plan(config, sets, log, directory, known_hashes(config, directory))
    if _is_prepared(plan, log):
        return
    work = sibling(directory, "work")
    _check_begun(plan, work)
    check_writable(directory)
    _check_same_number(part, directory)
    into.mkdir(parents=True, exist_ok=True)
    with locked(into.with_name(f".{into.name}.lock"), into, log), refused_if_full(directory, into):
        wanted, found = record_of(plan, part), read_record(into)
        if found is not None and found.is_of(wanted) and found.is_whole:
            log(f"part {part} of {directory} is made already: skipped")
            return
        if found is None or not found.is_of(wanted):
            shutil.rmtree(into)
            into.mkdir()
        _make(plan, part, into, work)
    log(f"part {part} of {directory} is made; when all are: `windlass prepare RECIPE --join`")


def _check_same_number(part: Part, directory: Path) -> None:
    """Raises UserError where parts of another number are there: one task of an array that is submitted alone is not part 0/1."""
    other = next((one for one in found_parts(directory) if one.part.of != part.of), None)
    if other is not None:
        raise UserError(
            f"--part {part}, and {other.path} is part {other.part}",
            "all parts of a preparation have one number of parts",
            f"give the part that is to be made again, as --part I/{other.part.of}; "
            f"or delete {parts_directory(directory)} to start over",
        )


def _is_prepared(plan: PreparePlan, log: Callable[[str], None]) -> bool:
    wrong = what_is_wrong(lambda: find_prepared(plan.config), plan, plan.config.max_bad_shards)
    if wrong is None:
        log(f"{plan.config.directory} is prepared already and unchanged: skipped")
    return wrong is None


def _check_begun(plan: PreparePlan, work: Path) -> None:
    """Raises UserError where the first step has to be done, and is not."""
    is_begun = kept_for(work)[0] == plan.work
    remote = [use for use, files in plan.files.items() if any(map(is_remote, files))]
    missing = [use for use in remote if not (is_begun and is_fetched(work / FETCHED_NAME / use))]
    if plan.config.tokenizer.train is not None and not (is_begun and (work / TOKENIZER_NAME).is_dir()):
        raise UserError(
            f"--part with data.tokenizer.train: {plan.config.tokenizer.train}, and no tokenizer of these sources is made",
            "all parts are encoded by one tokenizer, which is trained on the text of all",
            f"make it first, where the parts find it: {TOKENIZER_COMMAND}",
        )
    if missing:
        raise UserError(
            f"--part with {', '.join(missing)} not on this host, and not fetched",
            "rows that are not local are fetched once, for all parts",
            f"fetch them first, where the parts find them: {TOKENIZER_COMMAND}",
        )


def _make(plan: PreparePlan, part: Part, into: Path, work: Path) -> None:
    record = record_of(plan, part)
    if plan.config.deduplicate:
        plan.log("data.deduplicate: a text may have come before in any part: `--join` encodes all")
        replace(record, is_whole=True).save(into)
        return
    if kept_for(work)[0] == plan.work and (work / COUNTS_NAME).is_dir():
        shutil.copytree(work / COUNTS_NAME, into / COUNTS_NAME, dirs_exist_ok=True)
    with TaskRunner(most_workers(plan.config)) as runner:
        selections, amounts, chunked = choose_documents(plan, work, runner, counts=into / COUNTS_NAME)
        shutil.rmtree(into / TOKENIZER_NAME, ignore_errors=True)  # of a start that was killed
        known = set_tokenizer(plan, selections, amounts, into / TOKENIZER_NAME, work)
        record = with_tokenizer(record, into / TOKENIZER_NAME)
        record.save(into)

        def settings(source: Source, name: str) -> Settings:
            return SourceSettings(source, known, plan.config).of_set(name)

        num_chunks = len(range(part.number, chunked.num_chunks, part.of))
        for name, number in chunked.rest():
            plan.log(f"{name}, source {number}: left to `--join`, which reads it from front to back")
        mine = islice(chunked.tasks(settings, into, known.eos_id), part.number, None, part.of)
        start_s = time.monotonic()
        for number, _ in enumerate(runner.map(mine, chunked.num_bytes // part.of), 1):
            if time.monotonic() - start_s > REPORT_EVERY_S or number == num_chunks:
                start_s = time.monotonic()
                plan.log(f"part {part}: {number} of {num_chunks} chunks are encoded")
    replace(record, is_whole=True).save(into)
