"""What lanes (`data.order.lanes`) cost in shuffle quality, from the order alone, and in runs that train. Tables of docs/scale.md.

    python benchmarks/shuffle.py order                          # arithmetic alone: the same figures on any machine
    python benchmarks/shuffle.py train ENGLISH.txt MEETINGS     # a text, and a folder with train.jsonl

order: the corpus is sorted by source, the worst case of an order that mixes few shards at a time: 1,024 shards of 1,024 samples,
16 sources of 64 shards, one after the other. Of the first epoch of an order

    distance_mean, distance_p99   total variation between the shares of sources in a global batch and in the corpus, over all
                                  batches: half of the sum of |share in the batch - share in the corpus|. 0: the shares of the
                                  corpus, which a random draw does not hit either: see the order `global`
    apart                         how far apart two neighbours of the corpus come: the mean, as a share of the epoch; in a
                                  random permutation 1/3
    together                      share of the pairs of neighbours that come in one global batch; in a random permutation
                                  (batch - 1) / (samples - 1)
    shards_per_host               that the first of HOSTS hosts reads, each an equal slice of a global batch

Orders: `global`, one random permutation of all samples; `none`, the corpus as written; `plain`, what windlass does without lanes;
`lanes`. With H lanes a batch mixes `window` shards of each, so there are plain orders whose window is H times that, too.

train: an English text, meetings and Python's standard library, the same number of characters of each, one behind the other. A
tiny model reads all of it once in each order. `validation` is its loss, at the end, on held-out documents of all three.
Results are written to benchmarks/results/shuffle.json, the other part's kept.
"""

import datetime
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.order import Order, permutation

RESULTS = Path(__file__).parent / "results" / "shuffle.json"
SHARDS, SAMPLES, SOURCES, HOSTS, WINDOW = 1024, 1024, 16, 64, 8
LANES, WINDOWS, BATCHES = (8, 64), (8, 64, 512), (64, 512, 4096)
SEEDS = (0, 1, 2)
Row = dict[str, Any]


# ---- an order and its measures


