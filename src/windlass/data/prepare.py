"""From sources to shards, once: documents -> split by hash -> tokenizer -> ids -> samples of T+1 -> MDS shards.

A document's set follows from the hash of its text alone, so growing a corpus moves no document, and two copies of a
document never lie on both sides. Documents are read more than once (hash, count, tokenizer, ids); reading costs a
hundredth of encoding.

Unchanged sources and settings (`prepared.fingerprint`) are recognised and skipped; changed ones are prepared again,
never reused; the new preparation takes the old one's place only when it is complete (`place`).
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from windlass.data import baselines, packing, tokenizer
from windlass.data.config import DataConfig, SourceConfig
from windlass.data.encode import encode, pieces
from windlass.data.mds import Writer
from windlass.data.place import alone, check_place, has_leftovers, replaced
from windlass.data.prepared import (
    TOKENIZER_NAME,
    Prepared,
    SetInfo,
    check_shards,
    corpus_hash,
    fingerprint,
    load_prepared,
    open_prepared,
    settings_of,
    stream_fingerprint,
)
from windlass.data.sources import SourceFile, documents, scan
from windlass.errors import BadShard, UserError
from windlass.units import MIB, format_bytes, format_count, format_duration

__all__ = ["Prepared", "open_prepared", "prepare"]

TOKENIZER_TRAINING_BYTES = 512 * MIB  # of a larger corpus a sample trains the tokenizer; about 2 minutes on 2 cores
REPORT_EVERY_S = 10.0
HASHES = 1 << 64
Report = Callable[[str], None]


class Selection(NamedTuple):
    """A set to be written: the documents of `files` whose text hashes into low..high of 2**64."""

    files: list[SourceFile]
    low: int
    high: int

    def texts(self) -> Iterator[str]:
        for text in documents(self.files):
            if self.low <= xxhash.xxh64_intdigest(text.encode()) < self.high:
                yield text


class Amount(NamedTuple):
    documents: int
    bytes: int


def prepare(
    config: DataConfig, sets: Mapping[str, SourceConfig], report: Report = print, begun: str | None = None
) -> Prepared:
    """The preparation of `config` with the further `sets`: found if unchanged, else made. `report` takes lines of text.

    `begun`: the stream (Prepared.stream) that a run has begun to read. Another one is refused, and nothing is replaced.
    Raises UserError for what is wrong with sources, tokenizer, split or directory; nothing half-made is left then.
    """
    directory = Path(config.directory).absolute()
    check_place(directory)
    files = {"sources": [file for source in config.sources for file in scan(source, report)]}
    if isinstance(config.validation, SourceConfig):
        files["validation"] = scan(config.validation, report)
    files |= {f"sets.{name}": scan(source, report) for name, source in sets.items()}
    given = config.tokenizer.from_
    loaded = tokenizer.tokenizer_files(given) if given is not None else []
    wanted = fingerprint(settings_of(config, sets), files, loaded)
    if begun is not None and stream_fingerprint(settings_of(config, sets), files, loaded) != begun:
        raise other_stream(directory)
    if _what_is_wrong(directory, wanted) is None and not has_leftovers(directory):
        prepared = open_prepared(config, sets)
        report(f"{directory} is prepared already and unchanged: skipped (corpus {prepared.corpus_hash})")
        return prepared
    with alone(directory, report):
        wrong = _what_is_wrong(directory, wanted)
        if wrong is not None:  # else another process has made it while this one waited
            report(f"preparing {directory}: {wrong}")
            with replaced(directory) as temporary:
                _make(config, sets, files, loaded, temporary, report).save(temporary)
    return open_prepared(config, sets)


def other_stream(directory: Path) -> UserError:
    return UserError(
        f"the files of data.sources, or the tokenizer's, are not those that the run's checkpoint has read ({directory})",
        "a resumed run goes on in the stream it began, with the tokenizer it began",
        "put the old files back; or take another run.directory and data.directory, with run.start_from for the weights; "
        "or accept another stream with run.accept_drift=[data]",
    )


def _what_is_wrong(directory: Path, wanted: str) -> str | None:
    """Why `directory` is not the preparation with the fingerprint `wanted`; None if it is."""
    found = load_prepared(directory)
    if found is None:
        return "nothing is there yet"
    if found.fingerprint != wanted:
        return "the sources or settings have changed since it was prepared"
    try:
        check_shards(found)
    except BadShard as error:
        return error.given
    return None


def _select(config: DataConfig, files: Mapping[str, list[SourceFile]]) -> dict[str, Selection]:
    sources = files["sources"]
    if isinstance(config.validation, SourceConfig):
        chosen = {"train": Selection(sources, 0, HASHES), "validation": Selection(files["validation"], 0, HASHES)}
    else:
        border = int(config.validation * HASHES)
        chosen = {"train": Selection(sources, border, HASHES), "validation": Selection(sources, 0, border)}
    extra = [key for key in files if key.startswith("sets.")]
    return chosen | {key.removeprefix("sets."): Selection(files[key], 0, HASHES) for key in extra}


def _measure(config: DataConfig, selections: Mapping[str, Selection]) -> dict[str, Amount]:
    """Documents and bytes of every set, so that an empty one is refused before anything slow. Raises UserError."""
    amounts = {}
    for name, selection in selections.items():
        num_documents = num_bytes = 0
        for text in selection.texts():
            num_documents, num_bytes = num_documents + 1, num_bytes + len(text.encode())
        amounts[name] = Amount(num_documents, num_bytes)
    total = amounts["train"].documents + amounts["validation"].documents
    for name, amount in amounts.items():
        if amount.documents:
            continue
        if name in ("train", "validation") and not isinstance(config.validation, SourceConfig) and total:
            given = f"validation: {config.validation:g} of {total} documents leaves none for {name}"
            rule = "a share of whole documents is taken by hash (a text file is one document); both sides need one"
            raise UserError(given, rule, "give another share, or a source of its own: validation: {path: ...}")
        raise UserError(f"the source of {name} holds no text", "a set has at least one document", "give another source")
    return amounts


def _make(
    config: DataConfig,
    sets: Mapping[str, SourceConfig],
    files: Mapping[str, list[SourceFile]],
    loaded: list[Path],
    temporary: Path,
    report: Report,
) -> Prepared:
    selections = _select(config, files)
    amounts = _measure(config, selections)
    sources = files["sources"]
    corpus = corpus_hash(sources)
    report(f"corpus {corpus}: {len(sources)} files, {format_bytes(sum(file.num_bytes for file in sources))}")
    tokenizer_directory = temporary / TOKENIZER_NAME
    if config.tokenizer.train is not None:
        _train_tokenizer(config.tokenizer.train, selections["train"], amounts["train"], tokenizer_directory, report)
    else:
        tokenizer.copy_loaded(loaded, tokenizer_directory)
    opened, eos_id = tokenizer.open_tokenizer(tokenizer_directory)
    bytes_V = tokenizer.token_bytes(opened)
    infos = {
        name: _write_set(temporary / name, selections[name], amounts[name], config, eos_id, bytes_V, report)
        for name in sorted(selections, key=lambda name: amounts[name].bytes)  # small sets first: mistakes show early
    }
    if infos["train"].tokens < config.sequence_length:
        given = f"sequence_length {config.sequence_length}, but the training text has {infos['train'].tokens} tokens"
        raise UserError(given, "the training text fills at least one sequence", "shorten it, or give more text")
    return Prepared(
        directory=temporary,
        fingerprint=fingerprint(settings_of(config, sets), files, loaded),
        stream=stream_fingerprint(settings_of(config, sets), files, loaded),
        settings=settings_of(config, sets),
        corpus_hash=corpus,
        vocab_size=len(bytes_V),
        eos_id=eos_id,
        sets={name: infos[name] for name in selections},
        baselines=_baselines(selections, infos, temporary, len(bytes_V)),
    )


def _baselines(
    selections: Mapping[str, Selection], infos: Mapping[str, SetInfo], directory: Path, vocab_size: int
) -> dict[str, dict[str, float]]:
    """Empty for a corpus that is too large for them."""
    if not baselines.are_affordable(infos["train"].tokens, infos["validation"].bytes):
        return {}
    primes = infos["train"].bytes <= baselines.MAX_PRIMED_BYTES
    train = "".join(selections["train"].texts()).encode() if primes else b""
    validation = "".join(selections["validation"].texts()).encode()
    fitted = baselines.fit_and_score(directory / "train", directory / "validation", vocab_size, len(validation))
    return fitted | baselines.compress(train, validation)


def _train_tokenizer(vocab_size: int, train: Selection, amount: Amount, directory: Path, report: Report) -> None:
    border = int(min(1.0, TOKENIZER_TRAINING_BYTES / amount.bytes) * HASHES)

    def sampled() -> Iterator[str]:
        for text in train.texts():
            for piece, _ in pieces(text):
                if xxhash.xxh64_intdigest(piece.encode(), seed=1) < border:
                    yield piece

    start_s = time.monotonic()
    trained = tokenizer.train(sampled(), vocab_size)
    tokenizer.save_trained(trained, directory)
    found = tokenizer.vocab_size_of(trained)
    fewer = "" if found == vocab_size else f" (asked for {vocab_size}: the text has no more pairs to merge)"
    size = format_bytes(min(amount.bytes, TOKENIZER_TRAINING_BYTES))
    took = format_duration(time.monotonic() - start_s)
    report(f"tokenizer: byte-level BPE of {found} tokens{fewer}, trained on {size} in {took}")


def _write_set(
    directory: Path,
    selection: Selection,
    amount: Amount,
    config: DataConfig,
    eos_id: int,
    bytes_V: np.ndarray,
    report: Report,
) -> SetInfo:
    """Encodes, packs and writes one set; `directory`'s name is the set's."""
    T = config.sequence_length
    writer = Writer(directory, T + 1, config.shard_bytes)
    counted = _Counted(directory.name, amount, bytes_V, report)
    num_cores = os.cpu_count() or 1
    ids = encode(selection.texts(), amount.bytes, directory.parent / TOKENIZER_NAME, num_cores)
    num_samples = 0
    for input_ids_NL, labels_NL in packing.pack(counted.through(ids), eos_id, T):
        writer.write(input_ids_NL, labels_NL)
        num_samples += len(input_ids_NL)
    writer.close()
    padding = num_samples * T - counted.tokens
    info = SetInfo(amount.documents, counted.tokens, amount.bytes, num_samples, padding, counted.bytes == amount.bytes)
    counted.report_end(info)
    return info


class _Counted:
    """Counts tokens, and the bytes they stand for, as they pass; tells how far the set is every ten seconds."""

    def __init__(self, name: str, amount: Amount, bytes_V: np.ndarray, report: Report):
        self._name, self._amount, self._bytes_V, self._report = name, amount, bytes_V, report
        self.tokens = self.bytes = 0
        self._start_s = self._reported_s = time.monotonic()

    def through(self, ids: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        for part in ids:
            self.tokens += len(part)
            self.bytes += int(self._bytes_V[part].sum(dtype=np.int64))
            now_s = time.monotonic()
            if now_s - self._reported_s > REPORT_EVERY_S:
                self._reported_s = now_s
                rate = self.bytes / (now_s - self._start_s)
                left = format_duration(max(0, self._amount.bytes - self.bytes) / rate) if rate else "?"
                done = f"{format_bytes(self.bytes)} of {format_bytes(self._amount.bytes)}"
                self._report(f"{self._name}: {done}, {format_bytes(rate)}/s, {left} left")
            yield part

    def report_end(self, info: SetInfo) -> None:
        took = format_duration(time.monotonic() - self._start_s)
        amount = f"{info.documents} documents, {format_bytes(info.bytes)}, {format_count(info.tokens)} tokens"
        samples = f"{info.samples} samples ({info.padding} positions of the last one are empty)"
        self._report(f"{self._name}: {amount}, {samples}, {took}")
        if not info.bytes_add_up:
            difference = self.bytes - info.bytes
            rewrites = f"this tokenizer rewrites text (its tokens stand for {difference:+d} bytes)"
            self._report(f"{self._name}: {rewrites}: bits per byte are not exact and are left out")
