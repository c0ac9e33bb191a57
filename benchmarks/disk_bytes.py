"""Bytes on disk per token: what `prepare` writes, beside the same samples as int32 ids and labels, which it wrote before.

    python benchmarks/disk_bytes.py

The text is the standard library of the running Python, 2 million tokens, packed both ways, plain and with zstd, and as a
vocabulary above 2**16 stores it. The results are kept in benchmarks/results/disk_bytes.json. Shards of all kinds hold the same
samples in the same order.
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from windlass.data.config import DataConfig
from windlass.data.prepare.prepare import prepare
from windlass.data.shards.mds import Reader, Writer

RESULTS = Path(__file__).parent / "results" / "disk_bytes.json"
SHARD_BYTES = 1 << 20


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("shard.*"))


def measure(scratch: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for packing in ("concatenate", "best-fit"):
        config = DataConfig.model_validate(
            {
                "sources": [{"builtin": "python-stdlib", "tokens": 2_000_000}],
                "tokenizer": {"train": 8192},
                "directory": str(scratch / packing),
                "sequence_length": 2048,
                "packing": packing,
                "shard_bytes": SHARD_BYTES,
                "validation": "none",
            }
        )
        train = prepare(config, {}).directory / "train"
        reader = Reader(train)
        ids, labels = (np.stack(column) for column in zip(*reader))
        row = {"prepare": size(train)}
        for name, vocab_size, compression in (
            ("int32 and labels, as before", None, None),
            ("vocabulary above 65,536", 150_000, None),
            ("zstd", 8192, "zstd"),
        ):
            place = scratch / f"{packing}-{len(row)}"
            writer = Writer(place, ids.shape[1], SHARD_BYTES, vocab_size=vocab_size, compression=compression)
            writer.write(ids, labels)
            writer.close()
            again = Reader(place)
            assert again.shard_samples == reader.shard_samples
            assert all((a == b).all() for one, other in zip(again, reader) for a, b in zip(one, other))
            row[name] = size(place)
        found[packing] = {name: round(taken / ids[:, 1:].size, 3) for name, taken in row.items()}
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(RESULTS.read_text(), end="")


if __name__ == "__main__":
    main()
