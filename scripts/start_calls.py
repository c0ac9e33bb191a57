"""What a host asks for before its ranks train, and what it fetches for them, counted in real runs of this machine.

    python scripts/start_calls.py

directory   `windlass train` of a prepared directory, two ranks, one step: calls of open, stat and listing below the directory, by
            rank, from the start to the end of the run; how many shard files they look at, and how many they open
store       eight ranks of one host read a first epoch of a set at a URL through one cache: files that are read from the store
            before the first batch, and how often each shard is

scripts/scale.py writes the rows, docs/scale.md shows them.
"""

import builtins
import io
import json
import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LENGTH, SHARD_BYTES, RANKS = 31, 4096, 8
SHARD, LISTING = ".mds", ""


@contextmanager
def counted(directory: Path) -> Iterator[dict[str, Counter[str]]]:
    """Calls of open, stat and listing on files below `directory`, by kind and path, while the block runs."""
    calls: dict[str, Counter[str]] = {"open": Counter(), "stat": Counter(), "list": Counter()}
    places = [(builtins, "open", "open"), (io, "open", "open"), (os, "open", "open"), (os, "stat", "stat")]
    places += [(os, "lstat", "stat"), (os, "listdir", "list"), (os, "scandir", "list")]
    kept = [(module, name, getattr(module, name)) for module, name, _ in places]
    below = f"{directory}{os.sep}"

    def noting(kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            path = given[0] if given else ""
            if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}{os.sep}".startswith(below):
                calls[kind][os.path.relpath(os.fspath(path), directory)] += 1
            return real(*given, **named)

        return call

    for (module, name, kind), (_, _, real) in zip(places, kept):
        setattr(module, name, noting(kind, real))
    try:
        yield calls
    finally:
        for module, name, real in kept:
            setattr(module, name, real)


def recipe_of(folder: Path, num_shards: int, batch: int = 2, **data: Any) -> dict[str, Any]:
    """Of a run of one step over about that number of shards, with a global batch of `batch` samples."""
    samples = SHARD_BYTES // (8 * (LENGTH + 1))
    text = folder / "text.txt"
    if not text.exists():
        words = (f"{number:09}\n" for number in range(num_shards * samples * LENGTH // 10 + 1))
        text.write_text("".join(words))
    model = {
        "family": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    }  # fmt: skip
    settings = {
        "sources": [{"path": str(text)}], "tokenizer": {"train": 257}, "directory": str(folder / "data"),
        "sequence_length": LENGTH, "shard_bytes": SHARD_BYTES, "validation": "none", **data,
    }  # fmt: skip
    run = {"directory": str(folder / "run"), "steps": 1, "tokens_per_step": batch * LENGTH, "micro_batch": 1}
    optim = {"learning_rate": 1e-3, "warmup_steps": 0}
    return {"run": run, "model": model, "data": settings, "optim": optim}


def prepared_at(folder: Path, num_shards: int, **more: Any) -> Any:
    from windlass.config import check_recipe
    from windlass.training.preflight import prepare_only

    config = check_recipe(recipe_of(folder, num_shards, **more))
    return config, prepare_only(config, with_weights=False)


# ---- a directory


def directory_rank(rank: int, world: int, port: int, folder: Path, num_shards: int) -> Row:
    """`looks`: at a shard file, without loading it; `loads`: of one; `small`: calls on all else, which is small."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from windlass import train
    from windlass.config import check_recipe
    from windlass.training import preflight

    preflight.BEFORE_TRAINING = preflight.BEFORE_TRAINING._replace(
        whole_tokens=0
    )  # as of a set that is not linted whole
    config = check_recipe(recipe_of(folder, num_shards))
    with counted(folder / "data") as calls:
        train(config, raise_on_stop=True)
    of_shards = {kind: sum(n for path, n in found.items() if path.endswith(SHARD)) for kind, found in calls.items()}
    every = sum(found.total() for found in calls.values())
    return {
        "looks": of_shards["stat"] - of_shards["open"],  # each load begins with a look
        "loads": of_shards["open"],
        "small": every - sum(of_shards.values()),
    }


def directory(num_shards: int, apart: Callable[..., list[Row]]) -> Row:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _, prepared = prepared_at(folder, num_shards)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = apart([(directory_rank, (rank, 2, port, folder, num_shards)) for rank in range(2)])
    names = ("first", "other")
    counts = {f"{name}_{key}": value for name, row in zip(names, ranks) for key, value in row.items()}
    return {"what": "start", "shards": len(prepared.shards("train").shards), **counts}


# ---- a store


def store_rank(rank: int, hosts: int, folder: Path, num_shards: int, more: dict[str, Any]) -> Row:
    from windlass.config import check_recipe
    from windlass.data.prepare.manifest import open_prepared
    from windlass.data.stream.loader import BatchCut
    from windlass.data.stream.open_order import Opening
    from windlass.data.stream.open_stream import open_stream
    from windlass.object_store import Store
    from windlass.training.preflight import prepare_only

    reads: Counter[str] = Counter()
    read, sizes = Store.read, Store.sizes

    def noted_read(store: Store, name: str) -> bytes:
        reads[name] += 1
        return read(store, name)

    def noted_sizes(store: Store) -> dict[str, int]:
        reads[LISTING] += 1
        return sizes(store)

    Store.read, Store.sizes = noted_read, noted_sizes  # type: ignore[method-assign]
    config = check_recipe(recipe_of(folder, num_shards, **more))
    prepared = prepare_only(config, with_weights=False) if rank == 0 else open_prepared(config.data, {}, looks=False)
    ranks = hosts * RANKS
    source = open_stream(Opening(prepared, config.data, BatchCut(1, 1, rank, ranks, rank), seed=0))
    for _ in range(prepared.sets["train"].samples // ranks):
        source.next()
    source.close()
    return dict(reads)


def store(hosts: int, num_shards: int, apart: Callable[..., list[Row]]) -> Row:
    """The first of `hosts` hosts, in as many lanes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        more: dict[str, Any] = {"directory": f"file://{folder}/store", "order": {"lanes": hosts}}
        more["batch"] = hosts * RANKS
        more["cache"] = {"directory": str(folder / "cache"), "limit_mib": 1024}
        _, prepared = prepared_at(folder, num_shards, **more)
        of_set = len(prepared.shards("train").shards)
        shutil.rmtree(folder / "cache")
        ranks = apart([(store_rank, (rank, hosts, folder, num_shards, more)) for rank in range(RANKS)])
    total: Counter[str] = sum((Counter(row) for row in ranks), Counter())
    fetched = {name: count for name, count in total.items() if name.endswith(SHARD)}
    return {
        "what": "host", "hosts": hosts, "ranks_of_host": RANKS, "shards": of_set,
        "listings": total[LISTING], "small": total.total() - total[LISTING] - sum(fetched.values()),
        "shards_fetched": len(fetched), "fetches": sum(fetched.values()),
    }  # fmt: skip


if __name__ == "__main__":
    from scale import apart  # beside this file

    print(json.dumps([directory(num_shards, apart) for num_shards in (64, 256)], indent=1))
    print(json.dumps([store(hosts, 64, apart) for hosts in (1, 4)], indent=1))
