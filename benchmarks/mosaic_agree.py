"""MosaicML's library and ours agree on every token, both ways, compressed shards too.

    sh scripts/mosaic_environment.sh && python benchmarks/mosaic_agree.py

Random samples are written with ours and read with theirs: ids and labels, the third column of conversations (document_ends), and
the narrow columns that `prepare` writes. Then they are written with theirs (plain, zstd, gz; LLM Foundry's `tokens` too) and
read with ours, from a directory and through the cache from a URL. A sha256 over all ids and labels, in order, is compared. What
ours does not read (snappy, brotli) is refused by name. The lines printed are kept in benchmarks/results/mosaic_agree.txt; exit
code 1 if one of them disagrees.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from windlass.data.shards.cache import Cache
from windlass.data.shards.index import parse_shard_index
from windlass.data.shards.mds import Reader, ShardSource, Writer
from windlass.data.shards.remote import CachedShards
from windlass.data.tokens.mosaic_mds import mosaic_rows, read_mosaic_index
from windlass.errors import BadShard
from windlass.object_store import Store

ROOT = Path(__file__).parent.parent
THEIRS = ROOT / ".venv-mosaic" / "bin" / "python"
TRANSCRIPT = ROOT / "benchmarks" / "results" / "mosaic_agree.txt"
NUM_SAMPLES, NUM_IDS = 1500, 513
SHARD_BYTES = 1 << 20
Compare = Callable[[str, dict[str, object], dict[str, object]], None]


def theirs(*arguments: str | Path) -> dict[str, object]:
    command = [str(THEIRS), str(ROOT / "benchmarks" / "meters" / "mosaic_side.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, arguments[:1]))} failed on their side:\n{done.stderr[-2000:]}")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(source: Path | ShardSource) -> dict[str, object]:
    digest, num_ids, samples = hashlib.sha256(), 0, 0
    reader = Reader(source)
    for number, row in [(number, row) for number, count in enumerate(reader.shard_samples) for row in range(count)]:
        (input_ids, labels), ends = reader.read(number, row), reader.ends(number, row)
        digest.update(input_ids.tobytes() + labels.tobytes() + (b"" if ends is None else ends.tobytes()))
        num_ids, samples = num_ids + len(input_ids), samples + 1
    return {"samples": samples, "ids": num_ids, "sha256": digest.hexdigest()}


def through_cache(directory: Path, cache: Path) -> CachedShards:
    store = Store(f"file://{directory}", 20)
    shards = parse_shard_index(store.read("train/index.json"), "train/index.json")
    return CachedShards(store, "train", shards, Cache(cache, 4 << 20))


def agree(scratch: Path) -> list[str]:
    """One line per way; `DIFFERENT` where they disagree."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 150_000, (NUM_SAMPLES, NUM_IDS)).astype(np.int32)
    labels = np.where(draw.random(ids.shape) < 0.2, -100, ids).astype(np.int32)
    np.save(scratch / "ids.npy", np.stack([ids, labels], 1))
    wanted: dict[str, object] = {"samples": NUM_SAMPLES, "ids": ids.size}
    wanted["sha256"] = hashlib.sha256(np.stack([ids, labels], 1).tobytes()).hexdigest()
    lines = []

    def compare(way: str, found: dict[str, object], is_wanted: dict[str, object] = wanted) -> None:
        same = "equal" if found == is_wanted else "DIFFERENT"
        lines.append(
            f"{way:<62} {found['samples']} samples, {found['ids']} ids, sha256 {str(found['sha256'])[:16]}  {same}"
        )

    lines.append(f"{'what is written':<62} {NUM_SAMPLES} samples, {ids.size} ids, sha256 {wanted['sha256'][:16]}")
    writer = Writer(scratch / "ours", NUM_IDS, SHARD_BYTES)
    writer.write(ids, labels)
    writer.close()
    compare("written by windlass, read by windlass", ours(scratch / "ours"))
    compare("written by windlass, read by mosaicml-streaming", theirs("read", scratch / "ours"))
    ends = (draw.random(ids.shape) < 0.01).astype(np.uint8)
    writer = Writer(scratch / "ends", NUM_IDS, SHARD_BYTES, has_ends=True)
    writer.write(ids, labels, ends)
    writer.close()
    rows = b"".join(ids[n].tobytes() + labels[n].tobytes() + ends[n].tobytes() for n in range(NUM_SAMPLES))
    with_ends = wanted | {"sha256": hashlib.sha256(rows).hexdigest()}
    compare("with document_ends, written and read by windlass", ours(scratch / "ends"), with_ends)
    compare("with document_ends, read by mosaicml-streaming", theirs("read", scratch / "ends"), with_ends)
    _narrow(scratch, ids, labels, compare)
    for kind in ("none", "zstd", "zstd:7", "gz"):
        place = scratch / kind.replace(":", "-")
        theirs("write", place / "train", scratch / "ids.npy", kind)
        compare(f"written by mosaicml-streaming ({kind}), read by windlass", ours(place / "train"))
        cached = ours(through_cache(place, scratch / "cache"))
        compare(f"written by mosaicml-streaming ({kind}), read through the cache", cached)
    for kind in ("snappy", "br"):
        theirs("write", scratch / kind, scratch / "ids.npy", kind)
        try:
            compare(f"written by mosaicml-streaming ({kind}), read by windlass", ours(scratch / kind))
        except BadShard as error:
            lines.append(f"written by mosaicml-streaming ({kind}), refused: {error.rule}")
    return lines


