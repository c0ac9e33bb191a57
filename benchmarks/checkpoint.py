"""What a checkpoint costs: hashing on the save's critical path, the stall of an asynchronous save, the commit.

    python benchmarks/checkpoint.py [--mib 256] [--pairs 15] [--ranks 2] [--directory DIR]

Hashing: the same save with the hash and with a stand-in that returns a constant, in interleaved pairs (the order alternates), so
that a disk that slows down or a neighbour on the machine weighs on both. Told as the median of the pairs' relative differences
with their quartiles. The time is from the first exchange to the commit, on the rank that takes longest; the files are on disk
(fsync). The same is done in a file system in memory, where nothing waits for a disk and hashing has the least to hide behind.
Results are written to benchmarks/results/checkpoint.json.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.save import write_checkpoint
from windlass.checkpoint.sealed import digest, seal
from windlass.checkpoint.state import Checkpoints
from windlass.checkpoint.storage import TensorWriter
from windlass.checkpoint.store import delete
from windlass.launch.ranks import Ranks

RESULTS = Path(__file__).parent / "results" / "checkpoint.json"


def no_digest(data) -> str:
    return "0" * 32


def make_tensors(mib: int) -> dict[str, torch.Tensor]:
    """`mib` MiB in this rank's own tensors: matrices of 16 MiB, and for each nine small vectors, like a transformer's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    tensors: dict[str, torch.Tensor] = {}
    for number in range(mib // 16):
        for name, shape in [("matrix", (4096, 1024)), *((f"vector{small}", (1024,)) for small in range(9))]:
            local = torch.randn(shape)
            tensors[f"{number}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return tensors


def one_save(directory: Path, tensors: dict[str, torch.Tensor], step: int, hash, exchange: Exchange) -> float:
    """Seconds of one save, the slowest rank's. The checkpoint is deleted again."""
    local = {name: tensor.to_local() for name, tensor in tensors.items()}
    writer = TensorWriter(directory, step, "bench", lambda token: {"capsule.json": seal({"token": token})}, digest=hash)
    dist.barrier()
    start_s = time.perf_counter()
    write_checkpoint(tensors, local, writer, exchange)
    seconds = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if exchange.rank == 0:
        delete(directory, step, "bench")
    dist.barrier()
    return float(seconds)


def hash_case(directory: Path, mib: int, pairs: int) -> list[tuple[float, float]]:
    """(seconds with the hash, seconds without) per pair, after one pair that is thrown away."""
    exchange = Exchange(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    tensors, found = make_tensors(mib), []
    for pair in range(pairs + 1):
        order = (digest, no_digest) if pair % 2 else (no_digest, digest)
        seconds = {kind: one_save(directory, tensors, 2 * pair + at, kind, exchange) for at, kind in enumerate(order)}
        found.append((seconds[digest], seconds[no_digest]))
    return found[1:]


def stall_case(directory: Path, mib: int, saves: int) -> list[tuple[float, float, float]]:
    """(stall, seconds until committed, of these the commit alone) per asynchronous save, after one thrown away."""
    config = CheckpointConfig.model_validate({"async": True, "keep_last": 1})
    group, rank, world = dist.new_group(backend="gloo"), dist.get_rank(), dist.get_world_size()
    checkpoints = Checkpoints(directory, config, run_id="bench", rank=rank, world=world, group=group)
    tensors, found = make_tensors(mib), []
    for step in range(1, saves + 2):
        checkpoints.save(step, tensors, {}, {})
        checkpoints.wait()
        found += [(saved.stall_s, saved.elapsed_s) for saved in checkpoints.poll()]
    return found[1:]


def commit_case(directory: Path, saves: int) -> list[float]:
    """Seconds of saving next to nothing (64 numbers per rank): exchanges, manifest, fsyncs, rename."""
    exchange = Exchange(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    tensors = {"only": make_tensors(16)["0.vector0"]}
    return [one_save(directory, tensors, step, digest, exchange) for step in range(saves + 1)][1:]


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartile_1": low, "quartile_3": high, "min": min(values), "max": max(values)}


def hash_result(ranks: Ranks, world: int, place: Path, mib: int, pairs: int) -> dict:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        found = ranks.run(world, hash_case, Path(directory), mib, pairs, timeout_s=1800)[0]
    return {
        "ranks": world,
        "mib_per_rank": mib,
        "pairs": pairs,
        "with_hash_s": spread([with_hash for with_hash, _ in found]),
        "without_hash_s": spread([without for _, without in found]),
        "extra_percent": spread([100 * (with_hash / without - 1) for with_hash, without in found]),
        "extra_percent_of_medians": 100
        * (statistics.median(a for a, _ in found) / statistics.median(b for _, b in found) - 1),
    }


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    arguments = parser.parse_args()
    ranks, mib, pairs = Ranks(), arguments.mib, arguments.pairs
    places = {"disk": arguments.directory} | ({"memory": Path("/dev/shm")} if Path("/dev/shm").is_dir() else {})
    hashing = {
        f"{name}, {world} rank{'s' if world > 1 else ''}": hash_result(ranks, world, place, mib, pairs)
        for name, place in places.items()
        for world in sorted({1, arguments.ranks})
    }
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        stalls = ranks.run(arguments.ranks, stall_case, Path(directory) / "stall", 96, 10, timeout_s=600)[0]
        commits = ranks.run(arguments.ranks, commit_case, Path(directory) / "commit", 20, timeout_s=600)[0]
    ranks.close()
    result = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": f"python benchmarks/checkpoint.py --mib {mib} --pairs {pairs} --ranks {arguments.ranks}",
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "platform": platform.system()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hashing": hashing,
        "asynchronous_save_of_192_mib_over_ranks": {
            "stall_s": spread([stall for stall, _ in stalls]),
            "committed_after_s": spread([elapsed for _, elapsed in stalls]),
        },
        "empty_save_s": spread(commits),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