def stream_of(
    kind: str, window: int, lanes: int, batch: int, shards: int = SHARDS, samples: int = SAMPLES
) -> np.ndarray:
    """The first epoch: number of the sample in the corpus, by position in the stream."""
    total = shards * samples
    if kind == "none":
        return np.arange(total)
    if kind == "global":
        return permutation(0, 0, 0, total)
    sizes = [samples] * shards
    order = Order(sizes, 0, window) if kind == "plain" else LaneOrder(sizes, 0, window, lanes, batch // lanes)
    places_N2 = order.take(0, total)
    return places_N2[:, 0] * samples + places_N2[:, 1]


def share_distances(sources_N: np.ndarray, batch: int) -> np.ndarray:
    """Of each whole global batch: total variation between its shares of sources and those of all."""
    shares_K = np.bincount(sources_N) / len(sources_N)
    batches_BN = sources_N[: len(sources_N) // batch * batch].reshape(-1, batch)
    counts_BK = np.stack([(batches_BN == source).sum(1) for source in range(len(shares_K))], 1)
    distances_B: np.ndarray = np.abs(counts_BK / batch - shares_K).sum(1) / 2
    return distances_B


def neighbours(stream_N: np.ndarray, batch: int) -> tuple[float, float]:
    """(mean distance of two neighbours of the corpus, as a share of the stream; share of the pairs in one global batch)"""
    positions_N = np.empty(len(stream_N), np.int64)
    positions_N[stream_N] = np.arange(len(stream_N))
    apart = float(np.abs(np.diff(positions_N)).mean() / len(stream_N))
    return apart, float((np.diff(positions_N // batch) == 0).mean())


def measure(kind: str, window: int, lanes: int, batch: int) -> Row:
    stream_N = stream_of(kind, window, lanes, batch)
    distances_B = share_distances(stream_N // (SHARDS * SAMPLES // SOURCES), batch)
    apart, together = neighbours(stream_N, batch)
    own = stream_N.reshape(-1, batch)[:, : batch // HOSTS]
    return {
        "order": kind, "window": window, "lanes": lanes, "batch": batch,
        "distance_mean": round(float(distances_B.mean()), 4),
        "distance_p99": round(float(np.quantile(distances_B, 0.99)), 4),
        "apart": round(apart, 4), "together": round(together, 5),
        "shards_per_host": len(np.unique(own // SAMPLES)),
    }  # fmt: skip


def orders() -> Iterator[Row]:
    asked = [("global", 0, 1), *(("plain", window, 1) for window in WINDOWS)]
    asked += [*(("lanes", WINDOW, lanes) for lanes in LANES), ("lanes", SHARDS // HOSTS, HOSTS), ("none", 0, 1)]
    for kind, window, lanes in asked:
        for batch in BATCHES:
            yield measure(kind, window, lanes, batch)


# ---- runs that train


class Size(NamedTuple):
    """Of the corpus and of a run, which reads it once."""

    source_chars: int = 500_000
    """Of each of the three sources."""
    document_chars: int = 4_000
    held_out: int = 12
    """Every how many-th document is in the validation set."""
    vocabulary: int = 1_024
    sequence_length: int = 128
    shard_samples: int = 40
    hidden_size: int = 64
    rows: int = 16
    """Sequences per step."""
    rate: float = 6e-3


TRAINED: dict[str, dict[str, Any]] = {
    "global": {"shuffle_window": 1 << 20},
    "plain": {},
    "lanes": {"order": {"lanes": 8}},
    "none": {"shuffle_window": 1, "order": {"first_epoch": "written"}},  # permuted inside each shard
}


def write_corpus(folder: Path, english: Path, meetings: Path, size: Size) -> list[dict[str, str]]:
    """Documents of the three sources as JSON lines, and of all in validation.jsonl -> the sources of a recipe."""
    from windlass.data.config import SourceConfig
    from windlass.data.sources.scan import scan

    talks = [json.loads(line)["transcript"] for line in (meetings / "train.jsonl").read_text("utf-8").splitlines()]
    files = scan(SourceConfig(builtin="python-stdlib"), lambda line: None)
    code = "\n".join(Path(file.path).read_text("utf-8", "ignore") for file in files)
    texts = {"english": english.read_text("utf-8"), "meetings": "\n".join(talks), "code": code}
    held_out, sources = list[str](), list[dict[str, str]]()
    for name, text in texts.items():
        cut = text[: size.source_chars]
        assert len(cut) == size.source_chars, f"{name} has {len(text)} characters"
        starts = range(0, len(cut), size.document_chars)
        lines = [json.dumps({"text": cut[at : at + size.document_chars]}) + "\n" for at in starts]
        held_out += lines[:: size.held_out]
        (file := folder / f"{name}.jsonl").write_text(
            "".join(line for number, line in enumerate(lines) if number % size.held_out)
        )
        sources.append({"path": str(file)})
    (folder / "validation.jsonl").write_text("".join(held_out))
    return sources


def recipe(folder: Path, name: str, sources: list[dict[str, str]], size: Size, steps: int, seed: int) -> Any:
    """Of a run in the order `name`. Runs of one order share their shards."""
    from windlass.config import check_recipe

    model = {
        "family": "qwen3", "hidden_size": size.hidden_size, "intermediate_size": 3 * size.hidden_size,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size.hidden_size // 4,
        "max_position_embeddings": size.sequence_length, "rope_theta": 10000, "tie_word_embeddings": True,
        "initializer_range": size.hidden_size**-0.5,
    }  # fmt: skip
    data = {
        "sources": sources, "tokenizer": {"train": size.vocabulary}, "directory": str(folder / f"{name}-data"),
        "sequence_length": size.sequence_length, "validation": {"path": str(folder / "validation.jsonl")},
        "shard_bytes": size.shard_samples * 8 * (size.sequence_length + 1), **TRAINED[name],
    }  # fmt: skip
    run = {"directory": str(folder / f"{name}-{seed}"), "steps": steps, "seed": seed, "micro_batch": size.rows}
    tree = {
        "run": {**run, "tokens_per_step": size.rows * size.sequence_length}, "model": model, "data": data,
        "optim": {"learning_rate": size.rate, "warmup_steps": steps // 10, "floor": 0.05},
        "checkpoint": {"keep_last": 1}, "report": {"every_steps": 20},
        "evaluate": {"every_steps": steps, "sequences": 10_000},
    }  # fmt: skip
    return check_recipe(tree)


def losses_of(run: Path) -> list[tuple[int, float]]:
    """(step, validation loss), in the order of time."""
    lines = map(json.loads, (run / "events.jsonl").read_text("utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "validation"]


def trained(folder: Path, english: Path, meetings: Path, size: Size, seeds: Iterable[int] = SEEDS) -> Iterator[Row]:
    from windlass import train
    from windlass.training.preflight import prepare_only

    sources = write_corpus(folder, english, meetings, size)
    prepare_only(recipe(folder, "global", sources, size, 100, 0), with_weights=False)
    shards = json.loads((folder / "global-data" / "train" / "index.json").read_text())["shards"]
    steps = sum(shard["samples"] for shard in shards) // size.rows  # one epoch, but for a rest
    for seed in seeds:
        for name in TRAINED:
            train(recipe(folder, name, sources, size, steps, seed), raise_on_stop=True)
            last, loss = losses_of(folder / f"{name}-{seed}")[-1]
            assert last == steps
            yield {"order": name, "seed": seed, "validation": round(loss, 4), "steps": steps, "shards": len(shards)}


def record(name: str, made: Row) -> None:
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(kept | {name: made}, indent=1) + "\n")


def main() -> None:
    match sys.argv[1:]:
        case ["order"]:
            corpus = {"shards": SHARDS, "samples_per_shard": SAMPLES, "sources": SOURCES, "hosts": HOSTS}
            record("order", corpus | {"rows": list(orders())})
        case ["train", english, meetings]:
            import torch

            from windlass.hardware import cpu_name

            torch.set_num_threads(1)
            load, size = round(os.getloadavg()[0], 2), Size()
            with tempfile.TemporaryDirectory() as folder:
                rows = list(trained(Path(folder), Path(english), Path(meetings), size))
            machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "load_before": load}
            facts = {"date": datetime.date.today().isoformat(), "machine": machine, "torch": torch.__version__}
            record("train", facts | {"size": size._asdict(), "rows": rows})
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