def _narrow(scratch: Path, ids: np.ndarray, labels: np.ndarray, compare: Compare) -> None:
    """What `prepare` writes, of two bytes per id; and tokens of theirs, a source of ours."""
    ids = ids % 50_000
    masked = np.where(labels < 0, -100, ids).astype(np.int32)
    for name, targets, kind in (
        ("ids alone", ids, None),
        ("loss_mask", masked, None),
        ("loss_mask, zstd", masked, "zstd"),
    ):
        place = scratch / name.replace(", ", "-").replace(" ", "-")
        writer = Writer(place, NUM_IDS, SHARD_BYTES, vocab_size=50_000, compression=kind)
        writer.write(ids, targets)
        writer.close()
        sha = hashlib.sha256(np.stack([ids, targets], 1).tobytes()).hexdigest()
        wanted = {"samples": NUM_SAMPLES, "ids": ids.size, "sha256": sha}
        compare(f"uint16, {name}, written and read by windlass", ours(place), wanted)
        compare(f"uint16, {name}, read by mosaicml-streaming", theirs("read", place), wanted)
    np.save(scratch / "narrow.npy", np.stack([ids, masked], 1))
    wanted = {"samples": NUM_SAMPLES, "ids": ids.size, "sha256": hashlib.sha256(ids.tobytes()).hexdigest()}
    for encoding, dtype, kind in (
        ("bytes", "int64", "none"),
        ("ndarray:int32", "int32", "zstd"),
        (f"ndarray:uint16:{NUM_IDS}", "uint16", "gz"),
    ):
        place = scratch / f"tokens-{dtype}"
        theirs("tokens", place, scratch / "narrow.npy", encoding, dtype, kind)
        compare(f"tokens of theirs ({encoding}, {kind}), a source of windlass", as_source(place), wanted)


def as_source(directory: Path) -> dict[str, object]:
    """Rows of ids as `format: tokens` reads them."""
    shards = read_mosaic_index(directory / "index.json")
    rows = [row.ids for shard in shards for row in mosaic_rows(directory / shard.file, shard, None, None)]
    data = b"".join(ids.astype("<i4").tobytes() for ids in rows)
    return {"samples": len(rows), "ids": len(data) // 4, "sha256": hashlib.sha256(data).hexdigest()}


def main() -> int:
    if not THEIRS.exists():
        raise SystemExit("there is no .venv-mosaic: run sh scripts/mosaic_environment.sh first")
    with tempfile.TemporaryDirectory() as scratch:
        lines = agree(Path(scratch))
    text = "$ python benchmarks/mosaic_agree.py   (mosaicml-streaming 0.13.0)\n" + "".join(
        line + "\n" for line in lines
    )
    print(text, end="")
    TRANSCRIPT.write_text(text)
    return 1 if "DIFFERENT" in text else 0


if __name__ == "__main__":
    sys.exit(main())
