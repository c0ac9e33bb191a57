"""What start-up, layout, planning, index and stream take on 8 to 16,384 ranks, counted here.

    python scripts/scale.py [--worlds 8 64 512 4096 16384] [--real 2 4 8 16] [--only start host]

build, plan, stream   the code that a rank runs, as rank 0 of a world of N ranks: torch's `fake` process group sends nothing, and
                      parameters are on meta. Every measurement has a process of its own; seconds are CPU seconds
real                  N processes on this machine, gloo between them: sockets that a rank holds, and its requests to the store
start, host           real runs, too: what a host asks for before its ranks train, and what it fetches for them (start_calls.py)

Rows go to benchmarks/results/scale.json, docs/scale.md shows them. The model is Llama-3-8B: all of it where a save is planned,
one layer with its embedding and head where a layout is built.
"""

import argparse
import json
import math
import multiprocessing
import os
import pickle
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import windlass.runtime
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.grid import Box, Grid, RankPart, join_all
from windlass.checkpoint.hashed_file import FileEntry
from windlass.checkpoint.index import pack_boxes, parse_boxes, parse_tensor_index, seal_index
from windlass.checkpoint.manifest import SCHEMA, Manifest, rank_name
from windlass.checkpoint.save import HeldTensor, choose_writers, held_tensors, join_held
from windlass.checkpoint.sealed_json import seal, unseal
from windlass.checkpoint.staging import local_box
from windlass.data.config import DataConfig
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.order import Order
from windlass.model.architecture import Architecture
from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.program import Program
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.ranks.stopping import Stop
from windlass.ranks.tree import children_of
from windlass.runtime import start_runtime
from windlass.signals import Signals
from windlass.training.start.restore import nothing

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "scale.json"
WORLDS, REAL = (8, 64, 512, 4096, 16384), (2, 4, 8, 16)
RANKS_PER_HOST = 8
STATES = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
LLAMA = {
    "family": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TINY = {**LLAMA, "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
TINY["num_key_value_heads"] = 1
SHARDS, SAMPLES = 1024, 1024  # of the stream: 1,024 shards of 1,024 samples
TRILLION, LENGTH, ID_BYTES = 10**12, 4096, 2  # of what a host reads: tokens, per sample, and bytes of an id
STEPS = 10  # of which the requests to the store are counted
TOKEN = "0" * 16

Row = dict[str, Any]
Made = TypeVar("Made")


def architecture_of(model: dict[str, Any], layers: int) -> Architecture:
    return ModelConfig.model_validate({**model, "num_hidden_layers": layers}).architecture()


def layout_of(world: int, kind: str) -> ParallelConfig:
    """`shard`: cut over all ranks. `hosts`: cut inside a host, a replica on each."""
    inside = min(world, RANKS_PER_HOST) if kind == "hosts" else world
    return ParallelConfig(shard=inside, replicate=world // inside)


def fake_program(world: int, kind: str, layers: int = 1, model: dict[str, Any] = LLAMA) -> tuple[Program, Row]:
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    config = layout_of(world, kind)
    start_s = time.process_time()
    mesh = make_mesh(config.layout(world), "cpu")
    mesh_s = time.process_time() - start_s
    architecture, precision = architecture_of(model, layers), precision_of(PrecisionConfig(policy="bf16"))
    program = build_program(architecture, Parallelism(config, precision, mesh, torch.device("meta")), nothing)
    seconds = time.process_time() - start_s
    return program, {"mesh_s": round(mesh_s, 3), "build_s": round(seconds - mesh_s, 3)}


def build(world: int, kind: str) -> Row:
    program, row = fake_program(world, kind)
    return {"what": "build", "layout": kind, "ranks": world, **row, "parameters": len(program.records())}


# ---- planning


def boxes_of_ranks(tensor: torch.Tensor, world: int) -> list[Box]:
    """By rank: FSDP2 cuts dim 0 in parts of one size, the last less, some empty."""
    assert isinstance(tensor, DTensor)
    inside, (rows, *rest) = tensor.device_mesh.size(-1), tensor.shape
    step = math.ceil(rows / inside)
    starts = [min(rank % inside * step, rows) for rank in range(world)]
    return [Box((at, *(0 for _ in rest)), (min(step, rows - at), *rest)) for at in starts]


def held_below(boxes: list[Box], rank: int) -> list[Grid]:
    """What `rank` sends to its parent of a tensor: its own box and those of the ranks below it."""
    grids = [Grid.of(RankPart(rank, boxes[rank]))] if boxes[rank].num_elements else []
    for child in children_of(rank, len(boxes)):
        grids = join_all(grids, held_below(boxes, child))
    return grids


def plan(world: int, kind: str, model: dict[str, Any] = LLAMA, layers: int = 32) -> Row:
    """A plan as rank 0 makes it, which has most to do; and what a save writes and a restore parses, on every rank."""
    program, _ = fake_program(world, kind, layers, model)
    tensors = {prefix + record.name: record.tensor.detach() for prefix in STATES for record in program.records()}
    cuts = {tensor.shape: boxes_of_ranks(tensor, world) for tensor in tensors.values()}
    assert all(local_box(tensor) == cuts[tensor.shape][0] for tensor in tensors.values()), "as torch says of rank 0"
    sent = [_sent_by(child, tensors, cuts) for child in children_of(0, world)]
    start_s = time.process_time()
    held = held_tensors(0, tensors, {name: local_box(tensor) for name, tensor in tensors.items()})
    for message in sent:
        held = join_held(held, pickle.loads(message))
    saved = choose_writers(held, world)
    answer = pickle.dumps(saved)
    plan_s = time.process_time() - start_s
    own, lookup_s = timed(lambda: {n: box for n, t in tensors.items() if saved[n].holder(box := local_box(t)) == 0})
    index, index_s = timed(lambda: seal_index(saved, TOKEN))
    entry = FileEntry(size=sum(saved[name].num_bytes_of(box) for name, box in own.items()), hash="0" * 32)
    writers = {
        part.rank for grid in {grid for tensor in saved.values() for grid in tensor.grids} for part in grid.parts()
    }
    entries = {rank_name(rank): entry for rank in sorted(writers)}
    manifest = Manifest(
        schema_version=SCHEMA, run_id="r", step=1, world=world, token=TOKEN, time="2026-01-01T00:00:00Z", metric=None,
        files=entries,
    )  # fmt: skip
    sealed = seal(manifest.model_dump())
    _, parse_s = timed(lambda: parse_tensor_index(index, manifest))
    places = pack_boxes(own)
    _, file_parse_s = timed(lambda: parse_boxes(places, 0, rank_name(0), entry.size, saved))
    manifest_s = timed(lambda: Manifest.model_validate(unseal(sealed, "MANIFEST")))[1]
    return {
        "what": "plan", "layout": kind, "ranks": world, "tensors": len(tensors),
        "boxes": sum(grid.num_parts for tensor in saved.values() for grid in tensor.grids),
        "grids": sum(len(tensor.grids) for tensor in saved.values()),
        "plan_s": round(plan_s, 2), "plan_bytes": sum(map(len, sent)), "answer_bytes": len(answer),
        "lookup_s": round(lookup_s, 2), "index_s": round(index_s, 2), "index_bytes": len(index), "parse_s": round(parse_s, 2),
        "file_index_bytes": len(places), "file_parse_s": round(file_parse_s, 2),
        "files": len(entries), "later_bytes": sum(len(pickle.dumps(entry)) for entry in entries.values()),
        "manifest_bytes": len(sealed), "manifest_s": round(manifest_s, 2),
    }  # fmt: skip


def _sent_by(child: int, tensors: dict[str, torch.Tensor], cuts: dict[torch.Size, list[Box]]) -> bytes:
    grids = {shape: held_below(boxes, child) for shape, boxes in cuts.items()}
    held = {name: HeldTensor("float32", tuple(tensor.shape), grids[tensor.shape]) for name, tensor in tensors.items()}
    return pickle.dumps({name: one._replace(grids=[g.model_copy() for g in one.grids]) for name, one in held.items()})


def timed(work: Callable[[], Made]) -> tuple[Made, float]:
    """What `work` makes, and its CPU seconds."""
    start_s = time.process_time()
    return work(), time.process_time() - start_s


# ---- the stream


def stream(world: int) -> Row:
    """What the first host reads in an epoch, from the order alone, where every rank takes one sample of a global batch."""
    window = DataConfig.model_fields["shuffle_window"].default
    order, per_host = Order([SAMPLES] * SHARDS, 0, window), min(world, RANKS_PER_HOST)
    start_s = time.process_time()
    order.take(world * STEPS, world)
    take_s = time.process_time() - start_s
    places_N2 = order.take(0, order.num_samples)
    own = np.arange(order.num_samples) % world < per_host
    return {
        "what": "stream", "ranks": world, "hosts": world // per_host, "shards": SHARDS, "window": window,
        "shards_touched": len(set(places_N2[own, 0].tolist())), "samples_read": int(own.sum()),
        "take_ms": round(1000 * take_s, 2),
    }  # fmt: skip


def reading(world: int) -> Row:
    """What the first host reads of 1T tokens in an epoch, in the plain order and in lanes, one lane per host: shards touched, and
    their bytes. Every rank takes 8 samples of 4,096 tokens of a global batch, or 1 where that is 2^26 tokens."""
    window, hosts = DataConfig.model_fields["shuffle_window"].default, world // RANKS_PER_HOST
    num_shards = -(-TRILLION // (SAMPLES * LENGTH))
    batch = world * (8 if world < 4096 else 1)
    row: Row = {"what": "reading", "ranks": world, "hosts": hosts, "shards": num_shards}
    own, samples = range(batch // hosts), [SAMPLES] * num_shards
    lanes = LaneOrder(samples, 0, window, hosts, batch // hosts, own)
    for name, order in (("plain", Order(samples, 0, window)), ("lanes", lanes)):
        touched = np.zeros(num_shards + 1, bool)  # the last: a place that is not read
        for start in range(0, order.num_samples, batch):
            touched[order.take(start, batch)[own.start : own.stop, 0]] = True
        row[name] = int(touched[:-1].sum())
        row[f"{name}_gb"] = round(row[name] * SAMPLES * (LENGTH + 1) * ID_BYTES / 1e9, 1)
    return row


# ---- real worlds


class Counting(dist.Store):
    """A store that counts its requests."""

    def __init__(self, inner: dist.Store):
        super().__init__()
        self._inner, self.requests = inner, 0

    def __getattribute__(self, name: str) -> Any:
        if name not in ("set", "get", "add", "compare_set", "check", "wait", "multi_get", "multi_set", "append"):
            return super().__getattribute__(name)

        def ask(*given: Any) -> Any:
            self.requests += 1
            return getattr(self._inner, name)(*given)

        return ask

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: Any) -> None:
        self._inner.set_timeout(timeout)


def sockets(server_port: int) -> tuple[int, int]:
    """(TCP sockets of this process, those among them that serve the store)."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # the listing's own
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]]
    # By inode: the kernel's table is no snapshot, and a socket can be in it twice where others come and go.
    ours = {fields[9]: fields[1] for line in lines if (fields := line.split())[9] in own}
    served = sum(address.endswith(f":{server_port:04X}") for address in ours.values())
    return len(ours) - served, served


def real_rank(rank: int, world: int, port: int) -> Row:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    forked = sockets(port)[0]  # what a fork of this process holds beside its own
    meet, found = windlass.runtime.meet, list[Counting]()
    windlass.runtime.meet = lambda *where: found.append(Counting(meet(*where))) or found[0]
    with start_runtime() as runtime:
        (store,) = found
        config = layout_of(world, "shard")
        mesh, exchange = make_mesh(config.layout(world), "cpu"), Exchange(rank, world, runtime.saving)
        exchange.reduce(lambda: rank, sum)
        exchange.fold(lambda: rank, max, lambda most: most)
        runtime.gathered(rank)
        stop = Stop(runtime.tree, runtime.store, runtime.device, Signals())
        start_requests, (host_sockets, served) = store.requests, sockets(port)
        runtime.tree.barrier()  # all have counted
        for step in range(1, STEPS + 1):
            stop.after(step)
        row = {"rank": rank, "start_requests": start_requests, "step_requests": store.requests - start_requests}
        architecture = architecture_of(TINY, 2)
        precision = precision_of(PrecisionConfig(policy="fp32"))
        program = build_program(
            architecture, Parallelism(config, precision, mesh, torch.device("cpu")),
            lambda named: initialise(named.items(), architecture, 0),
        )  # fmt: skip
        ids = torch.ones(1, 8, dtype=torch.int64)
        program.run([{"input_ids": ids, "targets": ids}], torch.tensor(8.0 * world))
        runtime.tree.barrier()
        row |= {"host_sockets": host_sockets - forked, "served": served, "cpu_sockets": sockets(port)[0] - forked}
        runtime.tree.barrier()
        return row


def real(world: int) -> Row:
    """The most of any rank. `host_sockets`: of what ranks say to each other on the host, which is all that a rank on a GPU holds
    beside NCCL's; `cpu_sockets`: after a step with ZeRO-3 whose sums go through gloo too; `served`: rank 0's, for the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows = apart([(real_rank, (rank, world, port)) for rank in range(world)])
    most = {key: max(row[key] for row in rows) for key in ("host_sockets", "cpu_sockets", "start_requests")}
    asking = sum(row["step_requests"] > 0 for row in rows)
    return {"what": "real", "ranks": world, **most, "served": rows[0]["served"], "asking": asking,
            "step_requests": sum(row["step_requests"] for row in rows) / STEPS}  # fmt: skip


def apart(calls: list[tuple[Callable[..., Row], tuple[Any, ...]]]) -> list[Row]:
    """Each call in a process of its own, side by side, forked from a server that has no threads: the caller may have some. And in
    a pool of its own: one pool whose workers take a task each waits for ever where a worker ends while others are started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ExitStack() as opened:
        pools = [opened.enter_context(ProcessPoolExecutor(1, context, **one_thread)) for _ in calls]
        return [row.result() for row in [pool.submit(call, *given) for pool, (call, given) in zip(pools, calls)]]


def started(row: Row, counted: Row) -> Row:
    """`row` of 1T tokens, with the calls of its hosts on a directory before step 0, as `counted` on few shards: rank 0 looks at
    each shard, and every rank reads what is small. The shards that ranks load then are no part of it."""
    small = RANKS_PER_HOST * counted["other_small"]
    first = row["shards"] + counted["first_small"] - counted["other_small"] + small
    return {**row, "start_first": first, "start_other": small}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--real", type=int, nargs="*", default=REAL)
    parser.add_argument("--only", nargs="*", help="kinds of rows; the others are kept as they are")
    import start_calls  # beside this file

    asked = parser.parse_args()
    calls = [(what, (world, kind)) for what in (build, plan) for kind in ("shard", "hosts") for world in asked.worlds]
    calls += [(stream, (world,)) for world in asked.worlds]
    calls += [(reading, (world,)) for world in asked.worlds if world in (512, 16384)]
    makers = [(call[0].__name__, lambda call=call: apart([call])[0]) for call in calls]
    makers += [("real", lambda world=world: real(world)) for world in asked.real]
    makers += [("start", lambda count=count: start_calls.directory(count, apart)) for count in (64, 256)]
    makers += [("host", lambda hosts=hosts: start_calls.store(hosts, 64, apart)) for hosts in (1, 4)]
    made: Row = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": []}
    kept = json.loads(RESULTS.read_text()) if asked.only else made
    rows = [row for row in kept["rows"] if row["what"] not in (asked.only or [])]
    for what, make in makers:
        if asked.only is None or what in asked.only:
            rows.append(make() | ({"date": made["date"]} if asked.only else {}))
            print(json.dumps(rows[-1]), flush=True)
    counted = [row for row in rows if row["what"] == "start"]
    rows = [started(row, counted[-1]) if row["what"] == "reading" and counted else row for row in rows]
    known = list(dict.fromkeys(row["what"] for row in kept["rows"] + rows))
    rows.sort(key=lambda row: known.index(row["what"]))  # where rows of the kind were
    RESULTS.write_text(json.dumps({**kept, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
