"""How many tokens a CPU second delivers through the whole loader, from local shards to tensors.

    python benchmarks/loader.py [--tokens 8000000] [--repeats 5]

Counted is the CPU time of the process, all threads, from the opening of the loader to its end: index, hashing every
shard, the order, mapping, the conversion to int64, the queue. A little more than one epoch is read, so an epoch's
border is inside. Shards are in the page cache, as they are written just before; ids are random, since nothing here
depends on them. Batches of 16,384 tokens. Wanted: at least 5 Mtok per CPU second at sequence 256 and 30 at 2048; less
ends with exit code 1. Results are written to benchmarks/results/loader.json.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from windlass.data.config import DataConfig
from windlass.data.shards.mds import Reader, Writer
from windlass.data.stream.collate import batches_of
from windlass.data.stream.loader import BatchCut, Loader
from windlass.data.stream.order import Order
from windlass.hardware import cpu_name

RESULTS = Path(__file__).parent / "results" / "loader.json"
BATCH_TOKENS = 16_384
WANTED_MTOK_PER_CPU_S = {256: 5.0, 2048: 30.0, 8192: 30.0}
SHARD_BYTES = DataConfig.model_fields["shard_bytes"].default
SHUFFLE_WINDOW = DataConfig.model_fields["shuffle_window"].default


def write_shards(directory: Path, sequence_length: int, num_tokens: int) -> None:
    draw = np.random.default_rng(0)
    writer = Writer(directory, sequence_length + 1, SHARD_BYTES)
    for _ in range(-(-num_tokens // (1 << 20))):
        ids = draw.integers(0, 50_000, ((1 << 20) // sequence_length, sequence_length + 1)).astype(np.int32)
        writer.write(ids, ids)
    writer.close()


def one_pass(directory: Path, sequence_length: int, seed: int) -> dict[str, float]:
    """Rates of one loader's life of an epoch and an eighth."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    reader, cut = Reader(directory, 2 * SHUFFLE_WINDOW + 2), BatchCut(BATCH_TOKENS // sequence_length)
    order = Order(reader.shard_samples, seed, SHUFFLE_WINDOW)
    loader = Loader(order, reader.shards, batches_of(reader, sequence_length), cut)
    num_batches = order.num_samples * 9 // 8 // cut.global_batch
    for _ in range(num_batches):
        loader.next()
    loader.close()
    mtok = num_batches * BATCH_TOKENS / 1e6
    return {
        "mtok_per_cpu_s": mtok / (time.process_time() - start_cpu_s),
        "mtok_per_s": mtok / (time.perf_counter() - start_s),
    }


def measure(sequence_length: int, num_tokens: int, repeats: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder) / "train", sequence_length, num_tokens)
        passes = [one_pass(Path(folder) / "train", sequence_length, seed) for seed in range(repeats)]
    found: dict[str, float] = {"sequence_length": sequence_length, "wanted": WANTED_MTOK_PER_CPU_S[sequence_length]}
    for name in passes[0]:
        rates = [one[name] for one in passes]
        found |= {name: statistics.median(rates), f"{name}_min": min(rates), f"{name}_max": max(rates)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(length, arguments.tokens, arguments.repeats) for length in WANTED_MTOK_PER_CPU_S]
    result = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/loader.py --tokens {arguments.tokens} --repeats {arguments.repeats}",
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.system()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": rows,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'sequence':>8}  {'Mtok per CPU s: median (min .. max)':>38}  {'wanted':>6}  {'Mtok per s':>10}")
    for row in rows:
        spread = f"{row['mtok_per_cpu_s']:.0f} ({row['mtok_per_cpu_s_min']:.0f} .. {row['mtok_per_cpu_s_max']:.0f})"
        print(f"{row['sequence_length']:>8}  {spread:>38}  {row['wanted']:>6.0f}  {row['mtok_per_s']:>10.0f}")
    return 0 if all(row["mtok_per_cpu_s"] >= row["wanted"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
