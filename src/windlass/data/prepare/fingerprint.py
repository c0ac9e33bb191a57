"""What a preparation is recognised by: a hash of all that decides its shards. Where it differs, `prepare` prepares again."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from windlass.data.config import DataConfig, SourceConfig
from windlass.data.curate.language import found_by
from windlass.data.curate.near_duplicates import library_version
from windlass.data.sources.config import HELD
from windlass.data.sources.source_files import SourceFile
from windlass.safe_text import without_secrets

CHAT_VERSION = 7  # the same for sources of chat and pairs alone
ALGORITHM_VERSION = 2  # raise it when the same sources and settings give other shards; a golden test pins it
WHERE = (
    "path",
    "hub",
    "builtin",
)  # a source has one of these; the other two stay null, since readers ask for all three


def settings_of(config: DataConfig, sets: Mapping[str, SourceConfig]) -> dict[str, Any]:
    """The settings that decide what is on disk. `directory`, `cache`, `shuffle_window` and `isolate` do not, nor does the
    tokenizer's revision, whose files are hashed, nor a source's name. Of shares it counts only that there are some."""
    unread: dict[str, bool | set[str]] = {
        "directory": True,
        "cache": True,
        "shuffle_window": True,
        "isolate": True,
        "max_bad_shards": True,
        "timeout_s": True,
        "order": True,
        "stages": True,
        "workers": True,
        "tokenizer": {"revision", "commit", "trust_remote_code"},
    }
    settings = config.model_dump(mode="json", by_alias=True, exclude=unread)
    settings["held_out_of"] = config.order.held_out_of
    for source in settings["sources"]:
        source["weight"] = bool(config.mixture)
    settings["sets"] = {name: source.model_dump(mode="json") for name, source in sets.items()}
    for source in (*settings["sources"], settings["validation"], *settings["sets"].values()):
        if isinstance(source, dict) and "format" in source:  # else an amount to hold out
            del source["max_row_mib"]  # a limit decides what is refused, not what is written
            del source["name"]
            del source["bad_rows"]["report"]
            if source["too_long"] == "refuse":  # the same as none
                source["too_long"] = None
            for held in (source, source["filters"] or {}):  # so that a setting of a later version changes none of these
                for key in [name for name, value in held.items() if value is None and name not in WHERE]:
                    del held[key]
    found: dict[str, Any] = without_secrets(settings)  # a fresh signature is no other source
    return found


def without_bad_rows(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that decide no sample: the limits on bad rows, which decide what is refused, and compression."""

    def without(source: Any) -> Any:
        is_source = isinstance(source, Mapping)
        return {key: value for key, value in source.items() if key != "bad_rows"} if is_source else source

    found = {**settings, "sources": list(map(without, settings["sources"]))}
    found.pop("compression", None)
    found["validation"] = without(settings["validation"])
    if "sets" in settings:
        found["sets"] = {name: without(source) for name, source in settings["sets"].items()}
    return found


def preparation_fingerprint(
    settings: Mapping[str, Any],
    files: Mapping[str, Sequence[SourceFile]],
    tokenizer_files: Sequence[Path],
    date: str | None = None,
) -> str:
    """Hash of all that decides the shards: settings, names, sizes and contents of source files, tokenizer, algorithm; the date,
    where a chat template writes it; and the libraries that find languages and near-duplicates, where they are asked for. Raises
    UserError where one of them is missing."""
    sources = [*settings["sources"], settings["validation"], *settings.get("sets", {}).values()]
    by_language = any(isinstance(source, dict) and (source.get("filters") or {}).get("language") for source in sources)
    is_chat = any(isinstance(source, dict) and source.get("format") in HELD for source in sources)
    parts = {
        "algorithm": ALGORITHM_VERSION,
        **({"chat": CHAT_VERSION} if is_chat else {}),
        **({"date": date} if date is not None else {}),
        **({"language": found_by()} if by_language else {}),
        **({"near_duplicates": library_version()} if isinstance(settings["deduplicate"], dict) else {}),
        "settings": settings,
        "files": {name: [(f.name, f.num_bytes, f.xxh3) for f in listed] for name, listed in files.items()},
        "tokenizer": [(f.name, xxhash.xxh3_128_hexdigest(f.read_bytes())) for f in tokenizer_files],
    }
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def stream_fingerprint(
    settings: Mapping[str, Any],
    files: Mapping[str, Sequence[SourceFile]],
    tokenizer_files: Sequence[Path],
    date: str | None = None,
) -> str:
    """The fingerprint without the further validation sets, which may come and go, and without limits on bad rows, so that a run
    goes on where a row was one too many."""
    settings = without_bad_rows(settings)
    kept = {name: listed for name, listed in files.items() if not name.startswith("sets.")}
    return preparation_fingerprint(
        {key: value for key, value in settings.items() if key != "sets"}, kept, tokenizer_files, date
    )


def corpus_hash(files: Sequence[SourceFile]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(f"{f.name}\0{f.xxh3}\n" for f in files).encode())
