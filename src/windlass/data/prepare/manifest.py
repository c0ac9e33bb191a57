"""What a preparation leaves on disk, and how a recipe recognises its own.

    directory/prepared.json    written last: settings, fingerprint, counts, baselines
    directory/tokenizer/       what transformers' AutoTokenizer loads
    directory/<set>/           MDS shards: train, validation, and every set of `evaluate.sets`

`open_prepared` asks whether the recipe's settings equal those of the preparation, and on one rank whether every shard is there.
It reads no source, so ranks and other machines can ask. Its fingerprint also covers the sources' bytes: see fingerprint.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.files import write_durably
from windlass.data.packing import Borders
from windlass.data.prepare.fingerprint import settings_of
from windlass.data.shards.cache import Cache
from windlass.data.shards.growing import open_growing
from windlass.data.shards.journal import Journal, open_journal
from windlass.data.shards.mds import Folder, ShardSource
from windlass.data.shards.remote import PREPARED_NAME, TOKENIZER_NAME, Remote
from windlass.data.shards.small_files import check_small_files, hashes_of
from windlass.data.tokenize.tokenizer import open_tokenizer, token_bytes
from windlass.errors import BadShard, UserError
from windlass.object_store import Store, is_url
from windlass.units import MIB

UNSAVED = ("directory", "remote", "is_whole", "max_silence_s", "folders")
SCORES_NAME: Final = "reference-{}.safetensors"
"""The file of a preference run's reference scores, which is kept beside the data that was scored."""


@dataclass(frozen=True)
class SetInfo:
    """A set in numbers. `tokens` are targets: those of all documents and one EOS each. `bytes`: UTF-8 of the text."""

    documents: int
    tokens: int
    bytes: int
    samples: int
    padding: int
    """Positions that hold no token and are not counted; with concatenation less than one sequence, at the end."""
    bytes_add_up: bool
    """Whether the bytes of the tokens add up to `bytes`; False where the tokenizer rewrites text."""
    max_documents: int
    """The most documents, whole or cut, in one sample."""
    source_shards: list[int]
    """Number of shards of each source of a mixture, or of several in `validation`, which are stored source by source. Empty
    otherwise."""
    left_out: int = 0
    """Pairs and conversations that were dropped because they are longer than a sequence."""
    cut: int = 0
    """Conversations whose prompts were cut to fit a sequence."""
    by_source: list[list[int]] = field(default_factory=list)
    """[documents, tokens] of each of its sources, in order; tokens as above."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """Fields of learned answers that the chat template does not write -> the number of such answers. Only chat and pairs have
    any."""


@dataclass(frozen=True)
class Prepared:
    directory: Path
    fingerprint: str
    stream: str
    """Fingerprint of what decides the training stream and the tokenizer; a checkpoint keeps it."""
    settings: dict[str, Any]
    corpus_hash: str
    """xxh3-128 of the names and contents of all files of `data.sources`."""
    vocab_size: int
    eos_id: int
    sets: dict[str, SetInfo]
    baselines: dict[str, dict[str, float]]
    """What a model must beat on the whole validation set: name -> bits_per_byte, and loss in nats per token."""
    isolated_baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    """Baselines where documents are isolated: on all tokens but each document's first. Compressors have no such figure."""
    commits: dict[str, str] = field(default_factory=dict)
    """Commits of the hub's datasets that were read, by name@revision."""
    files: dict[str, str] = field(default_factory=dict)
    """The tokenizer's files and every index.json -> xxh3-128, by their path below the directory."""
    written_order: dict[str, dict[str, str]] = field(default_factory=dict)
    """The files that were read from each source that grew, keyed by the source's use: file -> xxh3-128."""
    bad_rows: dict[str, dict[str, int]] = field(default_factory=dict)
    """The bad rows that were left out of each source with some, keyed by the source's use: kind -> number of rows."""
    filtered: dict[str, dict[str, int]] = field(default_factory=dict)
    """The documents that each source's filters removed, keyed by the source's use: filter -> number of documents."""
    duplicates: dict[str, int] = field(default_factory=dict)
    """The number of documents left out of each training source because they came before, keyed by the source's use; empty where
    the recipe does not ask for it."""
    near_pairs: list[dict[str, Any]] = field(default_factory=list)
    """The first near-duplicates that were left out, as NearPair."""
    date: str | None = None
    """The day that the chat template saw as today, YYYY-MM-DD; None where it does not ask."""
    remote: Remote | None = None
    """For a preparation at a URL; `directory` then holds its small files only."""
    is_whole: bool = True
    """False while the training set is written; `sets` then counts what is written so far."""
    folders: dict[str, Folder] = field(default_factory=dict, compare=False, repr=False, init=False)
    """Local sets whose index was read, by name and how many shards may be missing: read once by whoever holds this object."""
    max_silence_s: float | None = None
    """Where the training set may grow: how long to wait for a sign of life of the preparation."""

    @property
    def where(self) -> str:
        """The directory or URL, for messages."""
        return str(self.directory) if self.remote is None else self.remote.store.url

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / TOKENIZER_NAME

    def shards(self, name: str) -> ShardSource:
        """The shards of a set, local or at a URL. Only the index is looked at. Raises BadShard."""
        assert name in self.sets, f"{name} is none of {sorted(self.sets)}"
        if self.remote is not None:
            return self.remote.shards(name)
        may_grow = name == "train" and self.max_silence_s is not None
        growing = open_growing(self.directory, name, self.max_silence_s or 0.0) if may_grow else None
        return growing or self.folder(name)

    def folder(self, name: str) -> Folder:
        """The shards of a finished local set. Raises BadShard."""
        if name not in self.folders:
            self.folders[name] = Folder(self.directory / name)
        return self.folders[name]

    def borders(self, name: str) -> Borders:
        """What `packing.isolate` needs of a set."""
        return Borders(self.eos_id, self.sets[name].max_documents)

    def token_bytes(self, name: str) -> np.ndarray | None:
        """Bytes per token id [V]; None where they do not add up to the text of this set (see SetInfo)."""
        return token_bytes(open_tokenizer(self.tokenizer_directory)[0]) if self.sets[name].bytes_add_up else None

    def save(self, directory: Path) -> None:
        """Writes prepared.json beside the tokenizer and the shards, which must be complete."""
        content = {key: value for key, value in asdict(self).items() if key not in UNSAVED}
        content["files"] = hashes_of(directory)
        write_durably(directory / PREPARED_NAME, json.dumps(content, indent=2).encode())


