"""What a checkpoint costs: hashing on the save's critical path, the stall of an asynchronous save, the commit.

    python benchmarks/checkpoint.py [--mib 256] [--pairs 15] [--ranks 2] [--directory DIR]

Hashing: the same save with the hash and with a replacement that returns a constant, in interleaved pairs (the order alternates),
so that a disk that slows down weighs on both; pairs during which other processes took a fifth of a core are thrown away and
counted. Shown as the median of the pairs' relative differences with their quartiles, beside what the hash would add if it did not
overlap the write. The time is from the first exchange to the commit, on the rank that takes longest, with the files on disk
(fsync). The same in a file system in memory, where nothing waits for a disk and hashing has the least to hide behind.
Results are written to benchmarks/results/checkpoint.json.
"""

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.commit import delete_checkpoint
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.hashed_file import PIECE_BYTES
from windlass.checkpoint.save import Plan, TensorWriter, plan_save, write_planned
from windlass.checkpoint.sealed_json import digest, seal
from windlass.hardware import cpu_name
from windlass.proof.pool import Ranks

MAX_FOREIGN = 0.2  # of one core, outside of the kernel (its threads that write our pages back do not count)
MAX_ATTEMPTS = 20
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
    writer = TensorWriter(
        directory, step, "bench", lambda token: {"trainer_state.json": seal({"token": token})}, digest=hash
    )
    dist.barrier()
    start_s = time.perf_counter()
    plan = Plan()
    plan_save(tensors, exchange, plan)
    write_planned(local, writer, exchange, plan)
    seconds = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if exchange.rank == 0:
        delete_checkpoint(directory, step, "bench")
    dist.barrier()
    return float(seconds)


def user_s() -> float:
    """CPU seconds that all processes of this machine have spent outside of the kernel (/proc/stat)."""
    user, nice = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:3])
    return (user + nice) / os.sysconf("SC_CLK_TCK")


def hash_case(directory: Path, mib: int, pairs: int) -> tuple[list[tuple[float, float]], int]:
    """(seconds with the hash, seconds without) per undisturbed pair, and how many pairs were thrown away as disturbed.

    A pair is disturbed when other processes took more than MAX_FOREIGN of one core meanwhile. The first pair never counts.
    """
    exchange = Exchange(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    tensors, kept, thrown = make_tensors(mib), [], 0
    for pair in range(MAX_ATTEMPTS * pairs):
        order = (digest, no_digest) if pair % 2 else (no_digest, digest)
        start_s, user_start_s, own_start_s = time.perf_counter(), user_s(), os.times().user
        seconds = {kind: one_save(directory, tensors, 2 * pair + at, kind, exchange) for at, kind in enumerate(order)}
        foreign_s = torch.tensor(os.times().user - own_start_s)
        dist.all_reduce(foreign_s)
        foreign_s = user_s() - user_start_s - foreign_s
        dist.broadcast(foreign_s, 0)
        if pair == 0:
            continue
        if float(foreign_s) > MAX_FOREIGN * (time.perf_counter() - start_s):
            thrown += 1
        else:
            kept.append((seconds[digest], seconds[no_digest]))
        if exchange.from_first(lambda: len(kept) == pairs):
            break
    return kept, thrown


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


def hash_speed() -> float:
    """Bytes per second of one core that hashes 256 MiB piece by piece; the best of five."""
    data, best_s = memoryview(bytearray(random.randbytes(64 << 20) * 4)), math.inf
    for _ in range(5):
        start_s = time.perf_counter()
        for at in range(0, len(data), PIECE_BYTES):
            digest(data[at : at + PIECE_BYTES])
        best_s = min(best_s, time.perf_counter() - start_s)
    return len(data) / best_s


def hash_result(ranks: Ranks, world: int, place: Path, mib: int, pairs: int) -> dict:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        found, thrown = ranks.run(world, hash_case, Path(directory), mib, pairs, timeout_s=1800)[0]
    if len(found) < 2:
        return {"ranks": world, "mib_per_rank": mib, "pairs": len(found), "pairs_thrown_away_as_disturbed": thrown}
    return {
        "ranks": world,
        "mib_per_rank": mib,
        "pairs": len(found),
        "pairs_thrown_away_as_disturbed": thrown,
        "with_hash_s": spread([with_hash for with_hash, _ in found]),
        "without_hash_s": spread([without for _, without in found]),
        "extra_percent_if_it_did_not_overlap": 100
        * (mib << 20)
        / hash_speed()
        / statistics.median(b for _, b in found),
        "extra_percent": spread([100 * (with_hash / without - 1) for with_hash, without in found]),
        "extra_percent_of_medians": 100
        * (statistics.median(a for a, _ in found) / statistics.median(b for _, b in found) - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
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
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "platform": platform.system()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_before": load,
        "hash_gb_per_s": hash_speed() / 1e9,
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
