"""Reading, ours against MosaicML's library, per CPU second, on the same shards at sequence 2048.

    sh scripts/mosaic_environment.sh && python benchmarks/mosaic_speed.py [--tokens 16000000] [--repeats 3]

Reader against reader: our Reader in the stream's order (hash of every shard, order and mapping included) against one pass
of iter(StreamingDataset). The whole loader (threads, tensors, int64, targets) is set against the same. Counted is the CPU
time of the process, all threads; the passes take turns. Shards are in the page cache, ids are random. Wanted: 5 times, and
3 times for the whole loader; less ends with exit code 1. Results: benchmarks/results/mosaic_speed.json.
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

import torch
from loader import SHARD_BYTES, SHUFFLE_WINDOW, one_pass, write_shards
from mosaic_agree import THEIRS, theirs

from windlass.data.shards.mds import Reader
from windlass.data.stream.order import Order
from windlass.hardware import cpu_name

RESULTS = Path(__file__).parent / "results" / "mosaic_speed.json"
SEQUENCE = 2048
WANTED = {"reader": 5.0, "loader": 3.0}


def read_all(directory: Path, seed: int) -> float:
    """Mtok per CPU second of one epoch through the reader."""
    start_cpu_s, num_ids = time.process_time(), 0
    reader = Reader(directory, max_mapped=2 * SHUFFLE_WINDOW + 2)
    places_N2 = Order(reader.shard_samples, seed, SHUFFLE_WINDOW).take(0, reader.num_samples)
    for shard, row in places_N2.tolist():
        ids, labels = reader.read(shard, row)
        num_ids += len(ids)
        assert len(labels) == len(ids)
    return num_ids / (time.process_time() - start_cpu_s) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if not THEIRS.exists():
        raise SystemExit("there is no .venv-mosaic: run sh scripts/mosaic_environment.sh first")
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {"reader": [], "loader": [], "their iter": [], "their index": []}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "train"
        write_shards(directory, SEQUENCE, arguments.tokens)
        for seed in range(arguments.repeats):
            rates["reader"].append(read_all(directory, seed))
            rates["loader"].append(one_pass(directory, SEQUENCE, seed)["mtok_per_cpu_s"])
            found = theirs("speed", directory)
            for name in ("iter", "index"):
                rates[f"their {name}"].append(found[name]["mtok_per_cpu_s"])  # type: ignore[index]
            load.append(os.getloadavg()[0])
    middle = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {name: middle[name] / middle["their iter"] for name in WANTED}
    result = {
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/mosaic_speed.py --tokens {arguments.tokens} --repeats {arguments.repeats}",
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "load": [round(value, 1) for value in load]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "mosaicml-streaming": "0.13.0"},
        "sequence_length": SEQUENCE,
        "shard_bytes": SHARD_BYTES,
        "mtok_per_cpu_s": rates,
        "times_their_iter": ratios,
        "wanted": WANTED,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in middle.items():
        print(f"{name:<12} {value:>8.1f} Mtok per CPU s")
    for name, ratio in ratios.items():
        print(f"{name:<12} {ratio:>8.1f} times iter(StreamingDataset); wanted {WANTED[name]:g}")
    return 0 if all(ratios[name] >= WANTED[name] for name in WANTED) else 1


if __name__ == "__main__":
    sys.exit(main())