def load_prepared(directory: Path) -> Prepared | None:
    """The content of prepared.json, or None if there is none. Raises UserError when it is damaged."""
    path = directory / PREPARED_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _parse(data, directory, str(path), f"delete {directory} and prepare again")


def find_prepared(config: DataConfig) -> Prepared | None:
    """The preparation at `data.directory`, whatever it was made from. The small files of a URL are copied into the cache.

    Raises UserError, BadShard.
    """
    if not is_url(config.directory):
        return load_prepared(Path(config.directory).absolute())
    assert config.cache is not None
    store = Store(config.directory, config.cache.deadline_s)
    cache = Cache(Path(config.cache.directory).absolute(), config.cache.limit_mib * MIB)
    try:
        data = store.read(PREPARED_NAME)
    except FileNotFoundError:
        return None
    where = f"{store.url}/{PREPARED_NAME}"
    prepared = _parse(data, Path(), where, "prepare again to this URL, with this version of windlass")
    remote = Remote(store, cache, data, prepared.files)
    return replace(prepared, directory=remote.directory, remote=remote)


def find_growing(config: DataConfig) -> Prepared | None:
    """A preparation that is still being written, or was interrupted. Raises BadShard."""
    directory = Path(config.directory).absolute()
    journal = open_journal(directory)
    if journal is None:
        return None
    facts = {key: value for key, value in journal.begin.items() if key not in ("kind", "is_fast")}
    sets = {name: SetInfo(**info) for name, info in facts.pop("sets").items()}
    sets["train"] = _so_far(journal, config.sequence_length) if journal.end is None else SetInfo(**journal.end["train"])
    return Prepared(directory=directory, **facts, sets=sets, baselines={}, is_whole=False)


