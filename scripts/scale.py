"""What start-up, layout, planning, index and stream take on 8 to 16,384 ranks, counted here.

    python scripts/scale.py [--worlds 8 64 512 4096 16384] [--real 2 4 8 16]

build, plan, stream   the code that a rank runs, as rank 0 of a world of N ranks: torch's `fake` process group sends nothing, and
                      parameters are on meta. Every measurement has a process of its own; seconds are CPU seconds
real                  N processes on this machine, gloo between them: sockets that a rank holds, and its requests to the store

Rows go to benchmarks/results/scale.json, docs/scale.md shows them. The model is one layer of Llama-3-8B with its embedding and
head; what is said of the whole model is the pieces of its 32 layers, counted, times the seconds per piece.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import pickle
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import windlass.runtime
from windlass.checkpoint.exchange import Exchange
from windlass.checkpoint.hashed_file import FileEntry
from windlass.checkpoint.index import parse_index, seal_index
from windlass.checkpoint.manifest import SCHEMA, Manifest, rank_name
from windlass.checkpoint.staging import LocalPlanner
from windlass.checkpoint.storage import StoredPlace, chunk_bytes, saved_tensors
from windlass.data.config import DataConfig
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.order import Order
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.config import ModelConfig
from windlass.model.init import initialise
from windlass.parallel.build import build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.parallel.program import Program
from windlass.precision.config import PrecisionConfig
from windlass.precision.policy import precision_of
from windlass.ranks.stopping import Stop
from windlass.runtime import start_runtime
from windlass.signals import Signals
from windlass.training.restore import nothing

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
    program = build_program(architecture, config, precision, mesh, torch.device("meta"), nothing)
    seconds = time.process_time() - start_s
    return program, {"mesh_s": round(mesh_s, 3), "build_s": round(seconds - mesh_s, 3)}


def build(world: int, kind: str) -> Row:
    program, row = fake_program(world, kind)
    return {"what": "build", "layout": kind, "ranks": world, **row, "parameters": len(program.records())}


# ---- planning


def plans_of_all(program: Program, world: int) -> list[SavePlan]:
    """What every rank asks for, from the cut that each parameter says it has at every place of its mesh."""
    items: list[list[WriteItem]] = [[] for _ in range(world)]
    for prefix in STATES:
        for record in program.records():
            tensor = record.tensor.detach()
            planner = LocalPlanner({})
            planner.set_up_planner({prefix + record.name: tensor}, None, True)
            (own,) = planner.create_local_plan().items
            for rank, start, length in rows_of_ranks(tensor, world):
                items[rank].append(_item_of(own, start, length))
    return [SavePlan(one) for one in items]


def rows_of_ranks(tensor: torch.Tensor, world: int) -> list[tuple[int, int, int]]:
    """(rank, first row, rows) of each part that is not empty: FSDP2 cuts dim 0 in chunks of one size, the last less."""
    assert isinstance(tensor, DTensor)
    inside = tensor.device_mesh.size(-1)
    step = math.ceil(tensor.shape[0] / inside)
    starts = [(rank, rank % inside * step) for rank in range(world)]
    return [(rank, at, min(step, tensor.shape[0] - at)) for rank, at in starts if at < tensor.shape[0]]


def _item_of(own: WriteItem, start: int, length: int) -> WriteItem:
    """Rank 0's, for other rows."""
    assert own.tensor_data is not None
    rest = own.tensor_data.chunk.sizes[1:]
    offsets = torch.Size([start, *(0 for _ in rest)])
    chunk = ChunkStorageMetadata(offsets, torch.Size([length, *rest]))
    index = MetadataIndex(own.index.fqn, offsets)
    return dataclasses.replace(own, index=index, tensor_data=dataclasses.replace(own.tensor_data, chunk=chunk))


def plan(world: int, kind: str, model: dict[str, Any] = LLAMA) -> Row:
    """A first save and a later one, as rank 0 has them; and what a restore parses on every rank."""
    program, _ = fake_program(world, kind, model=model)
    asked = plans_of_all(program, world)
    sent = sum(len(pickle.dumps(one)) for one in asked[:: max(1, world // 64)]) * max(1, world // 64)
    planner = LocalPlanner({})
    start_s = time.process_time()
    plans, metadata = planner.create_global_plan(asked)
    plan_s = time.process_time() - start_s
    results, entries = [], {}
    for rank, one in enumerate(plans):
        sizes = [chunk_bytes(item) for item in one.items]
        starts = np.cumsum([64, *sizes]).tolist()
        places = [StoredPlace(rank_name(rank), at) for at in starts[:-1]]
        results += [WriteResult(*made) for made in zip((item.index for item in one.items), sizes, places)]
        entries[rank_name(rank)] = FileEntry(size=starts[-1], hash="0" * 32)
    start_s = time.process_time()
    index = seal_index(saved_tensors(metadata, results), TOKEN)
    index_s = time.process_time() - start_s
    manifest = Manifest(
        schema_version=SCHEMA, run_id="r", step=1, world=world, token=TOKEN, time="2026-01-01T00:00:00Z", metric=None,
        files=entries,
    )  # fmt: skip
    start_s = time.process_time()
    parse_index(index, manifest)
    parse_s = time.process_time() - start_s
    whole = pieces_of(architecture_of(model, 32), world, kind)
    return {
        "what": "plan", "layout": kind, "ranks": world, "pieces": len(results), "asked": sum(len(p.items) for p in asked),
        "plan_s": round(plan_s, 2), "plan_bytes": sent, "index_s": round(index_s, 2), "index_bytes": len(index),
        "parse_s": round(parse_s, 2), "memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "later_pieces": 0, "later_bytes": sum(len(pickle.dumps(entry)) for entry in entries.values()),
        "whole_pieces": whole, "whole_plan_s": round(plan_s / sum(len(p.items) for p in asked) * whole[1]),
        "whole_index_mib": round(len(index) / len(results) * whole[0]) >> 20,
    }  # fmt: skip


def pieces_of(architecture: Architecture, world: int, kind: str) -> tuple[int, int]:
    """(pieces saved, pieces asked for) of a whole model and its two moments; counted from shapes."""
    inside = min(world, RANKS_PER_HOST) if kind == "hosts" else world
    rows = [shape[0] for shape in parameter_shapes(architecture).values()]
    saved = sum(math.ceil(row / math.ceil(row / inside)) for row in rows) * len(STATES)
    return saved, saved * (world // inside)


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
    ours = [fields for line in lines if (fields := line.split())[9] in own]
    served = sum(fields[1].endswith(f":{server_port:04X}") for fields in ours)
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
        exchange.reduce_scatter(lambda: rank, list)
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
            architecture, config, precision, mesh, torch.device("cpu"),
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
    """Each call in a process of its own, side by side, forked from a server that has no threads: the caller may have some."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(len(calls), context, **one_thread, max_tasks_per_child=1) as pool:
        return [row.result() for row in [pool.submit(function, *given) for function, given in calls]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--real", type=int, nargs="*", default=REAL)
    asked = parser.parse_args()
    calls = [(what, (world, kind)) for what in (build, plan) for kind in ("shard", "hosts") for world in asked.worlds]
    calls += [(stream, (world,)) for world in asked.worlds]
    calls += [(reading, (world,)) for world in asked.worlds if world in (512, 16384)]
    rows = []
    for call in calls:
        rows += apart([call])
        print(json.dumps(rows[-1]), flush=True)
    for world in asked.real:
        rows.append(real(world))
        print(json.dumps(rows[-1]), flush=True)
    made = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    RESULTS.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
