"""How fast `prepare` makes shards of text, in how much memory and on how much disk, from 10 MB to 1 GB; and what of it the parent
does. Beside it `datasets.map(num_proc=2)`, which makes ids only, on the second size.

    python benchmarks/prepare.py [--sizes 10 100 1000 | --turns 3] [--write]

The corpus is JSON lines of the sources of Python's standard library, in as many copies as give the size, each text with a first
line of its own; the tokenizer is a byte-level BPE of 16,384 tokens trained on it once, before. Each way runs in a process of its
own: `prepare` with tiktoken, `prepare` with the tokenizer itself (up to the second size), and `datasets.map`, batched, with
transformers' fast tokenizer and 2 processes. A row holds

    wall_s, cpu_s      from the first import to the end: hashing, counting, ids, packing, shards and their fsync; no baselines,
                       which large corpora have not
    parent_cpu_s       of it in the process that was started; the rest is the workers'
    fixed_cpu_s        of that before the first shard: imports, the tokenizer, its comparison with tiktoken
    parent_mib, child_mib   the resident memory of the parent, and of the largest worker
    disk_peak          the most bytes that were on disk besides the source, seen every 50 ms, over those of the result
    bytes_per_token    of the result

--turns measures the three ways at 100 MB alone, one after another in an order that turns, so often, and adds to the results each
way's rates of every turn and the ratio of `prepare` over `datasets.map` in it.

Wanted: at most 3 % of the CPU seconds in the parent at the largest size, less what is fixed; disk_peak at most 1.1 there; as
many MB per CPU second there as at the second size; 3 times the MB/s of `datasets.map` with tiktoken, and as many MB per CPU
second as it with the tokenizer itself; 200 MB per process. The load of the machine is noted: figures of a busy one are no
result, and --write refuses them.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "prepare.json"
VOCABULARY = 16_384
QUIET_LOAD = 0.6  # one-minute load at the start, above which nothing is written
FAST, PLAIN, RIVAL = "prepare, tiktoken", "prepare, tokenizers", "datasets.map"
EVERY_S = 0.05


def texts(copies: int) -> Iterator[str]:
    from windlass.data.config import SourceConfig
    from windlass.data.sources.scan import scan

    files = [
        Path(file.path).read_text("utf-8", "replace") for file in scan(SourceConfig(builtin="python-stdlib"), print)
    ]
    for copy in range(copies):
        yield from (f"# {copy} {number}\n{text}" for number, text in enumerate(files))


def write_corpus(path: Path, num_bytes: int) -> int:
    """JSON lines -> the bytes of their texts, `num_bytes` or a little more."""
    written = 0
    with path.open("w") as file:
        for text in texts(1_000_000):
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
            if written >= num_bytes:
                return written
    raise AssertionError("there are enough copies")


def write_tokenizer(directory: Path) -> None:
    from windlass.data.tokenize.tokenizer import save_trained, train_tokenizer

    save_trained(train_tokenizer(texts(1), VOCABULARY), directory)


def run_prepare(corpus: Path, tokenizer: Path, place: Path, *, with_tiktoken: bool) -> dict[str, float]:
    if not with_tiktoken:
        sys.modules["tiktoken"] = None  # type: ignore[assignment]
    from windlass.data.config import DataConfig
    from windlass.data.prepare import baselines, build, prepare

    baselines.MAX_TRAIN_TOKENS = -1  # what larger corpora do without is not counted
    begun: list[float] = []
    real: Callable[..., Any] = build.write_set

    def noted(*arguments: Any, **keywords: Any) -> Any:
        begun.append(time.process_time())
        return real(*arguments, **keywords)

    build.write_set = noted
    settings = {"sources": [{"path": str(corpus)}], "tokenizer": {"from": str(tokenizer)}, "directory": str(place)}
    config = DataConfig.model_validate({**settings, "sequence_length": 2048})
    with Disk(place) as disk:
        prepared = prepare.prepare(config, {}, log=lambda line: print(line, file=sys.stderr))
    result_bytes = size_of(place)
    num_tokens = sum(info.tokens for info in prepared.sets.values())
    return {
        "fixed_cpu_s": begun[0],
        "disk_peak": disk.most_bytes / result_bytes,
        "bytes_per_token": result_bytes / num_tokens,
    }


def size_of(place: Path) -> int:
    """Bytes of a directory and of its hidden siblings, each file once however often it is linked."""
    found = {}
    for directory in (place, *place.parent.glob(f".{place.name}.*")):
        for parent, _, names in os.walk(directory):
            for name in names:
                try:
                    state = os.lstat(os.path.join(parent, name))
                except FileNotFoundError:
                    continue
                found[state.st_ino] = state.st_size
    return sum(found.values())


class Disk:
    """The most bytes on disk while a block runs, as seen by a process of its own."""

    def __init__(self, place: Path):
        self._place, self.most_bytes = place, 0

    def __enter__(self) -> "Disk":
        command = [sys.executable, __file__, "--watch", str(self._place)]
        self._watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.most_bytes = int(self._watch.communicate()[0])


def watch(place: Path) -> None:
    """Prints the most bytes seen, when its input ends."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    most = 0
    while not ended.wait(EVERY_S):
        most = max(most, size_of(place))
    print(max(most, size_of(place)))


