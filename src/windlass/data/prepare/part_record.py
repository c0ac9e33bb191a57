"""The parts of a preparation that several machines make (part), on disk, and which of them `--join` takes.

    .NAME.parts/part-2-of-7/    beside the preparation NAME
        record.json             recipe, sources, version, tokenizer; whether all of the part's chunks are encoded
        tokenizer/              what encoded them
        .counts/                what was counted of all chunks
        SET/SOURCE/chunk-*/     as in the work directory of a preparation (chunked_sets)

A part is one directory that nobody else writes, so it may be made elsewhere and copied here.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import xxhash

from windlass.data.config import DataConfig
from windlass.data.curate.language import found_by
from windlass.data.files import write_durably
from windlass.data.prepare.choose_documents import COUNTS_NAME
from windlass.data.prepare.directory import sibling
from windlass.data.prepare.fingerprint import corpus_hash, without_bad_rows
from windlass.data.prepare.manifest import TOKENIZER_NAME
from windlass.data.prepare.plan import PreparePlan
from windlass.errors import UserError
from windlass.version import __version__

RECORD_NAME: Final = "record.json"
NAME: Final = re.compile(r"part-(\d+)-of-(\d+)")
PART_COMMAND: Final = "windlass prepare RECIPE --part"
COPIED: Final = "where machines share no file system, copy the directory of each part from the one that made it"
TOKENIZER_COMMAND: Final = "windlass prepare RECIPE --tokenizer-only"


class Part(NamedTuple):
    """Number `number`, from 0, of `of`."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Parses I/N. Raises UserError."""
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if found is None:
            given, rule = f"--part {text}", "a part is I/N: number I, from 0, of N parts"
            raise UserError(given, rule, "for example --part 0/8, ... --part 7/8")
        part = cls(int(found[1]), int(found[2]))
        if part.number >= part.of:
            rule = f"{part.of} parts are numbered from 0 to {part.of - 1}" if part.of else "there is at least one part"
            raise UserError(
                f"--part {text}", rule, "give one of these numbers" if part.of else "for example --part 0/8"
            )
        return part


@dataclass(frozen=True)
class PartRecord:
    """What decides the ids of a part, and so has to be the same for all."""

    number: int
    of: int
    work: str
    """Fingerprint (PreparePlan.work) of all that follows but the version."""
    settings: dict[str, Any]
    sources: dict[str, str]
    """Hash of the files of each source, by its use."""
    date: str | None
    version: str
    tokenizer: str = ""
    """Hash of its files."""
    is_whole: bool = False

    @property
    def part(self) -> Part:
        return Part(self.number, self.of)

    def save(self, directory: Path) -> None:
        write_durably(directory / RECORD_NAME, json.dumps(asdict(self)).encode())

    def is_of(self, other: "PartRecord") -> bool:
        """Whether both are of one preparation, by one version."""
        return (self.work, self.version) == (other.work, other.version)


class PartDirectory(NamedTuple):
    path: Path
    record: PartRecord | None
    """None where the part has not got so far."""

    @property
    def part(self) -> Part:
        found = NAME.fullmatch(self.path.name)
        assert self.record is not None or found is not None
        return self.record.part if self.record is not None else Part(*map(int, found.groups() if found else ()))


def record_of(plan: PreparePlan, part: Part) -> PartRecord:
    """What a part of this plan writes."""
    sources = {use: corpus_hash(files) for use, files in plan.files.items()}
    by = [__version__]
    if any(filters.config.language is not None for filters in plan.filters.values()):
        by.append(found_by())
    return PartRecord(*part, plan.work, without_bad_rows(plan.settings), sources, plan.date, " with ".join(by))


