"""Files of ids as the other tools' formats are published, packed by hand: nothing of windlass writes or reads here."""

import hashlib
import json
import random
import struct
from pathlib import Path

import numpy as np
import zstandard

from windlass.data.config import DataConfig
from windlass.data.tokenize.tokenizer import open_tokenizer

VOCABULARY = 300


def some_documents(eos_id, count=60, seed=0, below=VOCABULARY):
    """Lists of ids without EOS, of very different lengths, none empty."""
    draw = random.Random(seed)
    ids = [number for number in range(below) if number != eos_id]
    return [draw.choices(ids, k=draw.choice([1, 3, 20, 90])) for _ in range(count)]


def encoded(tokenizer: Path, count=120):
    """The ids of short texts, each as a whole."""
    opened, _ = open_tokenizer(tokenizer)
    draw, words = (
        random.Random(5),
        ["wind", "rope", "anchor", "turn", "the", "a", "of", "pull", "ship", "slow", "heavy"],
    )
    texts = [f"{number} " + " ".join(draw.choices(words, k=draw.randint(5, 60))) + ".\n" for number in range(count)]
    return [opened.encode(text, add_special_tokens=False).ids for text in texts]


def nanogpt(path: Path, documents, eos_id, dtype="<u2"):
    """data/openwebtext/prepare.py: EOT behind each document, uint16, no header."""
    path.write_bytes(np.array([id for document in documents for id in (*document, eos_id)], dtype).tobytes())


def llm_c(path: Path, documents, eos_id, magic=20240520, version=1, letter="H"):
    """dev/data/data_common.py: 256 int32 of header; fineweb.py puts EOT before each document."""
    ids = [id for document in documents for id in (eos_id, *document)]
    header = struct.pack("<3i", magic, version, len(ids)) + b"\0" * (1024 - 12)
    path.write_bytes(header + struct.pack(f"<{len(ids)}{letter}", *ids))


def megatron(path: Path, documents, code=8, letter="H", with_last=True, sequences_each=2):
    """megatron/core/datasets/indexed_dataset.py; a document is up to `sequences_each` sequences."""
    lengths, offsets, borders, body = [], [], [0], b""
    for document in documents:
        half = len(document) // sequences_each
        for part in [document[:half], document[half:]] if half else [document]:
            lengths.append(len(part))
            offsets.append(len(body))
            body += struct.pack(f"<{len(part)}{letter}", *part)
        borders.append(len(lengths))
    borders = borders if with_last else borders[:-1]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(borders))
    arrays = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(offsets)}q", *offsets)
    path.with_suffix(".idx").write_bytes(head + arrays + struct.pack(f"<{len(borders)}q", *borders))
    path.write_bytes(body)


def mds(
    directory: Path, rows, encoding="bytes", dtype="<i8", hashes=(), compression=None, rows_per_shard=7, extra=False
):
    """MosaicML's format 2: `encoding` of the column `tokens` is bytes, ndarray:TYPE or ndarray:TYPE:LENGTH. `extra`: a column of
    text comes first."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    fixed = int(encoding.split(":")[2]) * np.dtype(dtype).itemsize if encoding.count(":") == 2 else None
    names, encodings, sizes = ["tokens"], [encoding], [fixed]
    if extra:
        names, encodings, sizes = ["id", *names], ["str", *encodings], [None, *sizes]
    config = {
        "format": "mds", "version": 2, "column_names": names, "column_encodings": encodings, "column_sizes": sizes,
        "compression": compression, "hashes": list(hashes), "size_limit": 1 << 20,
    }  # fmt: skip
    for number, start in enumerate(range(0, len(rows), rows_per_shard)):
        samples = []
        for at, row in enumerate(rows[start : start + rows_per_shard]):
            value = np.array(row, dtype).tobytes()
            if encoding.startswith("ndarray") and fixed is None:
                value = struct.pack("<BH", 1 << 2 | 1, len(row)) + value
            values = [f"row {start + at}".encode(), value] if extra else [value]
            heads = [struct.pack("<I", len(one)) for one, size in zip(values, sizes, strict=True) if size is None]
            samples.append(b"".join(heads + values))
        text = json.dumps(config).encode()
        offsets = np.cumsum([8 + 4 * len(samples) + len(text), *map(len, samples)])
        data = struct.pack("<I", len(samples)) + struct.pack(f"<{len(offsets)}I", *offsets) + text + b"".join(samples)
        raw = {"basename": f"shard.{number:05}.mds", "bytes": len(data)}
        raw["hashes"] = {name: hashlib.new(name, data).hexdigest() for name in hashes}
        entry = {**config, "samples": len(samples), "raw_data": raw, "zip_data": None}
        if compression is None:
            (directory / raw["basename"]).write_bytes(data)
        else:
            packed = zstandard.ZstdCompressor().compress(data)
            name = f"{raw['basename']}.zstd"
            found = {one: hashlib.new(one, packed).hexdigest() for one in hashes}
            entry["zip_data"] = {"basename": name, "bytes": len(packed), "hashes": found}
            (directory / name).write_bytes(packed)
        entries.append(entry)
    (directory / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def windows(documents, eos_id, length):
    """Rows of `length` ids of the documents, each with EOS behind it, as LLM Foundry's ConcatTokensDataset cuts them; the last is
    shorter."""
    stream = [id for document in documents for id in (*document, eos_id)]
    return [stream[start : start + length] for start in range(0, len(stream), length)]


def tokens_config(root: Path, tokenizer: Path, *sources, **changes) -> DataConfig:
    """Settings for sources of tokens below `root`."""
    settings = {
        "sources": [{"format": "tokens", **source} for source in sources],
        "tokenizer": {"from": str(tokenizer)},
        "directory": str(root / "prepared"),
        "sequence_length": 32,
        "validation": "none",
        "shard_bytes": 8 << 10,
        "shuffle_window": 3,
    }
    return DataConfig.model_validate({**settings, **changes})


def eos_of(prepared) -> int:
    return open_tokenizer(prepared.tokenizer_directory)[1]