def run_map(corpus: Path, tokenizer: Path, place: Path) -> None:
    import datasets
    from transformers import AutoTokenizer

    encoder = AutoTokenizer.from_pretrained(tokenizer)
    data = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(place))
    data.map(lambda rows: encoder(rows["text"]), batched=True, num_proc=2, remove_columns=["text"])


def measure(way: str, corpus: Path, tokenizer: Path, place: Path, num_bytes: int) -> dict[str, float]:
    """One way in a process of its own."""
    command = [sys.executable, __file__, "--way", way, str(corpus), str(tokenizer), str(place)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    rates = {"mb_per_s": num_bytes / 1e6 / found["wall_s"], "mb_per_cpu_s": num_bytes / 1e6 / found["cpu_s"]}
    if way != RIVAL:
        rates["parent_share"] = found["parent_cpu_s"] / found["cpu_s"]
        rates["parent_share_less_fixed"] = (found["parent_cpu_s"] - found["fixed_cpu_s"]) / found["cpu_s"]
    return {key: round(value, 4 if "share" in key else 2) for key, value in (found | rates).items()}


def run_way(way: str, corpus: Path, tokenizer: Path, place: Path) -> None:
    start_s = time.perf_counter()
    more: dict[str, float] = {}
    if way == RIVAL:
        run_map(corpus, tokenizer, place)
    else:
        more = run_prepare(corpus, tokenizer, place, with_tiktoken=way == FAST)
    wall_s, now = time.perf_counter() - start_s, os.times()
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found = {"wall_s": wall_s, "cpu_s": sum(now[:4]), "parent_cpu_s": sum(now[:2]), **more}
    print(json.dumps(found | {"parent_mib": peaks[0], "child_mib": peaks[1]}))


def misses(rows: dict[str, Any], sizes: list[int]) -> list[str]:
    """What is not as wanted."""
    second, last = sizes[min(1, len(sizes) - 1)], sizes[-1]
    fast, plain, rival = (rows[f"{way}, {second} MB"] for way in (FAST, PLAIN, RIVAL))
    large = rows[f"{FAST}, {last} MB"]
    memory = max(max(row["parent_mib"], row["child_mib"]) for name, row in rows.items() if not name.startswith(RIVAL))
    checks = {
        "3 % of the CPU seconds in the parent": large["parent_share_less_fixed"] <= 0.03,
        "1.1 times the result on disk": large["disk_peak"] <= 1.1,
        "linear CPU seconds": large["mb_per_cpu_s"] >= 0.95 * fast["mb_per_cpu_s"],
        "3 times datasets.map with tiktoken": fast["mb_per_s"] >= 3 * rival["mb_per_s"],
        "datasets.map per CPU second with the tokenizer": plain["mb_per_cpu_s"] >= rival["mb_per_cpu_s"],
        "200 MB per process": memory * 1.048576 <= 200,
    }
    return [name for name, is_met in checks.items() if not is_met]


def in_turns(corpus: Path, tokenizer: Path, place: Path, num_bytes: int, turns: int) -> dict[str, Any]:
    ways = (FAST, PLAIN, RIVAL)
    rates: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(turns):
        for way in (*ways[turn % len(ways) :], *ways[: turn % len(ways)]):
            row = measure(way, corpus, tokenizer, place / f"{turn}-{way.replace(', ', '-')}", num_bytes)
            rates[way].append((row["mb_per_s"], row["mb_per_cpu_s"]))
            print(f"turn {turn}, {way}: {rates[way][-1]}", flush=True)
    found: dict[str, Any] = {}
    for at, unit in enumerate(("mb_per_s", "mb_per_cpu_s")):
        for way in ways:
            found[f"{way}, {unit}"] = [one[at] for one in rates[way]]
        for way in (FAST, PLAIN):
            over = [one[at] / other[at] for one, other in zip(rates[way], rates[RIVAL], strict=True)]
            found[f"{way} over {RIVAL}, {unit}"] = [round(one, 2) for one in over]
    return found


def measure_turns(turns: int, load: float, is_kept: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        corpus, tokenizer = Path(folder, "corpus.jsonl"), Path(folder, "tokenizer")
        write_tokenizer(tokenizer)
        found = in_turns(corpus, tokenizer, Path(folder, "places"), write_corpus(corpus, 100_000_000), turns)
    found |= {"load_at_start": round(load, 2), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps(found, indent=2))
    if is_kept and load > QUIET_LOAD:
        print(f"not written: load {load:.1f} at the start, above {QUIET_LOAD}", file=sys.stderr)
        return 1
    if is_kept:
        RESULTS.write_text(json.dumps({**json.loads(RESULTS.read_text()), "turns at 100 MB": found}, indent=2) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000], help="MB, rising")
    parser.add_argument("--turns", type=int, help="measure the ways in turns instead, this often each")
    parser.add_argument("--write", action="store_true", help="write the results, if the machine is quiet")
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--watch", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch is not None:
        watch(arguments.watch)
        return 0
    if arguments.way is not None:
        run_way(arguments.way[0], *map(Path, arguments.way[1:]))
        return 0
    load, rows = os.getloadavg()[0], dict[str, Any]()
    if arguments.turns is not None:
        return measure_turns(arguments.turns, load, arguments.write)
    result: dict[str, Any] = {"load_at_start": round(load, 2), "cores": os.cpu_count()}
    result |= {"python": platform.python_version(), "vocabulary": VOCABULARY, "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder, "tokenizer")
        write_tokenizer(tokenizer)
        for number, size in enumerate(arguments.sizes):
            corpus = Path(folder, f"corpus-{size}.jsonl")
            num_bytes = write_corpus(corpus, size * 1_000_000)
            is_second = number == min(1, len(arguments.sizes) - 1)
            for way in [FAST, *[PLAIN] * (number <= 1), *[RIVAL] * is_second]:
                name = f"{way}, {size} MB"
                rows[name] = measure(way, corpus, tokenizer, Path(folder, "places", name.replace(", ", "-")), num_bytes)
                print(f"{name}: {rows[name]}", flush=True)
            corpus.unlink()
    result["missed"] = misses(rows, arguments.sizes)
    print(json.dumps(result, indent=2))
    if arguments.write and load > QUIET_LOAD:
        print(f"not written: load {load:.1f} at the start, above {QUIET_LOAD}", file=sys.stderr)
        return 1
    if arguments.write:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        turns = {key: row for key, row in kept.items() if key.startswith("turns")}
        RESULTS.write_text(json.dumps(result | turns, indent=2) + "\n")
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