def with_tokenizer(record: PartRecord, directory: Path) -> PartRecord:
    """The record with the hash of the tokenizer in `directory`."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    hashes = [(path.name, xxhash.xxh3_128_hexdigest(path.read_bytes())) for path in files]
    return replace(record, tokenizer=xxhash.xxh3_128_hexdigest(json.dumps(hashes).encode()))


def parts_directory(directory: Path) -> Path:
    """Where the parts of the preparation `directory` are."""
    return sibling(directory, "parts")


def beside(config: DataConfig) -> tuple[str, str]:
    """(key, value) of the setting whose directory the parts are beside."""
    if config.cache is None:
        return "data.directory", config.directory
    return "data.cache.directory", config.cache.directory  # of shards at a URL


def found_parts(directory: Path) -> list[PartDirectory]:
    """The parts of the preparation `directory`, finished or not, by number."""
    directory_of_parts = parts_directory(directory)
    paths = (
        sorted(path for path in directory_of_parts.iterdir() if path.is_dir()) if directory_of_parts.is_dir() else []
    )
    found = [PartDirectory(path, read_record(path)) for path in paths]
    named = [one for one in found if one.record is not None or NAME.fullmatch(one.path.name)]
    return sorted(named, key=lambda one: one.part)


def read_record(directory: Path) -> PartRecord | None:
    """The record of the part in `directory`, if any; None too for one that this version does not read."""
    try:
        return PartRecord(**json.loads((directory / RECORD_NAME).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def kept_dates(directory: Path) -> Iterator[tuple[str, str | None]]:
    """(fingerprint, date) of the parts of the preparation `directory`."""
    return ((one.record.work, one.record.date) for one in found_parts(directory) if one.record is not None)


def check_complete(parts: Sequence[PartDirectory], directory: Path) -> None:
    """Raises UserError where these are not all parts, each once and finished."""
    rule = "`--join` takes N parts, 0/N to N-1/N, each once and finished"
    if not parts:
        given = f"{parts_directory(directory)} holds no part"
        change = f"make all parts first: {PART_COMMAND} 0/N and so on; {COPIED}; or prepare without --join"
        raise UserError(given, rule, change)
    counts = sorted({one.part.of for one in parts})
    if len(counts) > 1:
        few = [[one.path.name for one in parts if one.part.of == count] for count in counts]
        named = "; ".join(f"of {count}: {', '.join(names[:3])}" for count, names in zip(counts, few))
        given = f"{parts_directory(directory)} holds parts of {' and of '.join(map(str, counts))} ({named})"
        raise UserError(given, rule, "delete the directories of the parts that are not wanted")
    numbers = [one.part.number for one in parts]
    strange = [one for one in parts if one.part.number >= one.part.of]
    if strange:
        given = f"{strange[0].path} is number {strange[0].part.number} of {counts[0]} parts"
        raise UserError(given, rule, "delete it")
    twice = [one for one in parts if numbers.count(one.part.number) > 1]
    if twice:
        one, other = (part.path.name for part in twice[:2])
        given = f"part {twice[0].part} is there twice: {one} and {other} in {parts_directory(directory)}"
        raise UserError(given, rule, "delete one of the two directories")
    missing = [str(Part(number, counts[0])) for number in range(counts[0]) if number not in numbers]
    if missing:
        given = f"{_some(missing)} of {directory} {'is' if len(missing) == 1 else 'are'} missing"
        change = f"make what is missing: {PART_COMMAND} {missing[0]}; {COPIED}, to {parts_directory(directory)}"
        raise UserError(given, rule, change)
    begun = [str(one.part) for one in parts if one.record is None or not one.record.is_whole]
    if begun:
        given = f"{_some(begun)} of {directory} {'is' if len(begun) == 1 else 'are'} not finished"
        raise UserError(given, rule, f"wait for it, or let it go on: {PART_COMMAND} {begun[0]}")


def _some(parts: Sequence[str]) -> str:
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return f"part{'s' * (len(parts) > 1)} {', '.join(parts[:3])}{more}"


def check_same(parts: Sequence[PartDirectory], plan: PreparePlan) -> None:
    """Raises UserError where a part is not of this plan and version, or two have other tokenizers."""
    rule = "all parts are made of one recipe and of the same sources, by the version that joins them"
    records = [one.record for one in parts if one.record is not None]
    for record in records:
        wanted = record_of(plan, record.part)
        difference = _difference(record, wanted)
        if difference is not None:
            given, again = f"part {record.part} was made {difference}", f"{PART_COMMAND} {record.part}"
            raise UserError(given, rule, f"make it again: {again}; or put back what it was made with")
        if record.tokenizer != records[0].tokenizer:
            given = f"parts {records[0].part} and {record.part} were encoded by other tokenizers"
            raise UserError(given, rule, f"make one tokenizer ({TOKENIZER_COMMAND}), then all parts again")


def _difference(found: PartRecord, wanted: PartRecord) -> str | None:
    if found.version != wanted.version:
        return f"by windlass {found.version}; this is {wanted.version}"
    if found.is_of(wanted):
        return None
    settings = _changed(found.settings, wanted.settings)
    if settings:
        return f"with another recipe, which differs in data.{', data.'.join(settings)}"
    sources = _changed(found.sources, wanted.sources)
    if sources:
        return f"from other files of {', '.join(sources)}"
    if found.date != wanted.date:
        return f"with the date {found.date} in the chat template, which is {wanted.date} here"
    return "with another tokenizer, or by another version of the algorithm"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*old, *new} if old.get(key) != new.get(key))


def take(parts: Sequence[PartDirectory], work: Path) -> None:
    """Links what the parts hold into the work directory of the preparation, where it is found as work that was interrupted."""
    for one in parts:
        for path in one.path.glob("*/*/chunk-*"):
            _link(path, work / path.relative_to(one.path))
    for name in (TOKENIZER_NAME, COUNTS_NAME) if parts else ():
        if (parts[0].path / name).is_dir():
            _link(parts[0].path / name, work / name)


def _link(path: Path, link: Path) -> None:
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        shutil.rmtree(link)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(path.absolute(), target_is_directory=True)