def _so_far(journal: Journal, sequence_length: int) -> SetInfo:
    """The training set as far as it is written. Counts that are unknown before its end are 0."""
    samples, most = sum(shard.num_samples for shard in journal.shards), max([1, *journal.most_documents])
    return SetInfo(
        0, samples * sequence_length, 0, samples, 0, bytes_add_up=False, max_documents=most, source_shards=[]
    )


def _parse(data: bytes, directory: Path, where: str, change: str) -> Prepared:
    rule = f"{PREPARED_NAME} is as this version of windlass writes it"
    try:
        content = json.loads(data)
        sets = content["sets"]
        other = _other_keys(Prepared, content) + [key for info in sets.values() for key in _other_keys(SetInfo, info)]
        if other:
            raise UserError(
                f"{where} was written by another version of windlass: {', '.join(dict.fromkeys(other))}", rule, change
            )
        return Prepared(directory=directory, **{**content, "sets": {name: SetInfo(**sets[name]) for name in sets}})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{where} cannot be read: {error}", rule, change) from None


def _other_keys(kind: type, content: Mapping[str, Any]) -> list[str]:
    """In words, each key of `content` that this version does not write, and each that it would write."""
    known = [entry.name for entry in fields(kind) if entry.name not in UNSAVED]
    lacking = [f"it has no `{name}`" for name in known if name not in content]
    return lacking + [f"`{name}` is not known to this one" for name in content if name not in known]


def check_shards(prepared: Prepared, max_missing: int = 0, looks: bool = True) -> None:
    """Checks that every set has its number of samples, that the tokenizer and each index.json are as written, and with `looks`
    that every shard is there and of the right size (of the training set `max_missing` may be missing). Raises BadShard."""
    for name, info in prepared.sets.items():
        if prepared.remote is None and looks:
            prepared.folder(name).check(max_missing if name == "train" else 0)
        shards = prepared.folder(name).shards if prepared.remote is None else prepared.remote.shards(name).shards
        found = sum(shard.num_samples for shard in shards)
        if found != info.samples:
            given = f"{prepared.where}/{name} holds {found} samples"
            raise BadShard(given, f"{PREPARED_NAME} promises {info.samples}", "delete the directory and prepare again")
    if prepared.remote is None:
        check_small_files(prepared.directory, prepared.files)
    elif looks and not prepared.remote.store.is_read_only:
        prepared.remote.check_sizes({name: max_missing if name == "train" else 0 for name in prepared.sets})


def open_prepared(
    config: DataConfig, sets: Mapping[str, SourceConfig], found: Prepared | None = None, looks: bool = True
) -> Prepared:
    """The preparation of these settings; `found`: the finished one that is there, where it is open already and its shards were
    checked. `looks`: at every shard file of a directory, which is for one rank of a run to do: the others find a file out when
    they load it. Raises UserError if there is none or its settings differ, BadShard if damaged."""
    directory = config.directory if is_url(config.directory) else str(Path(config.directory).absolute())
    prepared = found or find_prepared(config) or (find_growing(config) if config.may_grow else None)
    if prepared is None:
        raise UserError(
            f"{directory} holds no prepared data", "data is prepared before it is read", "run `windlass prepare RECIPE`"
        )
    wanted = json.loads(json.dumps(settings_of(config, sets)))
    for key, value in wanted.items():
        if prepared.settings.get(key) != value:
            given = f"{directory} was prepared with {key} {prepared.settings.get(key)!r}, the recipe has {value!r}"
            rule = "prepared data is used with the settings it was made with"
            raise UserError(given, rule, "run windlass prepare on this recipe, or give data.directory another name")
    if config.may_grow:
        prepared = replace(prepared, max_silence_s=config.order.deadline_s)
    if not prepared.is_whole:
        return prepared
    if prepared.remote is None:
        if found is None:
            check_shards(prepared, config.max_bad_shards, looks)
    else:
        prepared.remote.check_window("train", config.shuffle_window, len(config.sources) if config.mixture else 1)
    return prepared
