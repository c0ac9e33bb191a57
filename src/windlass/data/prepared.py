"""What a preparation leaves on disk, and how a recipe recognises its own.

    directory/prepared.json    written last: settings, fingerprint, counts, baselines
    directory/tokenizer/       what transformers' AutoTokenizer loads
    directory/<set>/           MDS shards: train, validation, and every set of `evaluate.sets`

Two questions are asked of it. `open_prepared`: do the recipe's settings equal those of the preparation, and is every
shard there? It reads no source, so ranks and other machines can ask. `fingerprint`: are also the sources' bytes, the
tokenizer's files and the algorithm the same? `prepare` asks that, and prepares again when they are not.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.mds import read_index, write_durably
from windlass.data.sources import SourceFile
from windlass.data.tokenizer import open_tokenizer, token_bytes
from windlass.errors import BadShard, UserError

ALGORITHM_VERSION = 1  # raised when the same sources and settings give other shards than before; a golden test pins it
PREPARED_NAME, TOKENIZER_NAME = "prepared.json", "tokenizer"


@dataclass(frozen=True)
class SetInfo:
    """A set in numbers. `tokens` are targets: those of all documents and one EOS each. `bytes`: UTF-8 of the text."""

    documents: int
    tokens: int
    bytes: int
    samples: int
    padding: int
    """Positions of the last sample that stand for nothing and are not counted; less than one sequence."""
    bytes_add_up: bool
    """Whether the bytes of the tokens add up to `bytes`; not so where the tokenizer rewrites text."""


@dataclass(frozen=True)
class Prepared:
    directory: Path
    fingerprint: str
    stream: str
    """The part of the fingerprint that decides the training stream and the tokenizer: a checkpoint remembers it."""
    settings: dict[str, Any]
    corpus_hash: str
    """xxh3-128 of the names and contents of all files of `data.sources`."""
    vocab_size: int
    eos_id: int
    sets: dict[str, SetInfo]
    baselines: dict[str, dict[str, float]]
    """What a model must beat on the whole validation set: name -> bits_per_byte, and loss in nats per token."""

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / TOKENIZER_NAME

    def set_directory(self, name: str) -> Path:
        assert name in self.sets, f"{name} is none of {sorted(self.sets)}"
        return self.directory / name

    def token_bytes(self, name: str) -> np.ndarray | None:
        """Bytes per token id [V], or None where they do not add up to the text of this set (see SetInfo)."""
        return token_bytes(open_tokenizer(self.tokenizer_directory)[0]) if self.sets[name].bytes_add_up else None

    def save(self, directory: Path) -> None:
        content = {key: value for key, value in asdict(self).items() if key != "directory"}
        write_durably(directory / PREPARED_NAME, json.dumps(content, indent=2).encode())


def settings_of(config: DataConfig, sets: Mapping[str, SourceConfig]) -> dict[str, Any]:
    """The settings that decide what lies on disk; `directory` and `shuffle_window` do not."""
    settings = config.model_dump(mode="json", by_alias=True, exclude={"directory", "shuffle_window"})
    return {**settings, "sets": {name: source.model_dump(mode="json") for name, source in sets.items()}}


def fingerprint(
    settings: Mapping[str, Any], files: Mapping[str, Sequence[SourceFile]], tokenizer_files: Sequence[Path]
) -> str:
    """Hash of all that decides the shards: settings, source files' names, sizes, contents, tokenizer, algorithm."""
    parts = {
        "algorithm": ALGORITHM_VERSION,
        "settings": settings,
        "files": {name: [(f.name, f.num_bytes, f.xxh3) for f in listed] for name, listed in files.items()},
        "tokenizer": [(f.name, xxhash.xxh3_128_hexdigest(f.read_bytes())) for f in tokenizer_files],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def stream_fingerprint(
    settings: Mapping[str, Any], files: Mapping[str, Sequence[SourceFile]], tokenizer_files: Sequence[Path]
) -> str:
    """The same without the further validation sets, which may come and go."""
    kept = {name: listed for name, listed in files.items() if not name.startswith("sets.")}
    return fingerprint({key: value for key, value in settings.items() if key != "sets"}, kept, tokenizer_files)


def corpus_hash(files: Sequence[SourceFile]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(f"{f.name}\0{f.xxh3}\n" for f in files).encode())


def load_prepared(directory: Path) -> Prepared | None:
    """What prepared.json says, or None if there is none. Raises UserError when it is damaged."""
    path = directory / PREPARED_NAME
    try:
        content = json.loads(path.read_bytes())
        content["sets"] = {name: SetInfo(**info) for name, info in content["sets"].items()}
        return Prepared(directory=directory, **content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError) as error:
        rule = f"{PREPARED_NAME} is as this version of windlass writes it"
        raise UserError(f"{path} cannot be read: {error}", rule, f"delete {directory} and prepare again") from None


def check_shards(prepared: Prepared) -> None:
    """Every set's shards are there, of the right size and number. Raises BadShard."""
    for name, info in prepared.sets.items():
        found = sum(shard.num_samples for shard in read_index(prepared.directory / name))
        if found != info.samples:
            given = f"{prepared.directory / name} holds {found} samples"
            raise BadShard(given, f"{PREPARED_NAME} promises {info.samples}", "delete the directory and prepare again")


def open_prepared(config: DataConfig, sets: Mapping[str, SourceConfig]) -> Prepared:
    """The preparation of these settings. Raises UserError if there is none or it is of others, BadShard if damaged."""
    directory = Path(config.directory).absolute()
    prepared = load_prepared(directory)
    if prepared is None:
        raise UserError(f"{directory} holds no prepared data", "data is prepared before it is read", "windlass prepare")
    wanted = json.loads(json.dumps(settings_of(config, sets)))
    for key, value in wanted.items():
        if prepared.settings.get(key) != value:
            given = f"{directory} was prepared with {key} {prepared.settings.get(key)!r}, the recipe has {value!r}"
            rule = "prepared data is used with the settings it was made with"
            raise UserError(given, rule, "run windlass prepare on this recipe, or give data.directory another name")
    check_shards(prepared)
    return prepared
