"""How fast `prepare` makes shards of text, against `datasets.map(num_proc=2)`, which makes ids only; and in how much memory.

    python benchmarks/prepare.py [--copies 4] [--write]

The corpus is the sources of Python's standard library, so many times as told, each copy's files with a first line of its own; the
tokenizer is a byte-level BPE of 16,384 tokens trained on it once, before. Each way runs in a process of its own: `prepare` with
tiktoken, `prepare` with the tokenizer itself, and `datasets.map`, batched, with transformers' fast tokenizer and 2 processes.
Measured: wall and CPU seconds, with all children, from the first file to the end (for `prepare` that is hashing, counting,
ids, packing, shards and their fsync; without the baselines, which large corpora have not), and the resident
memory of the largest process.
Wanted: 3 times the MB/s of `datasets.map` with tiktoken; as many MB per CPU second with the tokenizer itself; 200 MB per process.
The load of the machine is told: figures of a busy one are no result, and --write refuses them.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "prepare.json"
VOCABULARY = 16_384
QUIET_LOAD = 0.5  # one-minute load at the start, above which nothing is written
WAYS = ("prepare, tiktoken", "prepare, tokenizers", "datasets.map")


def write_corpus(directory: Path, copies: int) -> int:
    """The files below `directory` -> their bytes."""
    from windlass.data.config import SourceConfig
    from windlass.data.sources.scan import scan

    num_bytes = 0
    for number, file in enumerate(scan(SourceConfig(builtin="python-stdlib"), print)):
        for copy in range(copies):
            path = directory / f"{copy}" / f"{number:05}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            data = f"# {copy} {number}\n".encode() + Path(file.path).read_bytes()
            path.write_bytes(data)
            num_bytes += len(data)
    return num_bytes


def train_tokenizer(corpus: Path, directory: Path) -> None:
    from windlass.data.tokenize.tokenizer import save_trained, train

    save_trained(train((path.read_text("utf-8") for path in sorted((corpus / "0").iterdir())), VOCABULARY), directory)


def run_prepare(corpus: Path, tokenizer: Path, place: Path, *, with_tiktoken: bool) -> None:
    if not with_tiktoken:
        sys.modules["tiktoken"] = None  # type: ignore[assignment]
    from windlass.data.config import DataConfig
    from windlass.data.prepare import baselines, prepare

    baselines.MAX_TRAIN_TOKENS = -1  # what larger corpora do without is not counted
    settings = {"sources": [{"path": str(corpus)}], "tokenizer": {"from": str(tokenizer)}, "directory": str(place)}
    config = DataConfig.model_validate({**settings, "sequence_length": 2048})
    prepare(config, {}, log=lambda line: print(line, file=sys.stderr))


def run_map(corpus: Path, tokenizer: Path, place: Path) -> None:
    import datasets
    from transformers import AutoTokenizer

    encoder = AutoTokenizer.from_pretrained(tokenizer)
    data = datasets.load_dataset(
        "text", data_files=f"{corpus}/**/*.py", sample_by="document", split="train", cache_dir=str(place)
    )
    data.map(lambda rows: encoder(rows["text"]), batched=True, num_proc=2, remove_columns=["text"])


def measure(way: str, corpus: Path, tokenizer: Path, place: Path, num_bytes: int) -> dict[str, float]:
    """One way in a process of its own."""
    command = [sys.executable, __file__, "--way", way, str(corpus), str(tokenizer), str(place)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    rates = {"mb_per_s": num_bytes / 1e6 / found["wall_s"], "mb_per_cpu_s": num_bytes / 1e6 / found["cpu_s"]}
    return {key: round(value, 2) for key, value in (found | rates).items()}


def run_way(way: str, corpus: Path, tokenizer: Path, place: Path) -> None:
    start_s, before = time.perf_counter(), os.times()
    if way == "datasets.map":
        run_map(corpus, tokenizer, place)
    else:
        run_prepare(corpus, tokenizer, place, with_tiktoken=way.endswith("tiktoken"))
    wall_s, now = time.perf_counter() - start_s, os.times()
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(now[:4]) - sum(before[:4])
    print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "parent_mib": peaks[0], "largest_child_mib": peaks[1]}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="write the results, if the machine is quiet")
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        run_way(arguments.way[0], *map(Path, arguments.way[1:]))
        return 0
    load = os.getloadavg()[0]
    result: dict[str, Any] = {
        "load_at_start": round(load, 2),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory() as folder:
        corpus, tokenizer = Path(folder, "corpus"), Path(folder, "tokenizer")
        num_bytes = write_corpus(corpus, arguments.copies)
        train_tokenizer(corpus, tokenizer)
        result |= {"corpus_mb": round(num_bytes / 1e6, 1), "vocabulary": VOCABULARY}
        for number, way in enumerate(WAYS):
            result[way] = measure(way, corpus, tokenizer, Path(folder, f"place-{number}"), num_bytes)
            print(f"{way}: {result[way]}", flush=True)
    fast, plain, rival = (result[way] for way in WAYS)
    result["times_map_with_tiktoken"] = round(fast["mb_per_s"] / rival["mb_per_s"], 2)
    result["times_map_per_cpu_s_with_tokenizers"] = round(plain["mb_per_cpu_s"] / rival["mb_per_cpu_s"], 2)
    print(json.dumps(result, indent=2))
    if arguments.write and load > QUIET_LOAD:
        print(f"not written: load {load:.1f} at the start, above {QUIET_LOAD}", file=sys.stderr)
        return 1
    if arguments.write:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    most_mib = max(max(way["parent_mib"], way["largest_child_mib"]) for way in (fast, plain))
    is_met = result["times_map_with_tiktoken"] >= 3 and result["times_map_per_cpu_s_with_tokenizers"] >= 1
    return 0 if is_met and most_mib * 1.048576 <= 200 else 1


if __name__ == "__main__":
    sys.exit(main())
